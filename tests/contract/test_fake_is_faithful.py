# SPDX-License-Identifier: Apache-2.0
"""The fake and the native host arena, given the same calls and the same failures, answer alike: outcome, books, driver calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcached.errors import DeviceError, Misuse, StateUnknown
from kvcached.testing.lateness import read_memory
from kvcached.units import KIB
from kvcached.vmm.api import ArenaConfig, Call, Run, ZeroBacking
from kvcached.vmm.fake import FakeDevice
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.vmm.api import Arena, Device

PAGE_BYTES = 4 * KIB
PAGES = 8
CAPACITY_PAGES = 12

run = st.builds(Run, st.integers(0, PAGES), st.integers(0, 3))
runs = st.lists(run, max_size=4)
tx = st.integers(0, 4)
fault = st.tuples(
    st.just("fail"), st.sampled_from([Call.CREATE, Call.MAP, Call.ACCESS, Call.UNMAP, Call.RELEASE]), st.integers(0, 4), st.booleans()
)
operation = st.one_of(
    st.tuples(st.just("map"), runs),
    st.tuples(st.just("map"), st.lists(st.builds(Run, st.integers(0, PAGES - 1), st.just(1)), max_size=5, unique=True)),
    st.tuples(st.just("unmap_mapped"), st.integers(0, 255), st.booleans()),
    st.tuples(st.just("prepare_mapped"), tx, st.integers(0, 255)),
    st.tuples(st.just("unmap"), runs, st.booleans()),
    st.tuples(st.just("prepare"), tx, runs),
    st.tuples(st.just("commit"), tx, st.booleans()),
    st.tuples(st.just("abort"), tx),
    st.tuples(st.just("acquire"), st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.just("trim"), st.integers(0, 3), st.integers(0, 3)),
    fault,
)


class Side:
    """One of the two: a device, an arena on it, and what was mapped by calls that succeeded."""

    def __init__(self, device: Device, config: ArenaConfig, access: Callable[[Arena, int, int], bool]) -> None:
        self.device = device
        self.arena = device.create_arena(config)
        self._access = access
        self._mapped: list[Run] = []

    def do(self, name: str, *arguments: object) -> object:
        """Perform one operation; returns its result, or the kind of its failure and the pages it names."""
        try:
            return getattr(self, name)(*arguments) if hasattr(self, name) else getattr(self.arena, name)(*arguments)
        except StateUnknown as error:
            return (type(error), error.pages)
        except DeviceError as error:
            return (type(error), error.code == 12 or error.code == 2)  # each device's own out of memory
        except Misuse as error:
            return type(error)

    def fail(self, call: Call, nth: int, from_there_on: bool) -> None:
        self.device.fail(call, nth, from_there_on=from_there_on)

    def map(self, wanted: list[Run]) -> None:
        self.arena.map(wanted)
        self._mapped += wanted

    def unmap_mapped(self, chosen: int, keep: bool) -> None:
        self.arena.unmap(self._choose(chosen), keep)

    def prepare_mapped(self, number: int, chosen: int) -> None:
        self.arena.prepare(number, self._choose(chosen))

    def state(self) -> object:
        stats, planes = self.arena.stats(), self.arena.config.planes
        readable = [self._access(self.arena, page, plane) for plane in range(planes) for page in range(PAGES)]
        fenced = [page for run in self.arena.quarantined() for page in range(run.first, run.first + run.count)]
        for page in fenced:  # what is behind a fence is nobody's business
            for plane in range(planes):
                readable[plane * PAGES + page] = False
        return stats, self.device.memory(), self.arena.quarantined(), self.device.calls(), readable

    def close(self) -> None:
        for call in Call:
            self.device.fail(call, 0)
        self.arena.close()
        assert self.device.memory()[0] == self.device.memory()[1]
        self.device.close()

    def _choose(self, chosen: int) -> list[Run]:
        """Some of the runs that were mapped, stale ones included."""
        return [run for index, run in enumerate(dict.fromkeys(self._mapped)) if chosen >> index & 1]


def readable_in_memory(arena: Arena, page: int, plane: int) -> bool:
    return read_memory(arena.base_address + plane * arena.config.plane_stride_bytes + page * PAGE_BYTES, 1) is not None


def readable_in_fake(arena: Arena, page: int, plane: int) -> bool:
    return arena.access(page, plane) != ""


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("card")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([1, 2]), st.sampled_from(ZeroBacking), st.lists(operation, max_size=25))
def test_the_same_calls_get_the_same_answers(
    host_dir: Path, planes: int, zero_backing: ZeroBacking, operations: list[tuple[object, ...]]
) -> None:
    config = ArenaConfig(PAGE_BYTES, PAGES, planes, PAGES * PAGE_BYTES if planes > 1 else 0, zero_backing)
    capacity_bytes = CAPACITY_PAGES * PAGE_BYTES
    native = open_device("host", 0, host_capacity_bytes=capacity_bytes, host_granularity_bytes=PAGE_BYTES, host_dir=host_dir)
    fake = FakeDevice(capacity_bytes, granularity_bytes=PAGE_BYTES)
    sides = [Side(native, config, readable_in_memory), Side(fake, config, readable_in_fake)]
    for name, *arguments in operations:
        answers = [side.do(str(name), *arguments) for side in sides]
        assert answers[0] == answers[1], name
        assert sides[0].state() == sides[1].state(), name
    for side in sides:
        side.close()
