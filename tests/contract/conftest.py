# SPDX-License-Identifier: Apache-2.0
"""The contract program and the stub drivers, built once per source state; and the devices that one suite runs on."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcached.testing.lateness import read_memory
from kvcached.units import KIB
from kvcached.vmm.fake import FakeDevice
from kvcached.vmm.fake_arena import FakeArena
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from kvcached.vmm.api import Arena, Device

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 64 * KIB


def build(directory: Path, *options: str) -> Path:
    """Configure and build `native/` with its tests; returns the folder of the programs. Does nothing when all is up to date."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", "-S", ROOT / "native", "-B", directory, *generator, "-DKVCACHED_TESTS=ON", *options], check=True, capture_output=True
    )
    built = subprocess.run(["cmake", "--build", directory, "--parallel", "2"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return directory / "tests"


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the contract program and the stub drivers, built under address and undefined-behaviour sanitizers."""
    return build(ROOT / "build" / "native-sanitized", "-DCMAKE_BUILD_TYPE=None", "-DKVCACHED_SANITIZE=address,undefined")


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The stub drivers without sanitizers, so that Python can load them."""
    directory = tmp_path_factory.mktemp("stubs")
    libraries = {name: directory / f"libstub_{name}.so" for name in ("cuda", "hip")}
    for name, library in libraries.items():
        source = ROOT / "native" / "tests" / f"stub_{name}.cpp"
        subprocess.run(
            ["c++", "-std=c++17", "-O1", "-D_GNU_SOURCE", "-shared", "-fPIC", "-fvisibility=hidden", source, "-o", library], check=True
        )
    return libraries


class Bench:
    """One kind of device under test, with a way to look at its memory."""

    def __init__(self, name: str, tmp_path: Path, stubs: dict[str, Path]) -> None:
        self.name = name
        self._tmp_path = tmp_path
        self._stub = stubs.get(name)

    def open(self, capacity_bytes: int = 256 * PAGE_BYTES) -> Device:
        """A device with pages of `PAGE_BYTES`."""
        if self.name == "fake":
            return FakeDevice(capacity_bytes, granularity_bytes=PAGE_BYTES)
        if self._stub is None:
            return open_device("host", 0, host_capacity_bytes=capacity_bytes, host_granularity_bytes=PAGE_BYTES, host_dir=self._tmp_path)
        ctypes.CDLL(str(self._stub)).stub_size(ctypes.c_uint64(capacity_bytes), ctypes.c_uint64(PAGE_BYTES))
        return open_device(self.name, 0, driver_library=self._stub)

    def readable(self, arena: Arena, page: int, plane: int = 0) -> bool:
        if isinstance(arena, FakeArena):
            return arena.access(page, plane) != ""
        return self.read(arena, page, plane) is not None

    def read(self, arena: Arena, page: int, plane: int = 0) -> bytes | None:
        return read_memory(arena.base_address + plane * arena.config.plane_stride_bytes + page * PAGE_BYTES, 8)


@pytest.fixture(params=["fake", "host", "cuda", "hip"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, stubs: dict[str, Path]) -> Bench:
    return Bench(request.param, tmp_path, stubs)
