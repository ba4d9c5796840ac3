# SPDX-License-Identifier: Apache-2.0
"""A driver without memory, for `fake`: handles, mappings and access as plain data, calls counted, the Nth made to fail.

What a real driver would not allow raises `InvariantBroken`: the arena above it is wrong.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from kvcached.errors import DeviceError, DeviceOutOfMemory, InvariantBroken
from kvcached.vmm.api import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.vmm.api import Run

OUT_OF_MEMORY_CODE: Final = 2
_FIRST_ADDRESS: Final = 1 << 40


@dataclass
class _Fault:
    countdown: int
    from_there_on: bool
    code: int


@dataclass
class _Handle:
    size_bytes: int
    mappings: int = 0


@dataclass
class _Mapping:
    handle: _Handle
    access: str = ""  # "", "r" or "rw"


@dataclass
class FakeDriver:
    """Memory of `capacity_bytes`, of which other processes hold `outside_bytes`. A call that raises had no effect."""

    capacity_bytes: int
    outside_bytes: int = 0
    calls: dict[Call, int] = field(default_factory=lambda: dict.fromkeys(Call, 0))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _faults: dict[Call, _Fault] = field(default_factory=dict)
    _handles: dict[int, _Handle] = field(default_factory=dict)
    _mappings: dict[int, _Mapping] = field(default_factory=dict)
    _held_bytes: int = 0
    _next_handle: int = 1
    _next_address: int = _FIRST_ADDRESS

    def fail(self, call: Call, nth: int, from_there_on: bool, code: int) -> None:
        with self._lock:
            self._faults.pop(call, None)
            if nth:
                self._faults[call] = _Fault(nth, from_there_on, code or OUT_OF_MEMORY_CODE)

    def free_bytes(self) -> int:
        with self._lock:
            return max(self.capacity_bytes - self._held_bytes - self.outside_bytes, 0)

    def access(self, address: int) -> str:
        """What may be done at the start of a mapping: "" (also when nothing is mapped there), "r" or "rw"."""
        with self._lock:
            return self._mappings[address].access if address in self._mappings else ""

    def reserve(self, range_bytes: int, granularity_bytes: int) -> int:
        with self._call(Call.RESERVE, range_bytes):
            base = self._next_address
            self._next_address += range_bytes + granularity_bytes
            return base

    def free_range(self, range_bytes: int) -> None:
        with self._call(Call.FREE, range_bytes):
            return

    def create(self, size_bytes: int) -> int:
        with self._call(Call.CREATE, size_bytes):
            if self.free_bytes() < size_bytes:
                raise DeviceOutOfMemory("create", OUT_OF_MEMORY_CODE, size_bytes, "the device has no memory left")
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._handles[handle] = _Handle(size_bytes)
            self._held_bytes += size_bytes
            return handle

    def release(self, handle: int) -> None:
        with self._call(Call.RELEASE, 0):
            _insist(handle in self._handles and self._handles[handle].mappings == 0, "a dead or mapped handle is released")
            self._held_bytes -= self._handles.pop(handle).size_bytes

    def map(self, address: int, handle: int) -> None:
        with self._call(Call.MAP, 0):
            _insist(handle in self._handles and address not in self._mappings, "a dead handle is mapped, or over another")
            self._mappings[address] = _Mapping(self._handles[handle])
            self._handles[handle].mappings += 1

    def set_access(self, address: int, span_bytes: int, access: str) -> None:
        with self._call(Call.ACCESS, span_bytes):
            end = address + span_bytes
            while address < end:
                _insist(address in self._mappings, "access to what is not mapped")
                self._mappings[address].access = access
                address += self._mappings[address].handle.size_bytes
            _insist(address == end, "access to a part of a mapping")

    def unmap(self, address: int) -> None:
        with self._call(Call.UNMAP, 0):
            _insist(address in self._mappings, "an unmap of what is not mapped")
            self._mappings.pop(address).handle.mappings -= 1

    def grant(self, spans: list[tuple[int, int]], access: str) -> None:
        """`set_access` for (address, bytes) spans; spans side by side are one call."""
        merged: list[tuple[int, int]] = []
        for address, size_bytes in sorted(spans):
            if merged and sum(merged[-1]) == address:
                merged[-1] = (merged[-1][0], merged[-1][1] + size_bytes)
            else:
                merged.append((address, size_bytes))
        for address, size_bytes in merged:
            self.set_access(address, size_bytes, access)

    def clear(self, address: int) -> None:
        """Unmap what is mapped at `address`, if anything is."""
        if address in self._mappings:
            self.unmap(address)

    def attempt(self, call: Callable[[int], None], argument: int) -> DeviceError | None:
        try:
            call(argument)
        except DeviceError as error:
            return error
        return None

    @contextmanager
    def _call(self, call: Call, size_bytes: int) -> Iterator[None]:
        with self._lock:
            self._strike(call, size_bytes)
            yield
            self.calls[call] += 1

    def _strike(self, call: Call, size_bytes: int) -> None:
        fault = self._faults.get(call)
        if fault is None:
            return
        if fault.countdown > 1:
            fault.countdown -= 1
            return
        if not fault.from_there_on:
            del self._faults[call]
        error = DeviceOutOfMemory if fault.code == OUT_OF_MEMORY_CODE else DeviceError
        raise error(call.name.lower(), fault.code, size_bytes, "made to fail")


def _insist(fact: bool, what: str) -> None:
    if not fact:
        raise InvariantBroken(what)


class Journal:
    """What a batch did to the driver, as the steps that undo it. A run of which a step cannot be undone is left as it is.

    `lost` receives the handles (with their bytes) that could not be released.
    """

    def __init__(self, driver: FakeDriver, lost: dict[int, int]) -> None:
        self._driver = driver
        self._lost = lost
        self._steps: list[tuple[Run | None, Callable[[], None]]] = []
        self.stuck: set[Run] = set()
        self.clean = True

    def add(self, run: Run | None, undo: Callable[[], None]) -> None:
        self._steps.append((run, undo))

    def create(self, run: Run | None, size_bytes: int) -> int:
        handle = self._driver.create(size_bytes)

        def undo() -> None:
            if self._driver.attempt(self._driver.release, handle):
                self._lost[handle] = size_bytes
                self.clean = False

        self.add(run, undo)
        return handle

    def map(self, run: Run, address: int, handle: int) -> None:
        self._driver.map(address, handle)
        self.add(run, partial(self._driver.unmap, address))

    def unmap(self, run: Run, address: int, handle: int, span_bytes: int, access: str) -> None:
        self._driver.unmap(address)

        def undo() -> None:
            self._driver.map(address, handle)
            self._driver.set_access(address, span_bytes, access)

        self.add(run, undo)

    def roll_back(self) -> None:
        while self._steps:
            run, undo = self._steps.pop()
            if run is None or run not in self.stuck:
                self._undo(run, undo)

    def _undo(self, run: Run | None, undo: Callable[[], None]) -> None:
        try:
            undo()
        except DeviceError:
            self.clean = False
            if run is not None:
                self.stuck.add(run)
