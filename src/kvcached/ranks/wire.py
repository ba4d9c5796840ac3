# SPDX-License-Identifier: Apache-2.0
"""How the fields of a message are written and read: little-endian, every length said before its contents. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcached.errors import PeerRefused
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.operations import Op, OpKind
from kvcached.ranks.transactions import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COUNT: Final = struct.Struct("<I")
_OP: Final = struct.Struct("<QBq")


class Reader:
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

    def count(self) -> int:
        count: int = self.take(_COUNT)[0]
        return count

    def numbers(self, per_item: int) -> tuple[int, ...]:
        count = self.count() * per_item
        return struct.unpack(f"<{count}Q", self.raw(count * 8))

    def end(self) -> None:
        if self._at != len(self._body):
            raise PeerRefused("the peer sent a message that is longer than its contents")


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes and reads one kind of field."""

    write: Callable[[Any], bytes]
    read: Callable[[Reader], Any]


def _plain(letter: str, convert: Callable[[Any], Any] | None = None) -> Codec:
    layout = struct.Struct(f"<{letter}")
    if convert is None:
        return Codec(layout.pack, lambda reader: reader.take(layout)[0])
    return Codec(layout.pack, lambda reader: convert(reader.take(layout)[0]))


def _write_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return _COUNT.pack(len(pairs)) + struct.pack(f"<{len(pairs) * 2}Q", *(number for pair in pairs for number in pair))


def _read_pairs(reader: Reader) -> tuple[tuple[int, int], ...]:
    flat = reader.numbers(2)
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _write_numbers(numbers: Sequence[int]) -> bytes:
    return _COUNT.pack(len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)


def _write_text(text: str) -> bytes:
    encoded = text.encode()
    return _COUNT.pack(len(encoded)) + encoded


def _write_ops(ops: Sequence[Op]) -> bytes:
    return _COUNT.pack(len(ops)) + b"".join(_OP.pack(op.number, op.kind, op.after_step) + _write_pairs(op.runs) for op in ops)


def _read_op(reader: Reader) -> Op:
    number, kind, after_step = reader.take(_OP)
    return Op(number, OpKind(kind), _read_pairs(reader), after_step)


U8: Final = _plain("B")
U64: Final = _plain("Q")
I64: Final = _plain("q")
F64: Final = _plain("d")
FLAG: Final = _plain("B", bool)
PHASE: Final = _plain("B", Phase)
VERDICT: Final = _plain("B", Verdict)
TEXT: Final = Codec(_write_text, lambda reader: reader.raw(reader.count()).decode())
PAIRS: Final = Codec(_write_pairs, _read_pairs)
NUMBERS: Final = Codec(_write_numbers, lambda reader: reader.numbers(1))
OPS: Final = Codec(_write_ops, lambda reader: tuple(_read_op(reader) for _ in range(reader.count())))


def record(kind: type[Any], **fields: Codec) -> Codec:
    """A dataclass, field by field in the order given, which must be its own. A field that is not named is a mistake."""
    if tuple(fields) != tuple(kind.__slots__):
        raise TypeError(f"{kind.__name__} has the fields {kind.__slots__}, not {tuple(fields)}")
    codecs = tuple(fields.items())

    def write(value: Any) -> bytes:
        return b"".join([codec.write(getattr(value, name)) for name, codec in codecs])

    return Codec(write, lambda reader: kind(*[codec.read(reader) for _, codec in codecs]))


OUTCOME: Final = record(Outcome, verdict=VERDICT, size_bytes=U64, pages=NUMBERS, reason=TEXT, ticket=U64)
