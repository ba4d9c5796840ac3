# SPDX-License-Identifier: Apache-2.0
"""Is what is held enough to map on a card that is full to the last create? Needs a card of its own.

    python tests/gpu/full_card.py cuda:0 [--handles 10000]
    python tests/gpu/full_card.py host:0 --handles 500          no GPU needed

Creates the handles, fills the rest of the card with others, in ever smaller sizes, until not one more can be created; then maps every
handle that is held. Ends with 1 when one map fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from kvcached.errors import DeviceError, DeviceOutOfMemory
from kvcached.units import GIB, format_size
from kvcached.vmm.api import ArenaConfig, Device, Run
from kvcached.vmm.native import open_device

BATCH = 100
FILLER_PAGES = (512, 32, 4, 1)  # pages of the granularity in one handle


def fill(device: Device, page_bytes: int, total_bytes: int) -> int:
    """Create handles, larger ones first, until the device has no room for the smallest. Returns bytes."""
    filler = device.create_arena(ArenaConfig(page_bytes, total_bytes // page_bytes))
    for run_pages in FILLER_PAGES:
        try:
            while True:
                filler.acquire(run_pages, 1)
        except DeviceOutOfMemory:
            continue
    return filler.stats().held_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card")
    parser.add_argument("--handles", type=int, default=10_000)
    arguments = parser.parse_args()
    backend, _, ordinal = arguments.card.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        host = {"host_dir": Path(folder), "host_capacity_bytes": GIB, "host_granularity_bytes": 64 * 1024} if backend == "host" else {}
        device = open_device(backend, int(ordinal), **host)
        page_bytes = device.info.granularity_bytes
        arena = device.create_arena(ArenaConfig(page_bytes, arguments.handles))
        arena.acquire(1, arguments.handles)
        filled_bytes = fill(device, page_bytes, device.info.total_bytes)
        print(f"{arguments.handles} handles of {format_size(page_bytes)} held, {format_size(filled_bytes)} filled, "
              f"{format_size(device.memory()[0])} free by the driver's count, and no create works any more", flush=True)  # fmt: skip
        start, mapped = time.perf_counter(), 0
        try:
            for first in range(0, arguments.handles, BATCH):
                count = min(BATCH, arguments.handles - first)
                arena.map([Run(page, 1) for page in range(first, first + count)])
                mapped += count
        except DeviceError as error:
            print(f"FAILED after {mapped} maps: {error}")
            return 1
        print(f"all {mapped} mapped in {(time.perf_counter() - start) * 1000:.0f} ms")
        arena.unmap([Run(page, 1) for page in range(arguments.handles)], keep=False)
        assert arena.stats().held_bytes == 0
        return 0


if __name__ == "__main__":
    sys.exit(main())
