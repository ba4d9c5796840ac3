# SPDX-License-Identifier: Apache-2.0
"""The canary, a debug mode: a stamp behind every block in use says whose it is, so that memory which went wrong is found and named.

The last `GUARD_BYTES` of each block, in every plane, belong to the stamp: the geometry is chosen for blocks so much larger, and whoever
writes the block's data never writes there. The owner decides what is stamped (`Watch`, which makes notes); where the memory is, a
`Canary` writes the stamps and reads them again. A stamp that is not what was written means a stray write, a page that was lost or mapped
anew, or memory that two blocks have at once. Cached blocks, which nobody may write, are known by a checksum of their data besides.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from kvcached.core.geometry import STRIDE_ALIGNMENT_BYTES
from kvcached.errors import GeometryError, InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvcached.core.geometry import BlockGeometry

GUARD_BYTES: Final = STRIDE_ALIGNMENT_BYTES
_MAGIC: Final = b"kvcanary"
_STAMP: Final = struct.Struct("<8sIIQ40s")  # magic, plane, block, generation, pool
_COPIES: Final = GUARD_BYTES // _STAMP.size
_LONGEST_NAME_BYTES: Final = 40
_SHOWN_BYTES: Final = 16


def guarded_bytes(block_bytes: int, *, can_pad_stride: bool) -> int:
    """Bytes of a block and its stamp, in one plane. Raises `GeometryError` where blocks must lie side by side without a gap."""
    if not can_pad_stride:
        raise GeometryError(
            f"KVCACHED_CANARY needs {GUARD_BYTES} bytes behind each block, and here blocks of {block_bytes} bytes must be dense; "
            "unset KVCACHED_CANARY"
        )
    return block_bytes + GUARD_BYTES


class Word(Enum):
    """What became of blocks. `TAKEN` gives them a stamp of a new generation. While they are `RESTING` (cached) their pages may go, so
    nobody looks at the stamp until they are `WOKEN`; then it must be what it was."""

    TAKEN = 1
    RESTING = 2
    WOKEN = 3
    GIVEN = 4


@dataclass(frozen=True, slots=True)
class Note:
    """What the owner tells of some blocks. Notes are obeyed in the order in which they were made."""

    word: Word
    blocks: tuple[int, ...]
    generation: int = 0


class Bytes(Protocol):
    """Memory by offset from the beginning of an arena. `sees_holes`: whether what is not mapped can be asked for."""

    @property
    def sees_holes(self) -> bool: ...

    def read(self, offsets: Sequence[int], size_bytes: int) -> list[bytes | None]:
        """`size_bytes` from each offset; None where nothing is mapped, or a fault."""

    def write(self, offsets: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
        """Write each piece, all of one size. The offsets where nothing is mapped."""


class Watch:
    """The owner's half: which blocks are in use. Raises `InvariantBroken` for a block that would get a second owner."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._generation = 0
        self._generations: dict[int, int] = {}

    def taken(self, blocks: Sequence[int]) -> Note:
        for block in blocks:
            if block in self._generations:
                raise InvariantBroken(
                    f"canary: pool {self._pool} hands out block {block} again, which it took in generation "
                    f"{self._generations[block]} and nobody gave back"
                )
        self._generation += 1
        self._generations.update(dict.fromkeys(blocks, self._generation))
        return Note(Word.TAKEN, tuple(blocks), self._generation)

    def rested(self, blocks: Sequence[int]) -> Note:
        return Note(Word.RESTING, tuple(blocks))

    def woken(self, blocks: Sequence[int]) -> Note:
        return Note(Word.WOKEN, tuple(blocks))

    def given(self, blocks: Sequence[int]) -> Note:
        for block in blocks:
            self._generations.pop(block, None)
        return Note(Word.GIVEN, tuple(blocks))


class Canary:
    """The half where the memory is: writes stamps and looks whether they stand. `checks`: how many stamps were read so far."""

    def __init__(self, geometry: BlockGeometry, pool: str, memory: Bytes) -> None:
        self._geometry = geometry
        self._pool = pool
        self._memory = memory
        self._awake: dict[int, int] = {}
        self._resting: dict[int, int] = {}
        self._sums: dict[int, int] = {}
        self.checks = 0

    def obey(self, notes: Iterable[Note], *, looks_back: bool = True) -> None:
        """Do what the owner tells. `looks_back`: also look at blocks that are given back or come to rest, whose pages are mapped still; not
        where notes come with the next step, when the pages may be gone. Raises `InvariantBroken`, which names what stands wrong."""
        for note in notes:
            if note.word is Word.TAKEN:
                self._stamp(note.blocks, note.generation)
                continue
            if looks_back and note.word is not Word.WOKEN:
                self.check([block for block in note.blocks if block in self._awake])
            self._move(note)

    def _move(self, note: Note) -> None:
        for block in note.blocks:
            known = self._sums.pop(block, None)
            generation = self._awake.pop(block, None) or self._resting.pop(block, None)
            if generation is not None and note.word is not Word.GIVEN:
                (self._resting if note.word is Word.RESTING else self._awake)[block] = generation
                self._compare_data(block, known, note.word)
        if note.word is Word.WOKEN:
            self.check(note.blocks)

    def _compare_data(self, block: int, known: int | None, word: Word) -> None:
        """Where it can be asked for: the page of a block that came to rest some time ago may be gone, and then nobody will wake it."""
        if not self._memory.sees_holes:
            return
        found = self._sum_of(block)
        if word is Word.RESTING and found is not None:
            self._sums[block] = found
        if word is Word.WOKEN and known is not None and found != known:
            place = self._place(block, 0, self._awake[block])
            raise InvariantBroken(f"canary: {place}: its data changed while it was cached and nobody used it")

    def _sum_of(self, block: int) -> int | None:
        """Of the block's data in all planes; None where some of it is not mapped."""
        size_bytes = self._geometry.block_bytes - GUARD_BYTES
        begins = [self._offset(block, plane) - size_bytes for plane in range(self._geometry.planes)]
        found = [data for data in self._memory.read(begins, size_bytes) if data is not None]
        return zlib.crc32(b"".join(found)) if len(found) == len(begins) else None

    def check(self, blocks: Collection[int] | None = None) -> None:
        """Look at the stamps of these blocks, or of all that are in use. Raises `InvariantBroken` for the first that does not stand."""
        chosen = sorted(self._awake if blocks is None else blocks)
        for plane in range(self._geometry.planes):
            found = self._memory.read([self._offset(block, plane) for block in chosen], GUARD_BYTES)
            for block, there in zip(chosen, found, strict=True):
                if there != stamp_of(self._pool, plane, block, self._awake[block]):
                    raise InvariantBroken(self._report(block, plane, there))
        self.checks += len(chosen) * self._geometry.planes

    def _stamp(self, blocks: Sequence[int], generation: int) -> None:
        for plane in range(self._geometry.planes):
            offsets = [self._offset(block, plane) for block in blocks]
            missing = self._memory.write(offsets, [stamp_of(self._pool, plane, block, generation) for block in blocks])
            if missing:
                block = blocks[offsets.index(missing[0])]
                raise InvariantBroken(f"canary: {self._place(block, plane, generation)}: handed out, and nothing is mapped there")
        for block in blocks:
            self._awake[block] = generation

    def _offset(self, block: int, plane: int) -> int:
        geometry = self._geometry
        return plane * geometry.plane_bytes + block * geometry.block_stride_bytes + geometry.block_bytes - GUARD_BYTES

    def _place(self, block: int, plane: int, generation: int) -> str:
        where = f", plane {plane}" if self._geometry.planes > 1 else ""
        return f"pool {self._pool}, block {block} of generation {generation}, page {self._geometry.page_of(block)}{where}"

    def _report(self, block: int, plane: int, there: bytes | None) -> str:
        generation = self._awake[block]
        wanted = stamp_of(self._pool, plane, block, generation)
        return f"canary: {self._place(block, plane, generation)}: {describe(there, wanted)}"


def stamp_of(pool: str, plane: int, block: int, generation: int) -> bytes:
    """The `GUARD_BYTES` that stand behind a block."""
    return _STAMP.pack(_MAGIC, plane, block, generation, pool.encode()[:_LONGEST_NAME_BYTES]) * _COPIES


def describe(there: bytes | None, wanted: bytes) -> str:
    """What stands where a stamp should, for people."""
    if there is None:
        return "nothing is mapped there"
    if not any(there):
        return "zeros stand there, as on a page that was mapped anew"
    whole = there[: _STAMP.size] * _COPIES == there
    magic, plane, block, generation, name = _STAMP.unpack(there[: _STAMP.size])
    if whole and magic == _MAGIC:
        pool = name.rstrip(bytes(1)).decode(errors="replace")
        return f"the stamp of pool {pool}, block {block}, generation {generation}, plane {plane} stands there"
    wrong = [index for index, (is_there, should) in enumerate(zip(there, wanted, strict=True)) if is_there != should]
    shown = there[wrong[0] : wrong[0] + _SHOWN_BYTES]
    return f"{len(wrong)} of {len(wanted)} bytes were overwritten, from byte {wrong[0]} behind the data on stands {shown.hex(' ')}"
