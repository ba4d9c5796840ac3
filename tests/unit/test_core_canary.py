# SPDX-License-Identifier: Apache-2.0
"""Stamps: written when blocks are taken, looked at from then on, and named with all that a person needs when they do not stand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvcached.core.canary import GUARD_BYTES, Canary, Note, Watch, Word, guarded_bytes, stamp_of
from kvcached.core.geometry import BlockGeometry, choose_geometry
from kvcached.errors import GeometryError, InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

PLANES = 2
GEOMETRY = BlockGeometry(1024 + GUARD_BYTES, 2048, 8192, 4, PLANES, 16)


class Pages:
    """Memory with holes: `mapped` pages only."""

    def __init__(self) -> None:
        self.data = bytearray(GEOMETRY.range_bytes)
        self.unmapped: set[int] = set()
        self.sees_holes = True

    def _is_mapped(self, offset: int) -> bool:
        return offset // GEOMETRY.page_bytes not in self.unmapped

    def read(self, offsets: Sequence[int], size_bytes: int) -> list[bytes | None]:
        return [bytes(self.data[offset : offset + size_bytes]) if self._is_mapped(offset) else None for offset in offsets]

    def write(self, offsets: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
        for offset, piece in zip(offsets, pieces, strict=True):
            if self._is_mapped(offset):
                self.data[offset : offset + len(piece)] = piece
        return [offset for offset in offsets if not self._is_mapped(offset)]


def place_of(block: int, plane: int = 0) -> int:
    """Where the stamp of a block begins: right behind its data."""
    return plane * GEOMETRY.plane_bytes + block * GEOMETRY.block_stride_bytes + 1024


@pytest.fixture
def memory() -> Pages:
    return Pages()


@pytest.fixture
def canary(memory: Pages) -> Canary:
    canary = Canary(GEOMETRY, "chat", memory)
    canary.obey([Note(Word.TAKEN, (4, 5, 6), 7)])
    return canary


def broken(text: str) -> object:
    return pytest.raises(InvariantBroken, match=re.escape(text))


def test_a_stamp_says_whose_a_block_is_in_every_plane(canary: Canary, memory: Pages) -> None:
    for plane in range(PLANES):
        place = place_of(5, plane)
        assert memory.data[place : place + GUARD_BYTES] == stamp_of("chat", plane, 5, 7)
        assert not any(memory.data[place - 1024 : place])
    canary.check()
    assert canary.checks == 3 * PLANES


def test_stamps_of_different_pools_planes_blocks_and_generations_differ() -> None:
    stamps = {stamp_of(*what) for what in (("a", 0, 1, 2), ("b", 0, 1, 2), ("a", 1, 1, 2), ("a", 0, 2, 2), ("a", 0, 1, 3))}
    assert len(stamps) == 5
    assert {len(stamp) for stamp in stamps} == {GUARD_BYTES}


@pytest.mark.parametrize("index", [0, 63, 64, GUARD_BYTES - 1])
def test_one_wrong_byte_is_found_wherever_it_is(canary: Canary, memory: Pages, index: int) -> None:
    memory.data[place_of(6, 1) + index] ^= 0xFF
    with broken(f"pool chat, block 6 of generation 7, page 1, plane 1: 1 of 256 bytes were overwritten, from byte {index} behind"):
        canary.check()


def test_the_owner_whose_stamp_stands_there_is_named(canary: Canary, memory: Pages) -> None:
    memory.data[place_of(5) : place_of(5) + GUARD_BYTES] = stamp_of("other", 0, 11, 3)
    with broken("block 5 of generation 7, page 1, plane 0: the stamp of pool other, block 11, generation 3, plane 0 stands there"):
        canary.check([5])


def test_an_older_generation_of_the_same_block_is_no_stamp(canary: Canary, memory: Pages) -> None:
    memory.data[place_of(4) : place_of(4) + GUARD_BYTES] = stamp_of("chat", 0, 4, 6)
    with broken("the stamp of pool chat, block 4, generation 6, plane 0 stands there"):
        canary.check()


def test_a_page_that_was_mapped_anew_reads_as_zeros(canary: Canary, memory: Pages) -> None:
    memory.data[8192:16384] = bytes(8192)
    with broken("block 4 of generation 7, page 1, plane 0: zeros stand there, as on a page that was mapped anew"):
        canary.check()


def test_a_page_that_is_gone_is_named(canary: Canary, memory: Pages) -> None:
    memory.unmapped.add(1)
    with broken("block 4 of generation 7, page 1, plane 0: nothing is mapped there"):
        canary.check()


def test_a_block_that_is_handed_out_without_memory_is_named(canary: Canary, memory: Pages) -> None:
    memory.unmapped.add(4 + 2)  # of the second plane
    with broken("block 8 of generation 8, page 2, plane 1: handed out, and nothing is mapped there"):
        canary.obey([Note(Word.TAKEN, (8,), 8)])


def test_a_block_that_is_given_back_is_looked_at_for_the_last_time(canary: Canary, memory: Pages) -> None:
    memory.data[place_of(5)] ^= 1
    with broken("block 5"):
        canary.obey([Note(Word.GIVEN, (5,))])
    memory.data[place_of(5)] ^= 1
    canary.obey([Note(Word.GIVEN, (5,))])
    memory.data[place_of(5)] ^= 1
    canary.check()


def test_where_notes_come_late_nobody_looks_at_what_is_given_back(canary: Canary, memory: Pages) -> None:
    memory.unmapped.add(1)
    canary.obey([Note(Word.GIVEN, (4, 5)), Note(Word.RESTING, (6,))], looks_back=False)
    canary.check()


def test_what_rests_is_left_alone_until_it_is_woken(canary: Canary, memory: Pages) -> None:
    canary.obey([Note(Word.RESTING, (5,))])
    memory.unmapped.add(1)
    canary.check([])
    memory.unmapped.clear()
    canary.obey([Note(Word.WOKEN, (5,))])
    canary.obey([Note(Word.RESTING, (5,))])
    memory.data[place_of(5)] ^= 1
    canary.check()
    with broken("block 5 of generation 7"):
        canary.obey([Note(Word.WOKEN, (5,))])


@pytest.mark.parametrize("plane", range(PLANES))
def test_data_that_changed_while_nobody_used_it_is_named(canary: Canary, memory: Pages, plane: int) -> None:
    memory.data[place_of(5, plane) - 1024] = 7
    canary.obey([Note(Word.RESTING, (4, 5))])
    canary.obey([Note(Word.WOKEN, (4, 5))])
    memory.data[place_of(5, plane) - 1] = 7
    canary.obey([Note(Word.RESTING, (4, 5))])
    memory.data[place_of(5, plane) - 512] = 7
    canary.obey([Note(Word.WOKEN, (4,))])
    with broken("block 5 of generation 7, page 1, plane 0: its data changed while it was cached and nobody used it"):
        canary.obey([Note(Word.WOKEN, (5,))])


def test_a_checksum_does_not_outlive_its_block(canary: Canary, memory: Pages) -> None:
    canary.obey([Note(Word.RESTING, (5,)), Note(Word.GIVEN, (5,)), Note(Word.TAKEN, (5,), 8)])
    memory.data[place_of(5) - 1] = 7
    canary.obey([Note(Word.RESTING, (5,)), Note(Word.WOKEN, (5,))])


def test_memory_that_cannot_be_asked_for_is_left_alone_at_rest(canary: Canary, memory: Pages) -> None:
    memory.sees_holes = False
    canary.obey([Note(Word.RESTING, (5,))])
    memory.data[place_of(5) - 1] = 7
    canary.obey([Note(Word.WOKEN, (5,))])


def test_a_block_is_looked_at_after_it_was_woken(canary: Canary, memory: Pages) -> None:
    canary.obey([Note(Word.RESTING, (5,)), Note(Word.WOKEN, (5,))])
    memory.data[place_of(5)] ^= 1
    with broken("block 5 of generation 7"):
        canary.check()


def test_a_cached_block_that_is_evicted_and_taken_again_has_a_new_generation(canary: Canary) -> None:
    canary.obey([Note(Word.RESTING, (5,)), Note(Word.GIVEN, (5,)), Note(Word.TAKEN, (5,), 9)])
    canary.check([5])


def test_notes_of_unknown_blocks_change_nothing(canary: Canary) -> None:
    canary.obey([Note(Word.GIVEN, (9,)), Note(Word.RESTING, (9,))])
    canary.check()
    assert canary.checks == 3 * PLANES


def test_a_second_owner_is_named() -> None:
    watch = Watch("chat")
    assert watch.taken([1, 2]) == Note(Word.TAKEN, (1, 2), 1)
    assert watch.taken([3]).generation == 2
    with broken("pool chat hands out block 2 again, which it took in generation 1 and nobody gave back"):
        watch.taken([4, 2])
    watch.rested([2])
    with broken("block 2 again"):
        watch.taken([2])
    watch.given([2])
    assert watch.taken([2]).generation == 3


def test_a_block_has_room_for_its_stamp_on_its_own_page() -> None:
    geometry = choose_geometry(guarded_bytes(65536, can_pad_stride=True), 512, 65536, can_pad_stride=True)
    assert geometry.block_bytes == 65536 + GUARD_BYTES <= geometry.block_stride_bytes
    with pytest.raises(GeometryError, match="KVCACHED_CANARY needs 256 bytes behind each block"):
        guarded_bytes(65536, can_pad_stride=False)
