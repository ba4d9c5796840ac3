# SPDX-License-Identifier: Apache-2.0
"""In-band operations: one order on all ranks, whichever channel brings them and however often."""

import pytest

from kvcached.errors import StateUnknown
from kvcached.ranks.operations import MAX_OPEN_OPS, MAX_TAIL_RUNS, Inbox, Op, OpKind, Outbox

A, B = (0, 1), (1, 1)


def test_an_operation_stays_in_the_tail_until_every_rank_has_applied_it():
    outbox = Outbox(2)
    outbox.map([A])
    outbox.note(0, 1, 0)
    assert [op.number for op in outbox.tail()] == [1]
    outbox.note(1, 1, 0)
    assert outbox.tail() == ()


def test_what_is_complete_on_every_rank_is_told_once():
    outbox = Outbox(2)
    outbox.map([A])
    outbox.unmap([B], after_step=3)
    assert outbox.note(0, 2, 2) == []
    assert [op.number for op in outbox.note(1, 2, 1)] == [1]
    assert outbox.note(1, 2, 2) == [Op(2, OpKind.UNMAP, (B,), 3)]
    assert outbox.note(1, 2, 2) == []
    assert outbox.completed_everywhere == 2


def test_an_older_acknowledgement_changes_nothing():
    outbox = Outbox(1)
    outbox.map([A])
    outbox.note(0, 1, 1)
    outbox.note(0, 0, 0)
    assert outbox.completed_everywhere == 1
    assert outbox.tail() == ()


def test_a_page_is_leaving_until_its_unmap_is_complete_everywhere():
    outbox = Outbox(2)
    outbox.unmap([(4, 4)], after_step=1)
    outbox.note(0, 1, 1)
    assert outbox.is_leaving([(7, 1)])
    assert not outbox.is_leaving([(8, 1)])
    outbox.note(1, 1, 1)
    assert not outbox.is_leaving([(7, 1)])


def test_a_map_that_nobody_was_sent_is_taken_back():
    outbox = Outbox(1)
    outbox.map([A, B])
    assert outbox.cancel([A]) == (A,)
    assert outbox.tail() == (Op(1, OpKind.MAP, (B,)),)


def test_a_map_that_was_sent_is_not_taken_back():
    outbox = Outbox(1)
    outbox.map([A])
    outbox.tail()
    assert outbox.cancel([A]) == ()


def test_the_ranks_that_have_not_finished_are_known():
    outbox = Outbox(3)
    outbox.map([A])
    outbox.note(1, 1, 1)
    assert outbox.behind() == [0, 2]


def test_what_waits_for_a_slow_rank_is_bounded():
    outbox = Outbox(1)
    for _ in range(MAX_OPEN_OPS):
        assert outbox.has_room(1)
        outbox.map([A])
    assert not outbox.has_room(1)
    assert not Outbox(1).has_room(MAX_TAIL_RUNS + 1)


def test_a_repeated_tail_brings_only_what_is_new():
    outbox, inbox = Outbox(2), Inbox()
    outbox.map([A])
    assert [op.number for op in inbox.accept(outbox.tail())] == [1]
    outbox.map([B])
    assert [op.number for op in inbox.accept(outbox.tail())] == [2]
    assert inbox.accept(outbox.tail()) == ()
    assert inbox.applied == 2


def test_a_gap_is_never_passed_over():
    with pytest.raises(StateUnknown, match="operation 1 never came"):
        Inbox().accept((Op(2, OpKind.MAP, (A,)),))


def test_completed_grows_only_without_gaps():
    inbox = Inbox()
    inbox.accept((Op(1, OpKind.UNMAP, (A,)), Op(2, OpKind.MAP, (B,))))
    inbox.finish(2)
    assert inbox.completed == 0
    inbox.finish(1)
    assert inbox.completed == 2
