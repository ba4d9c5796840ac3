# SPDX-License-Identifier: Apache-2.0
"""The chunked coding of a body, taken off and put on while its bytes pass. Pure."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")
_LONGEST_LINE_BYTES: Final = 8192
LAST: Final = b"0\r\n\r\n"


def frame(payload: bytes) -> bytes:
    """One chunk. `payload` is not empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Chunks:
    """One body. `payload_bytes`: found so far. `ended`: nothing belongs to it any more; `rest`: what came after it."""

    __slots__ = ("_is_trailer", "_left", "_line", "_needs_break", "ended", "payload_bytes", "rest")

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.ended = False
        self.rest = b""
        self._left = 0
        self._line = b""
        self._needs_break = False
        self._is_trailer = False

    @property
    def is_between(self) -> bool:
        """Everything so far was whole chunks."""
        return not (self._left or self._line or self._needs_break or self._is_trailer)

    def feed(self, data: bytes) -> bytes:
        """The payload in it. Raises `ValueError` where it is not chunked."""
        payload = self._only_chunk(data) if self.is_between else b""
        if not payload:
            payload = b"".join(self._pieces(data))
        self.payload_bytes += len(payload)
        return payload

    def _only_chunk(self, data: bytes) -> bytes:
        """What nearly every read of an event stream is: one chunk, and nothing else. Empty: it is something else."""
        line, _, rest = data.partition(b"\r\n")
        size = _SIZE.fullmatch(line)
        return rest[:-2] if size and int(size[1], 16) == len(rest) - 2 and rest.endswith(b"\r\n") else b""

    def _pieces(self, data: bytes) -> list[bytes]:
        data, self._line = self._line + data, b""
        pieces, at = [], 0
        while at < len(data) and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                self._needs_break = not self._left
                at += len(piece)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._line = data[at:]
                break
            self._take(data[at:end])
            at = end + 2
        if len(self._line) > _LONGEST_LINE_BYTES:
            raise ValueError("a line between chunks is too long")
        self.rest = data[at:] if self.ended else b""
        return pieces

    def _take(self, line: bytes) -> None:
        """A line between chunks: the break after one, the size of the next, or what may follow the last."""
        if self._is_trailer:
            self.ended = not line
        elif self._needs_break:
            if line:
                raise ValueError("a chunk is longer than its size")
            self._needs_break = False
        else:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise ValueError("a chunk has no size")
            self._left = int(size[1], 16)
            self._is_trailer = not self._left
