# SPDX-License-Identifier: Apache-2.0
"""One suite over every arena: the fake, the host, and CUDA and HIP over stub drivers."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING

import pytest

from kvcached.errors import DeviceError, DeviceOutOfMemory, Misuse, StateUnknown
from kvcached.units import KIB
from kvcached.vmm.api import ArenaConfig, Call, Run, ZeroBacking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.conftest import Bench

    from kvcached.vmm.api import Arena, Device

PAGE_BYTES = 64 * KIB  # as the bench has it
PAGES = 16
BATCH = [Run(0, 2), Run(2, 1), Run(4, 3), Run(8, 1)]


@pytest.fixture
def device(bench: Bench) -> Iterator[Device]:
    device = bench.open()
    yield device
    device.close()


def make_arena(device: Device, planes: int = 1, zero_backing: ZeroBacking = ZeroBacking.NEVER) -> Arena:
    stride_bytes = (PAGES + 1) * PAGE_BYTES if planes > 1 else 0
    return device.create_arena(ArenaConfig(PAGE_BYTES, PAGES, planes, stride_bytes, zero_backing))


@pytest.fixture(params=[1, 3], ids=["one plane", "three planes"])
def arena(device: Device, request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = make_arena(device, request.param)
    yield arena
    arena.close()


def live_handles(device: Device) -> int:
    calls = device.calls()
    return calls[Call.CREATE] - calls[Call.RELEASE]


def test_device_says_what_it_is(device: Device) -> None:
    info = device.info
    assert info.granularity_bytes == PAGE_BYTES
    assert info.uuid
    assert info.name
    assert device.memory() == (info.total_bytes, info.total_bytes)


def test_map_and_unmap_account_for_all_planes(bench: Bench, device: Device, arena: Arena) -> None:
    planes = arena.config.planes
    empty = arena.stats()
    arena.map(BATCH)
    assert arena.stats().mapped_pages == 7
    assert arena.stats().mapped_bytes == arena.stats().held_bytes == 7 * planes * PAGE_BYTES
    assert device.memory()[0] == device.info.total_bytes - arena.stats().held_bytes
    assert live_handles(device) == len(BATCH) * planes
    for plane in range(planes):
        assert [bench.readable(arena, page, plane) for page in range(10)] == [True] * 3 + [False] + [True] * 3 + [False, True, False]
    arena.unmap(BATCH[1:])
    assert arena.stats().mapped_pages == 2
    arena.unmap(BATCH[:1])
    assert arena.stats() == empty
    assert live_handles(device) == 0


def test_one_access_call_for_neighbours(bench: Bench, device: Device, arena: Arena) -> None:
    arena.map([Run(5, 1), Run(3, 2), Run(6, 1)])
    per_plane = 3 if bench.name == "hip" else 1
    assert device.calls()[Call.ACCESS] == per_plane * arena.config.planes


def test_kept_handles_are_used_again(device: Device, arena: Arena) -> None:
    planes = arena.config.planes
    arena.map([Run(0, 2), Run(4, 1)])
    arena.unmap([Run(0, 2), Run(4, 1)], keep=True)
    assert arena.stats().cached_bytes == 3 * planes * PAGE_BYTES
    arena.map([Run(9, 2)])
    assert device.calls()[Call.CREATE] == 2 * planes
    assert arena.stats().cached_bytes == planes * PAGE_BYTES
    arena.acquire(2, 2)
    assert arena.stats().cached_bytes == 5 * planes * PAGE_BYTES
    assert arena.trim(2, 1) == 2 * planes * PAGE_BYTES
    assert arena.trim(3) == 0
    assert arena.trim() == 3 * planes * PAGE_BYTES
    assert arena.stats().held_bytes == arena.stats().mapped_bytes


@pytest.mark.parametrize(
    "runs",
    [
        [Run(10, 0)],
        [Run(16, 1)],
        [Run(15, 2)],
        [Run(-1, 1)],
        [Run(1, 2**64 - 1)],
        [Run(4, 1)],
        [Run(3, 2)],
        [Run(10, 2), Run(11, 1)],
        [Run(10, 1), Run(0, 1)],
    ],
)
def test_map_refuses_and_changes_nothing(device: Device, arena: Arena, runs: list[Run]) -> None:
    arena.map([Run(0, 2), Run(4, 3)])
    before, calls = arena.stats(), device.calls()
    with pytest.raises(Misuse):
        arena.map(runs)
    assert arena.stats() == before
    assert device.calls() == calls


@pytest.mark.parametrize("runs", [[Run(10, 1)], [Run(4, 2)], [Run(5, 2)], [Run(4, 4)], [Run(4, 3), Run(4, 3)], [Run(4, 3), Run(9, 1)]])
def test_unmap_takes_whole_runs_only(device: Device, arena: Arena, runs: list[Run]) -> None:
    arena.map([Run(0, 2), Run(4, 3)])
    before, calls = arena.stats(), device.calls()
    with pytest.raises(Misuse):
        arena.unmap(runs)
    with pytest.raises(Misuse):
        arena.prepare(1, runs)
    assert arena.stats() == before
    assert device.calls() == calls


@pytest.mark.parametrize(
    "config",
    [
        ArenaConfig(PAGE_BYTES // 2, 4),
        ArenaConfig(PAGE_BYTES + 4096, 4),
        ArenaConfig(0, 4),
        ArenaConfig(PAGE_BYTES, 0),
        ArenaConfig(PAGE_BYTES, -4),
        ArenaConfig(PAGE_BYTES, 2**50),
        ArenaConfig(PAGE_BYTES, 4, planes=0),
        ArenaConfig(PAGE_BYTES, 4, planes=2, plane_stride_bytes=3 * PAGE_BYTES),
        ArenaConfig(PAGE_BYTES, 4, planes=2, plane_stride_bytes=4 * PAGE_BYTES + 4096),
    ],
)
def test_sizes_that_do_not_fit_are_refused(device: Device, config: ArenaConfig) -> None:
    with pytest.raises(Misuse):
        device.create_arena(config)


def test_prepare_and_abort_restore(bench: Bench, arena: Arena) -> None:
    arena.map(BATCH)
    before = arena.stats()
    arena.prepare(1, BATCH[:2])
    arena.prepare(1, BATCH[:2])
    assert not bench.readable(arena, 0)
    assert arena.stats().prepared_bytes == 3 * arena.config.planes * PAGE_BYTES
    assert arena.stats().held_bytes == before.held_bytes
    with pytest.raises(Misuse):
        arena.prepare(1, BATCH[2:])
    arena.abort(1)
    arena.abort(1)
    assert arena.stats() == before
    assert bench.readable(arena, 0)
    with pytest.raises(Misuse):
        arena.commit(1)


def test_commit_once_and_for_all(arena: Arena) -> None:
    arena.map(BATCH)
    arena.prepare(1, BATCH[:1])
    arena.prepare(2, BATCH[1:2])
    arena.commit(1, keep=True)
    arena.commit(1, keep=True)
    arena.commit(2)
    assert arena.stats().cached_bytes == 2 * arena.config.planes * PAGE_BYTES
    assert arena.stats().prepared_bytes == 0
    with pytest.raises(Misuse):
        arena.abort(1)
    with pytest.raises(Misuse):
        arena.commit(3)
    arena.prepare(2, BATCH[1:2])  # a late repeat is answered
    assert arena.stats().prepared_bytes == 0


def test_abort_before_prepare(arena: Arena) -> None:
    arena.map(BATCH)
    arena.abort(5)
    with pytest.raises(Misuse):
        arena.prepare(5, BATCH[:1])
    for number in (0, -1, 2**64):
        with pytest.raises(Misuse):
            arena.prepare(number, BATCH[:1])
    assert arena.stats().mapped_pages == 7


def test_a_failed_prepare_is_not_tried_again(arena: Arena) -> None:
    with pytest.raises(Misuse):
        arena.prepare(1, [Run(0, 1)])
    arena.map([Run(0, 1)])
    with pytest.raises(Misuse):
        arena.prepare(1, [Run(0, 1)])
    with pytest.raises(Misuse):
        arena.commit(1)
    arena.abort(1)
    assert arena.stats().mapped_pages == 1


def test_only_so_many_transactions_are_remembered(arena: Arena) -> None:
    arena.map([Run(0, 1), Run(1, 1)])
    arena.prepare(1, [Run(0, 1)])
    for tx in range(10, 10 + 256 + 1):
        arena.abort(tx)
    with pytest.raises(Misuse):
        arena.prepare(11, [Run(1, 1)])
    arena.prepare(10, [Run(1, 1)])  # forgotten, so it is new
    arena.abort(10)
    arena.commit(1)  # prepared ones are not forgotten


@pytest.mark.parametrize("zero_backing", [ZeroBacking.USED, ZeroBacking.ALL])
def test_unmapped_pages_read_as_zero(bench: Bench, device: Device, zero_backing: ZeroBacking) -> None:
    arena = make_arena(device, 2, zero_backing)
    assert arena.stats().zero_bytes == arena.stats().held_bytes == PAGE_BYTES
    always = zero_backing is ZeroBacking.ALL
    assert bench.readable(arena, 4, 1) is always
    arena.map([Run(4, 2)])
    arena.unmap([Run(4, 2)])
    assert bench.readable(arena, 4, 1)
    assert bench.readable(arena, 5)
    assert bench.readable(arena, 6) is always
    arena.map([Run(5, 2)])
    arena.prepare(1, [Run(5, 2)])
    assert bench.readable(arena, 6, 1)
    arena.close()
    assert live_handles(device) == 0
    assert device.calls()[Call.MAP] == device.calls()[Call.UNMAP]


@pytest.mark.parametrize("zero_backing", list(ZeroBacking))
@pytest.mark.parametrize("from_there_on", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.ACCESS])
def test_map_is_all_or_nothing_at_every_call(device: Device, call: Call, from_there_on: bool, zero_backing: ZeroBacking) -> None:
    for nth in range(1, 100):
        arena = make_arena(device, 2, zero_backing)
        arena.map([Run(4, 1)])
        arena.unmap([Run(4, 1)])
        before = arena.stats()
        device.fail(call, nth, from_there_on=from_there_on)
        raised = outcome(lambda arena=arena: arena.map(BATCH))
        device.fail(call, 0)
        if raised is StateUnknown:
            assert from_there_on
            assert arena.quarantined()
        elif raised:
            assert raised is DeviceOutOfMemory
            assert arena.stats() == before
            arena.map(BATCH)
        assert device.info.total_bytes - device.memory()[0] == arena.stats().held_bytes
        arena.close()
        assert live_handles(device) == 0
        if raised is None:
            assert nth > 4
            return
    pytest.fail("the call was never reached")


def outcome(work: Callable[[], None]) -> type[Exception] | None:
    try:
        work()
    except (DeviceOutOfMemory, StateUnknown) as error:
        return type(error)
    return None


def test_what_cannot_be_undone_is_fenced_off(device: Device, arena: Arena) -> None:
    device.fail(Call.MAP, 3, from_there_on=True)
    device.fail(Call.UNMAP, 1)
    with pytest.raises(StateUnknown) as caught:
        arena.map([Run(0, 2), Run(4, 2), Run(6, 1)])
    device.fail(Call.MAP, 0)
    fenced = arena.quarantined()
    assert len(fenced) == 1
    assert caught.value.pages == tuple(range(fenced[0].first, fenced[0].first + fenced[0].count))
    assert arena.stats().quarantined_bytes == fenced[0].count * arena.config.planes * PAGE_BYTES
    for refused in (arena.map, arena.unmap):
        with pytest.raises(Misuse):
            refused(fenced)
    arena.map([Run(8, 1)])


def test_an_abort_that_fails_may_be_tried_again(bench: Bench, device: Device, arena: Arena) -> None:
    arena.map(BATCH)
    arena.prepare(1, BATCH[:2])
    before = arena.stats()
    device.fail(Call.MAP, 2)
    if arena.config.planes > 1:
        with pytest.raises(DeviceOutOfMemory):
            arena.abort(1)
        assert arena.stats() == before
    device.fail(Call.MAP, arena.config.planes + 1)
    device.fail(Call.UNMAP, 1)
    with pytest.raises(StateUnknown) as caught:
        arena.abort(1)
    assert caught.value.pages == (0, 1)
    arena.abort(1)  # what is left of it comes back
    assert bench.readable(arena, 2)
    assert arena.stats().prepared_bytes == 0
    assert arena.stats().mapped_pages == 5


def test_handles_that_cannot_be_released_stay_accounted_for(device: Device, arena: Arena) -> None:
    arena.map([Run(0, 2)])
    arena.prepare(1, [Run(0, 2)])
    device.fail(Call.RELEASE, 1)
    with pytest.raises(StateUnknown) as caught:
        arena.commit(1)
    assert caught.value.pages == ()
    assert arena.stats().quarantined_bytes == arena.stats().held_bytes == 2 * PAGE_BYTES
    with pytest.raises(StateUnknown):
        arena.commit(1)
    arena.map([Run(0, 2)])


def test_other_codes_are_not_out_of_memory(device: Device, arena: Arena) -> None:
    device.fail(Call.MAP, 1, code=9999)
    with pytest.raises(DeviceError) as caught:
        arena.map([Run(0, 1)])
    assert not isinstance(caught.value, DeviceOutOfMemory)
    assert caught.value.code == 9999
    assert arena.stats().held_bytes == 0


def test_memory_runs_out_and_comes_back(bench: Bench) -> None:
    device = bench.open(256 * PAGE_BYTES)
    arena = device.create_arena(ArenaConfig(PAGE_BYTES, 400))
    arena.map([Run(0, 200), Run(200, 56)])
    assert device.memory() == (0, 256 * PAGE_BYTES)
    with pytest.raises(DeviceOutOfMemory) as caught:
        arena.map([Run(300, 1)])
    assert caught.value.size_bytes == PAGE_BYTES
    arena.unmap([Run(0, 200)])
    with pytest.raises(DeviceOutOfMemory):
        arena.map([Run(0, 100), Run(300, 100), Run(256, 1)])
    assert arena.stats().mapped_pages == 56
    arena.map([Run(0, 100), Run(300, 100)])
    assert device.memory() == (0, 256 * PAGE_BYTES)
    arena.close()
    device.close()


def test_any_thread_may_call(device: Device, arena: Arena) -> None:
    errors: list[Exception] = []

    def churn(first: int) -> None:
        try:
            for _ in range(20):
                arena.map([Run(first, 2)])
                arena.unmap([Run(first, 2)], keep=True)
        except DeviceError as error:
            errors.append(error)

    threads = [Thread(target=churn, args=(first,)) for first in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.stats().mapped_pages == 0
    assert 0 < arena.trim() <= 3 * 2 * arena.config.planes * PAGE_BYTES
    assert device.memory() == (device.info.total_bytes, device.info.total_bytes)


def test_closing(bench: Bench) -> None:
    device = bench.open()
    arena = make_arena(device)
    arena.map(BATCH)
    arena.prepare(1, BATCH[:1])
    arena.acquire(1, 3)
    with pytest.raises(Misuse):
        device.close()
    arena.close()
    arena.close()
    for use in (arena.stats, arena.quarantined, lambda: arena.map([Run(0, 1)]), lambda: arena.commit(1)):
        with pytest.raises(Misuse):
            use()
    assert device.memory()[0] == device.info.total_bytes
    device.close()
    device.close()
    with pytest.raises(Misuse):
        device.memory()
