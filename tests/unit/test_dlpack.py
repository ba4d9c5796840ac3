# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory that is not there yet: untouched when made, usable when mapped, owner alive exactly as long as needed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import textwrap
import weakref
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from kvcached.errors import Misuse
from kvcached.views.dlpack import DeviceType, DLPackView, element_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS = 0, 3, 0x22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Range:
    """Reserved addresses without memory."""

    def __init__(self, pages: int) -> None:
        self.size_bytes = pages * PAGE
        self.address: int = libc.mmap(None, self.size_bytes, PROT_NONE, MAP_PRIVATE_ANONYMOUS, -1, 0)
        assert self.address != ctypes.c_void_p(-1).value

    def make_usable(self, page: int) -> None:
        assert libc.mprotect(self.address + page * PAGE, PAGE, PROT_READ_WRITE) == 0

    def __del__(self) -> None:
        libc.munmap(self.address, self.size_bytes)


def view_of(owner: Range, shape: tuple[int, ...] = (4, 8), strides: tuple[int, ...] = (PAGE, 1), dtype: str = "uint8") -> DLPackView:
    return DLPackView(owner.address, shape, strides, dtype, DeviceType.CPU, 0, owner)


class Consumer:
    """What a consumer written in C does with a capsule."""

    name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    deleter_offset_bytes: ClassVar = {b"dltensor": 48 + 8, b"dltensor_versioned": 8 + 8}
    used = b"used_dltensor"

    def __init__(self, capsule: object) -> None:
        name = self.name(capsule)
        self.address = self.pointer(capsule, name)
        self.deleter_field = ctypes.c_void_p.from_address(self.address + self.deleter_offset_bytes[name])
        self.rename(capsule, self.used)

    def delete(self) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.deleter_field.value or 0)(self.address)

    def delete_in_a_thread_unknown_to_python(self) -> None:
        thread = ctypes.c_void_p()
        assert libc.pthread_create(ctypes.byref(thread), None, self.deleter_field, ctypes.c_void_p(self.address)) == 0
        assert libc.pthread_join(thread, None) == 0


def living_offers() -> int:
    gc.collect()
    return sum(type(one).__name__ == "_Offer" for one in gc.get_objects())


@pytest.fixture
def no_unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    yield
    gc.collect()
    assert not seen


def test_an_array_over_memory_that_is_not_there_becomes_usable_page_by_page() -> None:
    memory = Range(4)
    array = np.from_dlpack(view_of(memory))
    assert array.ctypes.data == memory.address
    assert array.shape == (4, 8)
    assert array.strides == (PAGE, 1)
    memory.make_usable(2)
    assert array.flags.writeable
    array[2] = range(8)
    assert ctypes.string_at(memory.address + 2 * PAGE, 8) == bytes(range(8))


def test_touching_what_is_not_mapped_is_a_segmentation_fault_so_making_the_array_touched_nothing() -> None:
    script = f"""
        import sys
        sys.path[:0] = {[*sys.path]!r}
        import numpy
        from tests.unit.test_dlpack import Range, view_of
        array = numpy.from_dlpack(view_of(Range(4)))
        print("made", flush=True)
        array[0, 0]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "made\n"
    assert done.returncode == -11


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "float16", "float32"])
def test_dtypes_arrive_under_their_names(dtype: str) -> None:
    array = np.from_dlpack(view_of(Range(1), (2, 3), (3, 1), dtype))
    assert array.dtype == np.dtype(dtype)
    assert array.strides == (3 * array.itemsize, array.itemsize)
    assert element_bytes(dtype) == array.itemsize


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_arrives_as_bytes(dtype: str) -> None:
    assert np.from_dlpack(view_of(Range(1), (4,), (1,), dtype)).dtype == np.uint8
    assert element_bytes(dtype) == 1


def test_the_owner_lives_as_long_as_any_array_and_no_longer() -> None:
    memory = Range(1)
    gone = weakref.ref(memory)
    view = view_of(memory)
    first, second = np.from_dlpack(view), np.from_dlpack(view)
    del memory, view, first
    gc.collect()
    assert gone() is not None
    assert second.shape == (4, 8)
    del second
    assert gone() is None


def test_a_view_without_arrays_lets_the_owner_go() -> None:
    memory = Range(1)
    gone = weakref.ref(memory)
    view = view_of(memory)
    del memory
    assert gone() is not None
    del view
    assert gone() is None


@pytest.mark.usefixtures("no_unraisable")
def test_what_nobody_accepted_is_taken_back_with_the_view_and_cannot_be_accepted_later() -> None:
    memory = Range(1)
    gone = weakref.ref(memory)
    view = view_of(memory)
    capsules = [view.__dlpack__(), view.__dlpack__(max_version=(1, 0))]
    assert [Consumer.name(capsule) for capsule in capsules] == [b"dltensor", b"dltensor_versioned"]
    del memory, view
    assert gone() is None
    assert [Consumer.name(capsule) for capsule in capsules] == [Consumer.used] * 2


@pytest.mark.usefixtures("no_unraisable")
def test_a_consumer_that_refuses_shows_its_own_error_and_leaks_nothing() -> None:
    memory = Range(1)
    gone = weakref.ref(memory)
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        np.from_dlpack(view_of(memory, dtype="bfloat16"))
    with pytest.raises((BufferError, RuntimeError, ValueError)):
        np.from_dlpack(DLPackView(memory.address, (1,), (1,), "uint8", DeviceType.CUDA, 0, memory))
    del memory
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_deleter_may_run_in_a_thread_that_python_does_not_know(max_version: tuple[int, int] | None) -> None:
    memory = Range(1)
    gone = weakref.ref(memory)
    view = view_of(memory)
    consumer = Consumer(view.__dlpack__(max_version=max_version))
    del memory, view
    gc.collect()
    assert gone() is not None
    consumer.delete_in_a_thread_unknown_to_python()
    assert gone() is None


@pytest.mark.parametrize(("max_version", "versioned"), [(None, False), ((0, 8), False), ((1, 0), True), ((2, 5), True)])
def test_a_view_that_makes_many_tensors_keeps_none_of_them(max_version: tuple[int, int] | None, versioned: bool) -> None:
    memory = Range(1)
    view = view_of(memory)
    before = living_offers()
    references = sys.getrefcount(memory)
    for _ in range(100):
        capsule = view.__dlpack__(max_version=max_version)
        assert Consumer.name(capsule) == (b"dltensor_versioned" if versioned else b"dltensor")
        Consumer(capsule).delete()
    assert sys.getrefcount(memory) == references
    assert living_offers() <= before + 1


def test_from_the_interpreters_exit_on_no_deleter_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", handlers.append)
    memory = Range(1)
    view = view_of(memory)
    before = living_offers()
    consumer = Consumer(view.__dlpack__())
    handlers.pop()()
    del view
    assert consumer.deleter_field.value is None
    assert living_offers() == before + 1, "the consumer will still read the structure"


def test_an_array_that_outlives_the_interpreters_exit_handlers_does_no_harm() -> None:
    script = f"""
        import sys
        sys.path[:0] = {[*sys.path]!r}
        import atexit
        import numpy
        from tests.unit.test_dlpack import Range, view_of
        arrays = []
        def late() -> None:
            arrays.clear()
            print("cleared", flush=True)
        atexit.register(late)
        for _ in range(50):
            arrays.append(numpy.from_dlpack(view_of(Range(1))))
        kept = view_of(Range(1))
        capsule = kept.__dlpack__()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleared\n", "")


def test_device_is_told_and_nothing_is_copied_or_moved() -> None:
    memory = Range(1)
    view = DLPackView(memory.address, (1,), (1,), "uint8", DeviceType.ROCM, 3, memory)
    assert view.__dlpack_device__() == (10, 3)
    assert view.__dlpack__(dl_device=(10, 3), copy=False, stream=7) is not None
    with pytest.raises(BufferError, match="not copied or moved"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="not copied or moved"):
        view.__dlpack__(dl_device=(1, 0))


def test_what_describes_no_tensor_is_refused() -> None:
    memory = Range(1)
    with pytest.raises(Misuse, match="dtype 'complex64' is not known; use one of int8, "):
        view_of(memory, dtype="complex64")
    with pytest.raises(Misuse, match="as many of both"):
        view_of(memory, (1, 2), (1,))
    with pytest.raises(Misuse, match="none below 0"):
        view_of(memory, (1, -2), (1, 1))
    assert np.from_dlpack(view_of(memory, (), ())).shape == ()


def test_torch_makes_a_tensor_at_the_same_address_and_releases_the_owner() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here; the engines' environments have it")
    memory = Range(4)
    gone = weakref.ref(memory)
    tensor = torch.from_dlpack(view_of(memory, (4, 8), (PAGE // 2, 1), "bfloat16"))
    assert (tensor.data_ptr(), tensor.dtype, tensor.shape) == (memory.address, torch.bfloat16, (4, 8))
    assert tensor.stride() == (PAGE // 2, 1)
    memory.make_usable(3)
    tensor[3] = 1.5
    assert ctypes.string_at(memory.address + 3 * PAGE, 2) == b"\xc0\x3f"
    float8 = torch.from_dlpack(view_of(memory, dtype="float8_e4m3fn")).view(torch.float8_e4m3fn)
    assert float8.stride() == (PAGE, 1)
    del memory, float8
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None
