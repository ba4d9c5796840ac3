# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on host memory goes wrong for real: use after unmap, death, fork, work in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcached.errors import DeviceUnavailable, Misuse
from kvcached.testing.lateness import LateReads, ReadAfterUnmap
from kvcached.units import MIB
from kvcached.vmm.api import ArenaConfig, Run, ZeroBacking
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcached.vmm.native import NativeDevice

PAGE_BYTES = 2 * MIB
CAPACITY_BYTES = 64 * PAGE_BYTES

USE_AFTER_UNMAP = """
import ctypes, sys
from pathlib import Path
from kvcached.vmm.api import ArenaConfig, Run, ZeroBacking
from kvcached.vmm.native import open_device
device = open_device("host", 0, host_capacity_bytes=int(sys.argv[2]), host_dir=Path(sys.argv[1]))
arena = device.create_arena(ArenaConfig(2 << 20, 8, zero_backing=ZeroBacking[sys.argv[3]]))
arena.map([Run(3, 1)])
ctypes.memset(arena.base_address + 3 * (2 << 20), 1, 64)
arena.unmap([Run(3, 1)])
print("unmapped", flush=True)
print(ctypes.string_at(arena.base_address + 3 * (2 << 20), 1))
"""

HOLD = """
import sys, time
from pathlib import Path
from kvcached.vmm.api import ArenaConfig, Run
from kvcached.vmm.native import open_device
device = open_device("host", 0, host_capacity_bytes=int(sys.argv[2]), host_dir=Path(sys.argv[1]))
arena = device.create_arena(ArenaConfig(2 << 20, 64))
arena.map([Run(0, 40)])
print("held", flush=True)
time.sleep(60)
"""

FORK = """
import os, sys
from pathlib import Path
from kvcached.errors import Misuse
from kvcached.testing.lateness import read_memory
from kvcached.vmm.api import ArenaConfig, Run
from kvcached.vmm.native import open_device
device = open_device("host", 0, host_capacity_bytes=int(sys.argv[2]), host_dir=Path(sys.argv[1]))
arena = device.create_arena(ArenaConfig(2 << 20, 8))
arena.map([Run(0, 1)])
child = os.fork()
if child == 0:
    calls = [device.memory, device.calls, device.close, lambda: device.create_arena(arena.config), lambda: arena.map([Run(1, 1)]),
             lambda: arena.unmap([Run(0, 1)]), arena.close]
    for call in calls:
        try:
            call()
        except Misuse as error:
            print("refused" if "forked" in str(error) else error)
    print("fault" if read_memory(arena.base_address, 1) is None else "inherited")
    mine = open_device("host", 0, host_dir=Path(sys.argv[1]))
    own = mine.create_arena(ArenaConfig(2 << 20, 8))
    own.map([Run(0, 8)])
    print("own arena works" if mine.memory()[0] == int(sys.argv[2]) - 9 * (2 << 20) else mine.memory(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
arena.map([Run(1, 1)])
arena.close()
device.close()
print("parent goes on")
"""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[NativeDevice]:
    device = open_device("host", 0, host_capacity_bytes=CAPACITY_BYTES, host_dir=tmp_path)
    yield device
    device.close()


def run_python(code: str, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, str(CAPACITY_BYTES), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(("zero_backing", "status", "printed"), [("NEVER", -signal.SIGSEGV, ""), ("USED", 0, "b'\\x00'\n")])
def test_use_after_unmap(tmp_path: Path, zero_backing: str, status: int, printed: str) -> None:
    with run_python(USE_AFTER_UNMAP, tmp_path, zero_backing) as process:
        output, _ = process.communicate(timeout=60)
    assert output == "unmapped\n" + printed
    assert process.returncode == status


def test_memory_of_a_killed_process_is_free_again(tmp_path: Path, device: NativeDevice) -> None:
    with run_python(HOLD, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert device.memory() == (24 * PAGE_BYTES, CAPACITY_BYTES)
        process.kill()
    assert device.memory() == (CAPACITY_BYTES, CAPACITY_BYTES)


def test_a_forked_child_has_no_device(tmp_path: Path) -> None:
    with run_python(FORK, tmp_path) as process:
        output, _ = process.communicate(timeout=60)
    assert output.splitlines() == ["refused"] * 7 + ["fault", "own arena works", "parent goes on"]
    assert process.returncode == 0


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_machine_without_a_driver_says_so(backend: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="no driver on this machine"):
        open_device(backend, 0, driver_library=tmp_path / "libnone.so")
    with pytest.raises(Misuse, match="not one of host, cuda, hip"):
        open_device("tpu", 0)


def test_unmapping_under_work_in_flight_is_caught(device: NativeDevice) -> None:
    arena = device.create_arena(ArenaConfig(PAGE_BYTES, 8))
    stream = LateReads()
    arena.map([Run(0, 1), Run(1, 1)])
    stream.submit(1, arena.base_address, 8, expected=bytes(8))
    stream.submit(2, arena.base_address + PAGE_BYTES, 8)
    stream.run(through_marker=1)
    assert (stream.completed_marker, stream.pending) == (1, 1)
    arena.unmap([Run(0, 1)])  # its work has finished
    stream.submit(3, arena.base_address + PAGE_BYTES, 8)
    stream.run()
    assert (stream.completed_marker, stream.pending) == (3, 0)
    stream.submit(4, arena.base_address + PAGE_BYTES, 8)
    arena.unmap([Run(1, 1)])  # too early
    with pytest.raises(ReadAfterUnmap, match="marker 4"):
        stream.run()
    arena.close()


def test_work_in_flight_that_reads_other_bytes_is_caught(device: NativeDevice) -> None:
    arena = device.create_arena(ArenaConfig(PAGE_BYTES, 8, zero_backing=ZeroBacking.USED))
    arena.map([Run(0, 1)])
    stream = LateReads()
    stream.submit(1, arena.base_address, 4, expected=b"abcd")
    with pytest.raises(AssertionError, match="other bytes"):
        stream.run()
    with pytest.raises(ValueError, match="marker 0 after 1"):
        stream.submit(0, arena.base_address, 4)
    arena.close()


def test_who_asks_for_another_size_is_told_what_to_do(tmp_path: Path) -> None:
    open_device("host", 0, host_capacity_bytes=CAPACITY_BYTES, host_dir=tmp_path).close()
    with pytest.raises(Misuse, match=rf"{2 * CAPACITY_BYTES} bytes .* {CAPACITY_BYTES}: ask for that, or end its users"):
        open_device("host", 0, host_capacity_bytes=2 * CAPACITY_BYTES, host_dir=tmp_path)
