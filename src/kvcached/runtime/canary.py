# SPDX-License-Identifier: Apache-2.0
"""The canary of a pool: it tells of every block that is taken or given, to a `Canary` beside it or to workers far away."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvcached.core.canary import Watch
from kvcached.errors import DeviceError, InvariantBroken
from kvcached.runtime.pool import NOTHING_IN_FLIGHT, Pool, Ranges, Sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcached.core.canary import Canary, Note
    from kvcached.core.tally import Eviction

_MOST_PIECES: Final = 512  # of one call; the system's own bound is 1024


class Watcher(Protocol):
    """Hears of blocks, with the pool's lock held. Raises `InvariantBroken`."""

    def note(self, note: Note) -> None: ...

    def step(self) -> None:
        """A step has finished."""


class WatcherHere:
    """Writes stamps and looks at them at once: the memory is this process's own."""

    def __init__(self, canary: Canary) -> None:
        self.canary = canary

    def note(self, note: Note) -> None:
        self.canary.obey((note,))

    def step(self) -> None:
        self.canary.check()


class WatcherAfar:
    """Keeps notes until the next step takes them to the workers, where the memory is."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def note(self, note: Note) -> None:
        self._notes.append(note)

    def step(self) -> None:
        """The workers look after every step of their own."""

    def notes(self) -> tuple[Note, ...]:
        """All since the last call."""
        notes, self._notes = self._notes, []
        return tuple(notes)


class WatchedPool(Pool):
    """A pool that tells a watcher whose each block is. When a stamp does not stand it fails, since memory is not what it should be."""

    def __init__(self, *args: Any, watcher: Watcher, name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watcher = watcher
        self._watch = Watch(name)

    def check_stamps(self) -> None:
        """Look at the stamps of all blocks in use. Raises `InvariantBroken`."""
        with self.lock:
            self._tell(self._watcher.step)

    def take(self, blocks: int) -> Ranges:
        with self.lock:
            ranges = super().take(blocks)
            self._taken(_ids_of(ranges))
            return ranges

    def take_sets(self, blocks: int) -> tuple[Ranges, Sets]:
        with self.lock:
            ranges, sets = super().take_sets(blocks)
            self._taken([*_ids_of(ranges), *self._ids_of_sets(sets)])
            return ranges, sets

    def take_ids(self, ids: Sequence[int]) -> None:
        with self.lock:
            super().take_ids(ids)
            self._taken(list(ids))

    def give(self, ranges: Iterable[tuple[int, int]], marker: int = NOTHING_IN_FLIGHT) -> None:
        ranges = list(ranges)
        with self.lock:
            super().give(ranges, marker)  # its pages stay mapped at least as long as the lock is held
            self._given(_ids_of(ranges))

    def give_sets(self, pieces: Sets, marker: int = NOTHING_IN_FLIGHT) -> None:
        with self.lock:
            super().give_sets(pieces, marker)
            self._given(self._ids_of_sets(pieces))

    def give_cached(self, ids: Sequence[int], marker: int, last_use: int, cost: float = 1) -> None:
        with self.lock:
            super().give_cached(ids, marker, last_use, cost)
            self._tell(lambda: self._watcher.note(self._watch.rested(ids)))

    def touch(self, ids: Sequence[int]) -> None:
        with self.lock:
            super().touch(ids)
            self._tell(lambda: self._watcher.note(self._watch.woken(ids)))

    def evict(self, ids: Sequence[int]) -> None:
        with self.lock:
            super().evict(ids)
            self._given(ids)

    def _evict(self, ids: Sequence[int], why: Eviction) -> None:
        super()._evict(ids, why)
        self._given(ids)

    def advance(self, completed_marker: int) -> None:
        with self.lock:
            super().advance(completed_marker)
            self._tell(self._watcher.step)

    def _taken(self, ids: Sequence[int]) -> None:
        if ids:
            self._tell(lambda: self._watcher.note(self._watch.taken(ids)))

    def _given(self, ids: Sequence[int]) -> None:
        if ids:
            self._tell(lambda: self._watcher.note(self._watch.given(ids)))

    def _tell(self, action: Callable[[], None]) -> None:
        try:
            action()
        except InvariantBroken as error:
            self.fail(str(error))
            raise

    def _ids_of_sets(self, pieces: Sets) -> list[int]:
        return [self.geometry.blocks_of(page)[bit] for page, blocks in pieces for bit in _bits_of(blocks)]


def _ids_of(ranges: Ranges) -> list[int]:
    return [block for first, count in ranges for block in range(first, first + count)]


def _bits_of(blocks: int) -> list[int]:
    return [bit for bit in range(blocks.bit_length()) if blocks >> bit & 1]


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


class HostBytes:
    """This process's own memory, from `base_address` on. What is not mapped is no fault here, since the system does the copying."""

    sees_holes = True

    def __init__(self, base_address: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._base_address = base_address
        self._calls = {name: getattr(library, name) for name in ("process_vm_readv", "process_vm_writev")}
        for call in self._calls.values():
            call.restype = ctypes.c_ssize_t
            call.argtypes = [ctypes.c_int, ctypes.POINTER(_Piece), ctypes.c_ulong, ctypes.POINTER(_Piece), ctypes.c_ulong, ctypes.c_ulong]

    def read(self, offsets: Sequence[int], size_bytes: int) -> list[bytes | None]:
        buffer = ctypes.create_string_buffer(max(1, len(offsets) * size_bytes))
        missing = set(self._copy("process_vm_readv", buffer, offsets, size_bytes))
        view = memoryview(buffer)
        places = range(0, len(offsets) * size_bytes, size_bytes)
        return [
            None if offset in missing else bytes(view[place : place + size_bytes]) for offset, place in zip(offsets, places, strict=True)
        ]

    def write(self, offsets: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
        data = b"".join(pieces)
        return self._copy(
            "process_vm_writev", ctypes.create_string_buffer(data, max(1, len(data))), offsets, len(pieces[0]) if pieces else 0
        )

    def _copy(self, name: str, buffer: ctypes.Array[ctypes.c_char], offsets: Sequence[int], size_bytes: int) -> list[int]:
        """Copy all pieces that are mapped; the offsets of those that are not."""
        missing, done = [], 0
        while done < len(offsets):
            some = offsets[done : done + _MOST_PIECES]
            here = _Piece(ctypes.addressof(buffer) + done * size_bytes, len(some) * size_bytes)
            there = (_Piece * len(some))(*(_Piece(self._base_address + offset, size_bytes) for offset in some))
            copied = self._calls[name](os.getpid(), ctypes.byref(here), 1, there, len(some), 0)
            if copied < 0 and ctypes.get_errno() != errno.EFAULT:
                code = ctypes.get_errno()
                raise DeviceError(name, code, size_bytes, f"KVCACHED_CANARY cannot look at this process's memory: {os.strerror(code)}")
            whole = max(0, copied) // size_bytes
            done += whole
            if whole < len(some):
                missing.append(offsets[done])
                done += 1
        return missing
