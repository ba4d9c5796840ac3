# SPDX-License-Identifier: Apache-2.0
"""The messages between an owner and a mapper: typed, versioned, of bounded length; no pickle. Pure.

A frame is a header (magic, version, kind, body length, number) and a body: the fields in the order of `_LAYOUTS`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from kvcached.errors import HandshakeMismatch, PeerRefused
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report
from kvcached.ranks.transactions import Abort, Acquire, Answer, Commit, MapNow, Prepare, Query, RankMessage, Release, Revert
from kvcached.ranks.wire import F64, FLAG, I64, NUMBERS, OPS, OUTCOME, PAIRS, PHASE, TEXT, U64, Codec, Reader, record

if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION: Final = 4
MAX_BODY_BYTES: Final = 1 << 22
HEADER: Final = struct.Struct("<4sHHIQ")
_MAGIC: Final = b"KVRK"


class Kind(IntEnum):
    HELLO = 1
    GOODBYE = 2
    REPORT = 5
    STATUS = 6
    LIMITS = 7
    TALLY = 8
    ACQUIRE = 16
    MAP_NOW = 17
    RELEASE = 18
    PREPARE = 19
    COMMIT = 20
    ABORT = 21
    REVERT = 22
    QUERY = 23
    OUTCOME = 32
    STATUS_ANSWER = 33
    ANSWER = 34
    TALLY_ANSWER = 35


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks. Both sides must say the same, or the start is refused by the name of what differs.

    `facts` (geometry, card) are the mapper's to say: an owner that says "" asks for them. `engine`: name and version. `seams`: a
    digest of the list of seams that are installed.
    """

    package_version: str
    instance: str
    facts: str
    engine: str = ""
    seams: str = ""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender leaves in good order: the end of the connection is no failure."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    pass


@dataclass(frozen=True, slots=True)
class TallyRequest:
    pass


_Question = StatusRequest | TallyRequest | LimitsRequest | Report
Message = Hello | Goodbye | _Question | Outcome | MapperStatus | MapperTally | RankMessage | Answer

_ENDING: Final[Mapping[str, Codec]] = {"tx": U64, "ops": OPS}
_STATUS_FIELDS: Final = dict.fromkeys(MapperStatus.__slots__, U64)
_TALLY_FIELDS: Final = dict.fromkeys(MapperTally.__slots__, NUMBERS)
_REPORT_FIELDS: Final = dict.fromkeys(Report.__slots__, U64)
_LAYOUTS: Final[Mapping[Kind, tuple[type[Any], Codec]]] = {
    kind: (message, record(message, **fields))
    for kind, message, fields in (
        (Kind.HELLO, Hello, {"package_version": TEXT, "instance": TEXT, "facts": TEXT, "engine": TEXT, "seams": TEXT}),
        (Kind.GOODBYE, Goodbye, {}),
        (Kind.REPORT, Report, _REPORT_FIELDS),
        (Kind.STATUS, StatusRequest, {}),
        (Kind.TALLY, TallyRequest, {}),
        (Kind.LIMITS, LimitsRequest, {"limit_bytes": U64, "floor_bytes": U64, "weight": F64, "revision": U64}),
        (Kind.ACQUIRE, Acquire, {"tx": U64, "classes": PAIRS, "urgent": FLAG, "ticket": U64, "ops": OPS}),
        (Kind.MAP_NOW, MapNow, {"tx": U64, "runs": PAIRS, "urgent": FLAG, "ticket": U64, "ops": OPS}),
        (Kind.RELEASE, Release, {"tx": U64, "classes": PAIRS, "ops": OPS}),
        (Kind.PREPARE, Prepare, {"tx": U64, "runs": PAIRS, "after_step": I64, "ops": OPS}),
        (Kind.COMMIT, Commit, _ENDING),
        (Kind.ABORT, Abort, _ENDING),
        (Kind.REVERT, Revert, _ENDING),
        (Kind.QUERY, Query, _ENDING),
        (Kind.STATUS_ANSWER, MapperStatus, _STATUS_FIELDS),
        (Kind.TALLY_ANSWER, MapperTally, _TALLY_FIELDS),
        (
            Kind.ANSWER,
            Answer,
            {"tx": U64, "phase": PHASE, "outcome": OUTCOME, "applied": U64, "completed": U64, "ticket": U64, "stranded": NUMBERS},
        ),
    )
} | {Kind.OUTCOME: (Outcome, OUTCOME)}
_KINDS: Final[Mapping[type[Any], Kind]] = {message: kind for kind, (message, _) in _LAYOUTS.items()}


def encode(message: Message, number: int) -> bytes:
    """One frame. Raises `PeerRefused` when the body is too long to send."""
    kind = _KINDS[type(message)]
    body = _LAYOUTS[kind][1].write(message)
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


def decode_body(kind: Kind, body: bytes) -> Message:
    """The message in a body. Raises `PeerRefused` when the body does not hold exactly one."""
    reader = Reader(body)
    try:
        message: Message = _LAYOUTS[kind][1].read(reader)
    except (ValueError, struct.error) as error:
        raise PeerRefused(f"the peer sent a {kind.name} message that makes no sense: {error}") from error
    reader.end()
    return message


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raises `HandshakeMismatch` with the name of the first thing that differs."""
    for name in Hello.__slots__:
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other and ours and other:
            raise HandshakeMismatch(f"{name.replace('_', ' ')} differs: {ours!r} here, {other!r} at the peer")
