# SPDX-License-Identifier: Apache-2.0
"""The child process of `try_card`: a small arena on one card. Prints one JSON value: whether it worked, and a sentence."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.errors import KVCachedError
from kvcached.units import format_size
from kvcached.vmm.api import ArenaConfig, Run
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from kvcached.vmm.api import Device

_PAGES: Final = 4
_PATTERN: Final = b"KVCacheD"


def probe(card: str, host_granularity_bytes: int) -> str:
    """What the card said. Raises what the device raises, `RuntimeError` when its memory does not behave."""
    backend, _, ordinal = card.partition(":")
    if backend != "host":
        return _try(open_device(backend, int(ordinal)), touch=False)
    with tempfile.TemporaryDirectory() as directory:
        device = open_device(
            backend,
            int(ordinal),
            host_capacity_bytes=2 * _PAGES * host_granularity_bytes,
            host_granularity_bytes=host_granularity_bytes,
            host_dir=Path(directory),
        )
        return _try(device, touch=True)


def _try(device: Device, *, touch: bool) -> str:
    info = device.info
    free_bytes, total_bytes = device.memory()
    arena = device.create_arena(ArenaConfig(page_bytes=info.granularity_bytes, pages=_PAGES))
    runs = [Run(0, 1), Run(1, _PAGES - 1)]
    arena.map(runs)
    if touch:
        _write_and_read(arena.base_address, _PAGES * info.granularity_bytes)
    arena.unmap(runs)
    left_bytes = arena.stats().held_bytes
    arena.close()
    device.close()
    if left_bytes:
        raise RuntimeError(f"{left_bytes} bytes were still held after everything was unmapped")
    version = f", driver {info.driver_version}" if info.driver_version else ""
    free = f", {format_size(free_bytes)} of {format_size(total_bytes)} free" if info.backend != "host" else ""
    return f"{info.name}{version}{free}, pages of {format_size(info.granularity_bytes)}: mapped and unmapped"


def _write_and_read(address: int, size_bytes: int) -> None:
    last = address + size_bytes - len(_PATTERN)
    for place in (address, last):
        ctypes.memmove(place, _PATTERN, len(_PATTERN))
    if any(ctypes.string_at(place, len(_PATTERN)) != _PATTERN for place in (address, last)):
        raise RuntimeError("the memory does not hold what was written to it")


def main() -> None:
    """Arguments: card, granularity of a host card in bytes."""
    try:
        answer = {"ok": True, "text": probe(sys.argv[1], int(sys.argv[2]))}
    except (KVCachedError, RuntimeError) as error:
        answer = {"ok": False, "text": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
