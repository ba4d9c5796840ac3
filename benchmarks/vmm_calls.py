# SPDX-License-Identifier: Apache-2.0
"""What the driver's virtual memory calls cost: medians per call and whole-range rates, by size of the handle.

    python benchmarks/vmm_calls.py host:0 [--json FILE]
    python benchmarks/vmm_calls.py cuda:0 --range-gib 32

The time is the driver's alone, as the native library counts it around each call; "batch" adds what the library and Python take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.units import GIB, MIB, format_size
from kvcached.vmm.api import ArenaConfig, Call, Run, ZeroBacking
from kvcached.vmm.native import NativeArena, NativeDevice, open_device

if TYPE_CHECKING:
    from collections.abc import Callable

HANDLE_MIB = (2, 8, 16, 32, 64, 128, 256)
SAMPLES = 32
TIMED = (Call.CREATE, Call.MAP, Call.ACCESS, Call.UNMAP, Call.RELEASE)


@dataclass
class Row:
    """One size of handle. Medians in microseconds, rates in GiB/s of address range."""

    handle_mib: int
    create_us: float
    map_us: float
    access_us: float
    unmap_us: float
    release_us: float
    zero_map_us: float  # one map over a zero page, all its driver calls
    zero_unmap_us: float
    grow_gib_s: float
    shrink_gib_s: float
    reuse_gib_s: float  # map from the cache of handles
    grow_calls: int


def spent_us(device: NativeDevice, work: Callable[[], object]) -> dict[Call, float]:
    """Driver time of `work`, per kind of call."""
    before = device.call_times_ns()
    work()
    after = device.call_times_ns()
    return {call: (after[call] - before[call]) / 1000 for call in Call}


def rate(size_bytes: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return size_bytes / GIB / (time.perf_counter() - start)


def medians(device: NativeDevice, page_bytes: int, zero_backing: ZeroBacking) -> tuple[dict[Call, float], float, float]:
    """Per call; then all calls of one map and of one unmap together."""
    arena = device.create_arena(ArenaConfig(page_bytes, SAMPLES, zero_backing=zero_backing))
    ups, downs = [], []
    for _ in range(3):
        ups += [spent_us(device, lambda page=page: arena.map([Run(page, 1)])) for page in range(SAMPLES)]
        downs += [spent_us(device, lambda page=page: arena.unmap([Run(page, 1)])) for page in range(SAMPLES)]
    arena.close()
    per_call = {call: statistics.median(up[call] + down[call] for up, down in zip(ups, downs, strict=True)) for call in TIMED}
    last_up, last_down = (statistics.median(sum(sample.values()) for sample in samples[SAMPLES:]) for samples in (ups, downs))
    return per_call, last_up, last_down


def rates(device: NativeDevice, page_bytes: int, range_bytes: int) -> tuple[float, float, float, int]:
    pages = range_bytes // page_bytes
    runs = [Run(page, 1) for page in range(pages)]
    arena: NativeArena = device.create_arena(ArenaConfig(page_bytes, pages))
    before = sum(device.calls().values())
    grow = rate(range_bytes, lambda: arena.map(runs))
    calls = sum(device.calls().values()) - before
    arena.unmap(runs, keep=True)
    reuse = rate(range_bytes, lambda: arena.map(runs))
    shrink = rate(range_bytes, lambda: arena.unmap(runs))
    arena.close()
    return grow, shrink, reuse, calls


def measure(device: NativeDevice, handle_mib: int, range_bytes: int) -> Row:
    page_bytes = handle_mib * MIB
    plain, _, _ = medians(device, page_bytes, ZeroBacking.NEVER)
    _, zero_up, zero_down = medians(device, page_bytes, ZeroBacking.USED)
    grow, shrink, reuse, calls = rates(device, page_bytes, range_bytes)
    return Row(handle_mib, *(plain[call] for call in TIMED), zero_up, zero_down, grow, shrink, reuse, calls)


def show(device: NativeDevice, rows: list[Row], range_bytes: int) -> None:
    info = device.info
    print(f"{info.name}, {info.uuid}, driver {info.driver_version}, granularity {format_size(info.granularity_bytes)}")
    print(f"medians in microseconds; rates over {format_size(range_bytes)} in GiB/s\n")
    print("handle | create    map access  unmap release | over zero: map  unmap |     grow   shrink    reuse | calls to grow")
    for row in rows:
        calls = f"{row.create_us:6.1f} {row.map_us:6.1f} {row.access_us:6.1f} {row.unmap_us:6.1f} {row.release_us:7.1f}"
        speeds = f"{row.grow_gib_s:8.0f} {row.shrink_gib_s:8.0f} {row.reuse_gib_s:8.0f}"
        print(f"{row.handle_mib:3} MiB | {calls} | {row.zero_map_us:14.1f} {row.zero_unmap_us:6.1f} | {speeds} | {row.grow_calls:6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", help="host:0, cuda:0 or hip:0")
    parser.add_argument("--range-gib", type=int, default=32, help="range of the whole-range rates")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    backend, _, ordinal = options.card.partition(":")
    range_bytes = options.range_gib * GIB
    with tempfile.TemporaryDirectory() as host_dir:
        host = (
            {"host_capacity_bytes": 2 * range_bytes + SAMPLES * HANDLE_MIB[-1] * MIB, "host_dir": Path(host_dir)}
            if backend == "host"
            else {}
        )
        device = open_device(backend, int(ordinal or 0), **host)
        rows = [measure(device, size, range_bytes) for size in HANDLE_MIB if size * MIB % device.info.granularity_bytes == 0]
        show(device, rows, range_bytes)
        if options.json:
            options.json.write_text(json.dumps({"device": asdict(device.info), "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
        device.close()


if __name__ == "__main__":
    main()
