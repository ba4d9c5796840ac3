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
        self._events = 0
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        self._events += chunk.count(b"data: {")
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def tokens(self) -> tuple[int, int]:
        """In and out; 0 where nothing is known."""
        said = {_IS_INPUT[name]: int(number) for name, number in _TOKENS.findall(self._tail)}
        return said.get(True, 0), said.get(False, self._events)
