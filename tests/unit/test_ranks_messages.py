# SPDX-License-Identifier: Apache-2.0
"""Messages between owner and mapper: what is sent is what arrives, and nonsense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.errors import HandshakeMismatch, PeerRefused
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report, Verdict
from kvcached.ranks.messages import (
    HEADER,
    MAX_BODY_BYTES,
    Goodbye,
    Hello,
    Kind,
    StatusRequest,
    TallyRequest,
    check_hello,
    decode_body,
    decode_header,
    encode,
)
from kvcached.ranks.operations import MAX_OPEN_OPS, MAX_TAIL_RUNS, Op, OpKind
from kvcached.ranks.transactions import MAX_RUNS, Abort, Acquire, Answer, Commit, MapNow, Phase, Prepare, Query, Release, Revert
from kvcached.ranks.wire import U64, record

NUMBERS = st.integers(0, 2**64 - 1)
RUNS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20).map(tuple)
TEXT = st.text(max_size=50)
WEIGHT = st.floats(allow_nan=False)
OUTCOMES = st.builds(Outcome, st.sampled_from(Verdict), NUMBERS, st.lists(NUMBERS, max_size=20).map(tuple), TEXT, NUMBERS)
STEPS = st.integers(-(2**63), 2**63 - 1)
OPS = st.lists(st.builds(Op, NUMBERS, st.sampled_from(OpKind), RUNS, STEPS), max_size=3).map(tuple)
MESSAGES = st.one_of(
    st.builds(Hello, TEXT, TEXT, TEXT, TEXT, TEXT),
    st.builds(Acquire, NUMBERS, RUNS, st.booleans(), NUMBERS, OPS),
    st.builds(MapNow, NUMBERS, RUNS, st.booleans(), NUMBERS, OPS),
    st.builds(Release, NUMBERS, RUNS, OPS),
    st.builds(Prepare, NUMBERS, RUNS, STEPS, OPS),
    *(st.builds(kind, NUMBERS, OPS) for kind in (Commit, Abort, Revert, Query)),
    st.builds(Answer, NUMBERS, st.sampled_from(Phase), OUTCOMES, NUMBERS, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=5).map(tuple)),
    st.just(Goodbye()),
    st.just(StatusRequest()),
    st.just(TallyRequest()),
    st.builds(LimitsRequest, NUMBERS, NUMBERS, WEIGHT, NUMBERS),
    st.builds(Report, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    OUTCOMES,
    st.builds(MapperStatus, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(MapperTally, *[st.lists(NUMBERS, max_size=25).map(tuple)] * 4),
)


@given(MESSAGES, NUMBERS)
def test_what_is_sent_is_what_arrives(message, number):
    frame = encode(message, number)
    kind, length, arrived_number = decode_header(frame[: HEADER.size])
    assert len(frame) == HEADER.size + length
    assert arrived_number == number
    assert decode_body(kind, frame[HEADER.size :]) == message


@given(MESSAGES, st.data())
def test_a_body_that_is_cut_or_too_long_is_refused(message, data):
    frame = encode(message, 1)
    kind, length, _ = decode_header(frame[: HEADER.size])
    body = frame[HEADER.size :]
    with pytest.raises(PeerRefused):
        decode_body(kind, body + b"x")
    if length:
        with pytest.raises(PeerRefused):
            decode_body(kind, body[: data.draw(st.integers(0, length - 1))])


@given(st.sampled_from(Kind), st.binary(max_size=200))
def test_random_bodies_are_messages_or_refused(kind, body):
    try:
        decode_body(kind, body)
    except PeerRefused:
        pass


def test_another_version_is_a_mismatch():
    frame = bytearray(encode(Goodbye(), 1))
    frame[4] ^= 0xFF
    with pytest.raises(HandshakeMismatch, match="version"):
        decode_header(bytes(frame[: HEADER.size]))


def test_an_unknown_kind_and_a_body_too_long_are_refused():
    good = HEADER.unpack(encode(Goodbye(), 1))
    with pytest.raises(PeerRefused, match="unknown kind"):
        decode_header(HEADER.pack(good[0], good[1], 999, 0, 1))
    with pytest.raises(PeerRefused, match="more than"):
        decode_header(HEADER.pack(good[0], good[1], good[2], MAX_BODY_BYTES + 1, 1))
    with pytest.raises(PeerRefused, match="fewer runs"):
        encode(MapNow(1, ((1, 1),) * 300_000, False, 0), 1)


@pytest.mark.parametrize("field", ["package_version", "instance", "facts"])
def test_a_difference_is_refused_by_its_name(field):
    mine = Hello("1", "engine", "facts")
    values = {name: getattr(mine, name) for name in Hello.__slots__} | {field: "other"}
    with pytest.raises(HandshakeMismatch, match=field.split("_")[0]):
        check_hello(mine, Hello(**values))
    check_hello(mine, Hello("1", "engine", ""))


def test_the_longest_transaction_with_the_longest_tail_can_be_sent():
    in_each = MAX_TAIL_RUNS // MAX_OPEN_OPS
    tail = tuple(Op(number, OpKind.MAP, ((number, 1),) * in_each) for number in range(MAX_OPEN_OPS))
    assert len(encode(MapNow(1, ((0, 1),) * MAX_RUNS, False, 0, tail), 1)) < MAX_BODY_BYTES


def test_an_operation_of_no_known_kind_is_refused():
    body = bytearray(encode(Query(1, (Op(1, OpKind.MAP, ()),)), 1)[HEADER.size :])
    body[8 + 4 + 8] = 99  # after the transaction, the count of operations and the number of the first
    with pytest.raises(PeerRefused, match="makes no sense"):
        decode_body(Kind.QUERY, bytes(body))


def test_a_layout_that_leaves_out_a_field_is_a_mistake():
    with pytest.raises(TypeError, match="ops"):
        record(Query, tx=U64)
