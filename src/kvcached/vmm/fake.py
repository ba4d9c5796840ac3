# SPDX-License-Identifier: Apache-2.0
"""A device without memory: the protocol of `api` with all its rules, in plain Python.

Everything above an arena can be tested on it without memory, and every failure can be had. It refuses what the native library
refuses, makes the driver calls that the native library makes, and the same contract tests run on both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcached.errors import Misuse
from kvcached.units import MIB, TIB
from kvcached.vmm.api import DeviceInfo
from kvcached.vmm.fake_arena import FakeArena
from kvcached.vmm.fake_driver import FakeDriver

if TYPE_CHECKING:
    from kvcached.vmm.api import ArenaConfig, Call

_MAX_RANGE_BYTES: Final = 128 * TIB


class FakeDevice:
    """One device of `capacity_bytes`. `driver.outside_bytes` is what other processes hold: set it to make them come and go."""

    def __init__(self, capacity_bytes: int, *, granularity_bytes: int = 2 * MIB, ordinal: int = 0) -> None:
        self.driver = FakeDriver(capacity_bytes)
        self.info = DeviceInfo("host", ordinal, f"FAKE-{ordinal}", "fake device", granularity_bytes, capacity_bytes, driver_version=0)
        self.open_arenas = 0
        self._closed = False

    def memory(self) -> tuple[int, int]:
        self._check_open()
        return self.driver.free_bytes(), self.info.total_bytes

    def create_arena(self, config: ArenaConfig) -> FakeArena:
        self._check_open()
        _check_config(config, self.info.granularity_bytes)
        arena = FakeArena(self.driver, config, self.info.granularity_bytes, self._arena_closed)
        self.open_arenas += 1
        return arena

    def fail(self, call: Call, nth: int, *, from_there_on: bool = False, code: int = 0) -> None:
        self._check_open()
        self.driver.fail(call, nth, from_there_on, code)

    def calls(self) -> dict[Call, int]:
        self._check_open()
        return dict(self.driver.calls)

    def close(self) -> None:
        if self.open_arenas:
            raise Misuse(f"device: {self.open_arenas} of its arenas are not destroyed")
        self._closed = True

    def _arena_closed(self) -> None:
        self.open_arenas -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse("the device is closed")


def _check_config(config: ArenaConfig, granularity_bytes: int) -> None:
    if config.page_bytes <= 0 or config.page_bytes % granularity_bytes:
        raise Misuse(f"page_bytes: {config.page_bytes} is not a multiple of the device's granularity {granularity_bytes}")
    if config.pages <= 0 or config.pages * config.page_bytes > _MAX_RANGE_BYTES:
        raise Misuse(f"pages: {config.pages} pages of {config.page_bytes} bytes")
    if config.planes <= 0:
        raise Misuse(f"planes: {config.planes}")
    if config.planes > 1 and (
        config.plane_stride_bytes < config.pages * config.page_bytes or config.plane_stride_bytes % config.page_bytes
    ):
        raise Misuse(f"plane_stride_bytes: {config.plane_stride_bytes}")
