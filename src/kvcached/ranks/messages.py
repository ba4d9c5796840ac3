# SPDX-License-Identifier: Apache-2.0
"""The messages between an owner and a mapper: typed, versioned, of bounded length; no pickle. Pure.

A frame is a header (magic, version, kind, body length, number) and a body. Every request is answered by one frame with its number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvcached.errors import HandshakeMismatch, PeerRefused
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Verdict

PROTOCOL_VERSION: Final = 1
MAX_BODY_BYTES: Final = 1 << 20
HEADER: Final = struct.Struct("<4sHHIQ")
_MAGIC: Final = b"KVRK"
_COUNT: Final = struct.Struct("<I")
_LIMITS: Final = struct.Struct("<QQdQ")
_REPORT: Final = struct.Struct("<4Q")
_OUTCOME: Final = struct.Struct("<BQ")
_STATUS: Final = struct.Struct("<5Q")


class Kind(IntEnum):
    HELLO = 1
    MAP = 2
    UNMAP = 3
    TRIM = 4
    REPORT = 5
    STATUS = 6
    LIMITS = 7
    OUTCOME = 32
    STATUS_ANSWER = 33


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks. Both sides must say the same, or the start is refused by the name of what differs.

    `facts` (geometry, card) are the mapper's to say: an owner that says "" asks for them.
    """

    package_version: str
    instance: str
    facts: str


@dataclass(frozen=True, slots=True)
class MapRequest:
    runs: tuple[tuple[int, int], ...]
    urgent: bool


@dataclass(frozen=True, slots=True)
class UnmapRequest:
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TrimRequest:
    pass


@dataclass(frozen=True, slots=True)
class StatusRequest:
    pass


Message = Hello | MapRequest | UnmapRequest | TrimRequest | StatusRequest | LimitsRequest | Report | Outcome | MapperStatus


def _texts(*values: str) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(_COUNT.pack(len(item)) + item for item in encoded)


def _runs(runs: tuple[tuple[int, int], ...]) -> bytes:
    flat = [number for run in runs for number in run]
    return _COUNT.pack(len(runs)) + struct.pack(f"<{len(flat)}Q", *flat)


def _body(message: Message) -> tuple[Kind, bytes]:
    match message:
        case Hello(package_version, instance, facts):
            return Kind.HELLO, _texts(package_version, instance, facts)
        case MapRequest(runs, urgent):
            return Kind.MAP, bytes([urgent]) + _runs(runs)
        case UnmapRequest(runs):
            return Kind.UNMAP, _runs(runs)
        case TrimRequest():
            return Kind.TRIM, b""
        case StatusRequest():
            return Kind.STATUS, b""
        case LimitsRequest():
            return Kind.LIMITS, _LIMITS.pack(*(getattr(message, name) for name in LimitsRequest.__slots__))
        case Report():
            return Kind.REPORT, _REPORT.pack(*(getattr(message, name) for name in Report.__slots__))
        case Outcome(verdict, size_bytes, pages, reason):
            pages_bytes = _COUNT.pack(len(pages)) + struct.pack(f"<{len(pages)}Q", *pages)
            return Kind.OUTCOME, _OUTCOME.pack(verdict, size_bytes) + pages_bytes + _texts(reason)
        case MapperStatus():
            return Kind.STATUS_ANSWER, _STATUS.pack(*(getattr(message, name) for name in MapperStatus.__slots__))


def encode(message: Message, number: int) -> bytes:
    """One frame. Raises `PeerRefused` when the body is too long to send."""
    kind, body = _body(message)
    if len(body) > MAX_BODY_BYTES:
        raise PeerRefused(
            f"a {kind.name} message of {len(body)} bytes is longer than the {MAX_BODY_BYTES} allowed; send fewer runs at once"
        )
    return HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(body), number) + body


def decode_header(header: bytes) -> tuple[Kind, int, int]:
    """(kind, body length in bytes, number). Raises `HandshakeMismatch` for another protocol, `PeerRefused` for a bad length."""
    magic, version, kind, length, number = HEADER.unpack(header)
    if magic != _MAGIC or version != PROTOCOL_VERSION:
        raise HandshakeMismatch(f"the peer speaks {magic!r} version {version}, this process speaks {_MAGIC!r} version {PROTOCOL_VERSION}")
    if length > MAX_BODY_BYTES:
        raise PeerRefused(f"the peer announced a body of {length} bytes, more than the {MAX_BODY_BYTES} allowed")
    try:
        return Kind(kind), length, number
    except ValueError as error:
        raise PeerRefused(f"the peer sent a message of unknown kind {kind}") from error


class _Reader:
    """Reads a body from its start; a body that ends early or late is refused."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.raw(layout.size))

    def raw(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._body):
            raise PeerRefused("the peer sent a message that ends early")
        piece, self._at = self._body[self._at : end], end
        return piece

    def numbers(self, per_item: int) -> tuple[int, ...]:
        (count,) = self.take(_COUNT)
        return struct.unpack(f"<{count * per_item}Q", self.raw(count * per_item * 8))

    def runs(self) -> tuple[tuple[int, int], ...]:
        flat = self.numbers(2)
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def text(self) -> str:
        (size,) = self.take(_COUNT)
        return self.raw(size).decode()

    def end(self) -> None:
        if self._at != len(self._body):
            raise PeerRefused("the peer sent a message that is longer than its contents")


def _decode_outcome(reader: _Reader) -> Outcome:
    verdict, size_bytes = reader.take(_OUTCOME)
    pages = reader.numbers(1)
    return Outcome(Verdict(verdict), size_bytes, pages, reader.text())


def decode_body(kind: Kind, body: bytes) -> Message:
    """The message in a body. Raises `PeerRefused` when the body does not hold exactly one."""
    reader = _Reader(body)
    try:
        message = _decode(kind, reader)
    except (ValueError, struct.error) as error:
        raise PeerRefused(f"the peer sent a {kind.name} message that makes no sense: {error}") from error
    reader.end()
    return message


def _decode(kind: Kind, reader: _Reader) -> Message:
    match kind:
        case Kind.HELLO:
            return Hello(reader.text(), reader.text(), reader.text())
        case Kind.MAP:
            (urgent,) = reader.take(struct.Struct("<B"))
            return MapRequest(reader.runs(), bool(urgent))
        case Kind.UNMAP:
            return UnmapRequest(reader.runs())
        case Kind.TRIM:
            return TrimRequest()
        case Kind.STATUS:
            return StatusRequest()
        case Kind.LIMITS:
            return LimitsRequest(*reader.take(_LIMITS))
        case Kind.REPORT:
            return Report(*reader.take(_REPORT))
        case Kind.OUTCOME:
            return _decode_outcome(reader)
        case Kind.STATUS_ANSWER:
            return MapperStatus(*reader.take(_STATUS))


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raises `HandshakeMismatch` with the name of the first thing that differs."""
    for name in Hello.__slots__:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other and ours and other:
            raise HandshakeMismatch(f"{name.replace('_', ' ')} differs: {ours!r} here, {other!r} at the peer")
