# SPDX-License-Identifier: Apache-2.0
"""The native data plane through ctypes: devices and arenas of `libkvcached.so`.

ctypes lets go of the GIL for the whole of each call, and each call takes a batch: a busy Python thread delays a batch once, not
once per driver call. Importing this module needs neither a driver nor torch; opening a device that cannot be used raises
`DeviceUnavailable`.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.errors import DeviceError, DeviceOutOfMemory, DeviceUnavailable, InvariantBroken, Misuse, StateUnknown
from kvcached.vmm.api import ArenaConfig, ArenaStats, Call, DeviceInfo, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ABI_VERSION: Final = 1
_BACKENDS: Final = {"host": 0, "cuda": 1, "hip": 2}
_BACKEND_NAMES: Final = {number: name for name, number in _BACKENDS.items()}
_U64_MAX: Final = 2**64 - 1


class _Status(IntEnum):
    OK = 0
    OUT_OF_MEMORY = 1
    REFUSED = 2
    QUARANTINED = 3
    BROKEN = 4
    OUT_OF_MAPS = 5
    UNAVAILABLE = 6


class _Error(Structure):
    _fields_ = (
        ("status", c_int32),
        ("driver_code", c_int32),
        ("bytes", c_uint64),
        ("call", c_char * 48),
        ("message", c_char * 208),
    )


class _DeviceOptions(Structure):
    _fields_ = (
        ("backend", c_int32),
        ("ordinal", c_int32),
        ("host_capacity", c_uint64),
        ("host_granularity", c_uint64),
        ("host_dir", c_char_p),
        ("driver_library", c_char_p),
    )


class _DeviceInfo(Structure):
    _fields_ = (
        ("backend", c_int32),
        ("ordinal", c_int32),
        ("driver_version", c_int32),
        ("map_granularity_known", c_int32),
        ("granularity", c_uint64),
        ("total_bytes", c_uint64),
        ("uuid", c_char * 64),
        ("name", c_char * 128),
    )


class _ArenaConfig(Structure):
    _fields_ = (
        ("page_bytes", c_uint64),
        ("pages", c_uint64),
        ("planes", c_uint32),
        ("zero_backing", c_uint32),
        ("plane_stride_bytes", c_uint64),
        ("history", c_uint64),
    )


_ArenaStats: Final = c_uint64 * len(ArenaStats.__dataclass_fields__)
_Runs = c_void_p  # address of (first, count) pairs of 64-bit words
_ErrorOut = POINTER(_Error)
_SIGNATURES: Final = {
    "kvc_device_open": (POINTER(_DeviceOptions), POINTER(c_void_p), _ErrorOut),
    "kvc_device_close": (c_void_p, _ErrorOut),
    "kvc_device_get_info": (c_void_p, POINTER(_DeviceInfo), _ErrorOut),
    "kvc_device_memory": (c_void_p, POINTER(c_uint64), POINTER(c_uint64), _ErrorOut),
    "kvc_device_fail": (c_void_p, c_int, c_uint64, c_int, c_int, _ErrorOut),
    "kvc_device_calls": (c_void_p, c_void_p, c_void_p, _ErrorOut),
    "kvc_arena_create": (c_void_p, POINTER(_ArenaConfig), POINTER(c_void_p), _ErrorOut),
    "kvc_arena_destroy": (c_void_p, _ErrorOut),
    "kvc_arena_get_stats": (c_void_p, POINTER(_ArenaStats), _ErrorOut),
    "kvc_arena_acquire": (c_void_p, c_uint64, c_uint64, _ErrorOut),
    "kvc_arena_trim": (c_void_p, c_uint64, c_uint64, POINTER(c_uint64), _ErrorOut),
    "kvc_arena_map": (c_void_p, _Runs, c_size_t, _Runs, c_size_t, POINTER(c_size_t), _ErrorOut),
    "kvc_arena_unmap_prepare": (c_void_p, c_uint64, _Runs, c_size_t, _ErrorOut),
    "kvc_arena_unmap_commit": (c_void_p, c_uint64, c_int, _ErrorOut),
    "kvc_arena_unmap_abort": (c_void_p, c_uint64, _ErrorOut),
    "kvc_arena_unmap": (c_void_p, _Runs, c_size_t, c_int, _ErrorOut),
    "kvc_arena_quarantined": (c_void_p, _Runs, c_size_t, POINTER(c_size_t), _ErrorOut),
}


@cache
def _load_library() -> ctypes.CDLL:
    path = Path(__file__).with_name("libkvcached.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        message = f"the native library cannot be loaded, install the wheel or run native/build.sh: {error}"
        raise DeviceUnavailable("dlopen", 0, 0, message) from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    library.kvc_arena_base.argtypes = (c_void_p,)
    library.kvc_arena_base.restype = c_uint64
    if library.kvc_abi_version() != _ABI_VERSION:
        raise DeviceUnavailable("kvc_abi_version", library.kvc_abi_version(), 0, f"{path} is of another version than this package")
    return library


def _exception(error: _Error, pages: Iterable[int] = ()) -> Exception:
    call, message, code = error.call.decode(), error.message.decode(errors="replace"), error.driver_code
    status = _Status(error.status)
    if status is _Status.REFUSED:
        return Misuse(f"{call}: {message}")
    if status is _Status.QUARANTINED:
        return StateUnknown(f"{message} ({call} returned {code})", tuple(pages))
    if status is _Status.UNAVAILABLE:
        return DeviceUnavailable(call, code, error.bytes, message)
    if status in (_Status.OUT_OF_MEMORY, _Status.OUT_OF_MAPS):
        return DeviceOutOfMemory(call, code, error.bytes, message)
    return DeviceError(call, code, error.bytes, message)


def _word(name: str, value: int) -> int:
    if not 0 <= value <= _U64_MAX:
        raise Misuse(f"{name}: {value} is not in 0 .. 2**64 - 1")
    return value


def _packed(runs: Sequence[Run]) -> array[int]:
    try:
        return array("Q", chain.from_iterable(runs))
    except (OverflowError, TypeError) as error:
        raise Misuse(f"runs: {error}") from error


class NativeArena:
    """One arena of the native library. See `kvcached.vmm.api.Arena` for what the calls promise."""

    def __init__(self, device: NativeDevice, config: ArenaConfig, handle: c_void_p) -> None:
        self._device = device
        self._config = config
        self._library = _load_library()
        self._handle: c_void_p | None = handle
        self._base_address: int = self._library.kvc_arena_base(handle)
        self._lock = threading.Lock()  # the handle must not die under another thread's call

    @property
    def base_address(self) -> int:
        return self._base_address

    @property
    def config(self) -> ArenaConfig:
        return self._config

    def stats(self) -> ArenaStats:
        out = _ArenaStats()
        self._call(self._library.kvc_arena_get_stats, byref(out))
        return ArenaStats(*out)

    def acquire(self, run_pages: int, runs: int) -> None:
        self._call(self._library.kvc_arena_acquire, _word("run_pages", run_pages), _word("runs", runs))

    def trim(self, run_pages: int = 0, runs: int = 2**63 - 1) -> int:
        released_bytes = c_uint64()
        self._call(self._library.kvc_arena_trim, _word("run_pages", run_pages), _word("runs", runs), byref(released_bytes))
        return released_bytes.value

    def map(self, runs: Sequence[Run]) -> None:
        words = _packed(runs)
        self._call(self._library.kvc_arena_map, words.buffer_info()[0], len(words) // 2, None, 0, None)

    def unmap(self, runs: Sequence[Run], keep: bool = False) -> None:
        words = _packed(runs)
        self._call(self._library.kvc_arena_unmap, words.buffer_info()[0], len(words) // 2, keep)

    def prepare(self, tx: int, runs: Sequence[Run]) -> None:
        words = _packed(runs)
        self._call(self._library.kvc_arena_unmap_prepare, _word("tx", tx), words.buffer_info()[0], len(words) // 2)

    def commit(self, tx: int, keep: bool = False) -> None:
        self._call(self._library.kvc_arena_unmap_commit, _word("tx", tx), keep)

    def abort(self, tx: int) -> None:
        self._call(self._library.kvc_arena_unmap_abort, _word("tx", tx))

    def quarantined(self) -> list[Run]:
        with self._lock:
            return self._quarantined()

    def close(self) -> None:
        with self._lock:
            if self._handle is None:
                return
            error = _Error()
            status = self._library.kvc_arena_destroy(self._handle, byref(error))
            if status != _Status.REFUSED:
                self._handle = None
            if status != _Status.OK:
                raise _exception(error)

    def _quarantined(self) -> list[Run]:
        count, error = c_size_t(), _Error()
        ask = self._library.kvc_arena_quarantined
        if ask(self._open(), None, 0, byref(count), byref(error)):
            raise _exception(error)
        words = (c_uint64 * (2 * count.value))()
        if ask(self._open(), words, count.value, byref(count), byref(error)):
            raise _exception(error)
        return [Run(first, pages) for first, pages in zip(words[::2], words[1::2], strict=True)]

    def _open(self) -> c_void_p:
        if self._handle is None:
            raise Misuse("the arena is closed")
        return self._handle

    def _call(self, function: ctypes._NamedFuncPointer, *arguments: object) -> None:
        error = _Error()
        with self._lock:
            if function(self._open(), *arguments, byref(error)) == _Status.OK:
                return
            fenced = self._quarantined() if error.status == _Status.QUARANTINED else []
        raise _exception(error, (page for run in fenced for page in range(run.first, run.first + run.count)))


class NativeDevice:
    """One device of the native library. See `kvcached.vmm.api.Device` for what the calls promise."""

    def __init__(self, handle: c_void_p) -> None:
        self._library = _load_library()
        self._handle: c_void_p | None = handle
        info = _DeviceInfo()
        self._call(self._library.kvc_device_get_info, byref(info))
        self._info = DeviceInfo(
            backend=_BACKEND_NAMES[info.backend],
            ordinal=info.ordinal,
            uuid=info.uuid.decode(),
            name=info.name.decode(errors="replace"),
            granularity_bytes=info.granularity,
            total_bytes=info.total_bytes,
            driver_version=info.driver_version,
        )

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def memory(self) -> tuple[int, int]:
        free_bytes, total_bytes = c_uint64(), c_uint64()
        self._call(self._library.kvc_device_memory, byref(free_bytes), byref(total_bytes))
        return free_bytes.value, total_bytes.value

    def create_arena(self, config: ArenaConfig) -> NativeArena:
        sizes = {name: _word(name, getattr(config, name)) for name in ("page_bytes", "pages", "planes", "plane_stride_bytes")}
        if sizes["planes"] >= 2**32:
            raise Misuse(f"planes: {config.planes}")
        native = _ArenaConfig(zero_backing=config.zero_backing.value, history=0, **sizes)
        handle = c_void_p()
        self._call(self._library.kvc_arena_create, byref(native), byref(handle))
        return NativeArena(self, config, handle)

    def fail(self, call: Call, nth: int, *, from_there_on: bool = False, code: int = 0) -> None:
        self._call(self._library.kvc_device_fail, call.value, _word("nth", nth), from_there_on, code)

    def calls(self) -> dict[Call, int]:
        return self._per_call(nanoseconds=False)

    def call_times_ns(self) -> dict[Call, int]:
        """Time spent in driver calls so far, in nanoseconds."""
        return self._per_call(nanoseconds=True)

    def close(self) -> None:
        """Raises `Misuse` while an arena of the device is open. A second call does nothing."""
        if self._handle is not None:
            self._call(self._library.kvc_device_close)
            self._handle = None

    def _per_call(self, *, nanoseconds: bool) -> dict[Call, int]:
        words = (c_uint64 * len(Call))()
        self._call(self._library.kvc_device_calls, *((None, words) if nanoseconds else (words, None)))
        return {call: words[call.value] for call in Call}

    def _call(self, function: ctypes._NamedFuncPointer, *arguments: object) -> None:
        if self._handle is None:
            raise Misuse("the device is closed")
        error = _Error()
        if function(self._handle, *arguments, byref(error)) != _Status.OK:
            raise _exception(error)


def open_device(
    backend: str,
    ordinal: int,
    *,
    host_capacity_bytes: int = 0,
    host_granularity_bytes: int = 0,
    host_dir: Path | None = None,
    driver_library: Path | None = None,
) -> NativeDevice:
    """Open a device: `host`, `cuda` or `hip`, and its number as the driver counts.

    A host card is made of `host_capacity_bytes` of memory, shared by all processes that name the same `host_dir` and ordinal;
    0 takes what the first process said. Raises `DeviceUnavailable` (no driver, no device: says what is missing), `Misuse`
    (a size that differs from what the card was made with).
    """
    if backend not in _BACKENDS:
        raise Misuse(f"backend: {backend!r} is not one of {', '.join(_BACKENDS)}")
    options = _DeviceOptions(
        backend=_BACKENDS[backend],
        ordinal=ordinal,
        host_capacity=_word("host_capacity_bytes", host_capacity_bytes),
        host_granularity=_word("host_granularity_bytes", host_granularity_bytes),
        host_dir=bytes(host_dir) if host_dir else None,
        driver_library=bytes(driver_library) if driver_library else None,
    )
    handle, error = c_void_p(), _Error()
    if _load_library().kvc_device_open(byref(options), byref(handle), byref(error)) != _Status.OK:
        raise _exception(error)
    if not handle.value:
        raise InvariantBroken("kvc_device_open reported success without a device")
    return NativeDevice(handle)
