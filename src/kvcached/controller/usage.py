# SPDX-License-Identifier: Apache-2.0
"""Tokens of an answer, found in its bytes as they pass: without parsing it, without keeping it. Pure."""

from __future__ import annotations

import re
from typing import Final

_TAIL_BYTES: Final = 8192
_TOKENS: Final = re.compile(rb'"(prompt|completion|input|output)_tokens"\s*:\s*(\d{1,12})')
_IS_INPUT: Final = {b"prompt": True, b"input": True, b"completion": False, b"output": False}


class Meter:
    """`tokens_in`, `tokens_out`: what the answer says at its end; of a stream that says nothing, `tokens_out` is its events."""

    def __init__(self) -> None:
        self.events = 0
        self._tail = bytearray()
        self._said: dict[bool, int] = {}

    def feed(self, chunk: bytes) -> None:
        self.events += chunk.count(b"data: {")
        self._tail += chunk
        if len(self._tail) > 2 * _TAIL_BYTES:  # not each time: that would copy all of it for each token
            del self._tail[:-_TAIL_BYTES]

    def add(self, events: int, tokens_in: int | None, tokens_out: int | None) -> None:
        """What another meter found in what followed: see `said`."""
        self.events += events
        self._said |= {is_input: tokens for is_input, tokens in ((True, tokens_in), (False, tokens_out)) if tokens is not None}

    def said(self) -> tuple[int | None, int | None]:
        """In and out, where the answer says it."""
        found = {_IS_INPUT[name]: int(number) for name, number in _TOKENS.findall(self._tail[-_TAIL_BYTES:])} | self._said
        return found.get(True), found.get(False)

    def tokens(self) -> tuple[int, int]:
        """In and out; 0 where nothing is known."""
        tokens_in, tokens_out = self.said()
        return tokens_in or 0, self.events if tokens_out is None else tokens_out
