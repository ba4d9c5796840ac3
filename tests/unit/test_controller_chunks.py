# SPDX-License-Identifier: Apache-2.0
"""Chunked bodies, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.controller.chunks import LAST, Chunks, frame

PAYLOADS = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(at)]


@given(PAYLOADS, st.lists(st.integers(0, 5000), max_size=8), st.binary(max_size=5))
def test_the_payload_is_found_whatever_the_reads(payloads: list[bytes], places: list[int], rest: bytes) -> None:
    chunks = Chunks()
    found = b"".join(chunks.feed(part) for part in cut(b"".join(map(frame, payloads)) + LAST, places))
    assert (found, chunks.ended, chunks.payload_bytes) == (b"".join(payloads), True, len(found))
    assert chunks.feed(rest) == b""
    assert chunks.rest == rest


@given(PAYLOADS, st.integers(0, 2000))
def test_it_is_between_chunks_only_where_all_were_whole(payloads: list[bytes], place: int) -> None:
    frames = [frame(payload) for payload in payloads]
    body = b"".join(frames) + LAST
    end = place % len(body)
    chunks = Chunks()
    chunks.feed(body[:end])
    assert chunks.is_between == (end in [sum(map(len, frames[:count])) for count in range(len(frames) + 1)])
    assert not chunks.ended


def test_extensions_and_trailers_are_passed_over() -> None:
    chunks = Chunks()
    assert chunks.feed(b'3;name="x"\r\nabc\r\n0 ;y\r\nX-Sum: 1\r\n\r\nmore') == b"abc"
    assert (chunks.ended, chunks.rest) == (True, b"more")


@pytest.mark.parametrize(
    "body", [b"x\r\n", b"-3\r\nabc", b"0x3\r\nabc\r\n", b"1_0\r\n", b"\r\n", b"3\r\nabcd\r\n", b"3\r\nabc3\r\n", b"1" * 9000]
)
def test_what_is_not_chunked_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        Chunks().feed(body)
