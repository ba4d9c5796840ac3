# SPDX-License-Identifier: Apache-2.0
"""Every error that KVCacheD raises on purpose.

KVCachedError
+-- PoolExhausted          pressure: no memory just now; retry after something was given back
+-- Misuse                 a person must act; the message says what to do
|   +-- SettingError       a setting has a bad value (names the variable, the value and what is allowed)
|   +-- GeometryError      these block and page sizes cannot work together (names a pair that does)
|   +-- EngineNotSupported this engine, version or feature cannot be elastic
+-- DeviceError            a driver call failed (names the call, its code and the size)
|   +-- DeviceOutOfMemory  the device has no memory left; everything was undone
|   +-- DeviceUnavailable  this device cannot be used here at all; says what is missing
+-- PeerError              another process of the same pool or card
|   +-- PeerLost           it is gone
|   +-- PeerRefused        it answered no, and why
|   +-- PeerTimeout        it did not answer within the deadline
|   +-- HandshakeMismatch  it is a different version, geometry or instance
+-- StateUnknown           it is not known what is mapped; the pool refuses work from here on. Never caught.
+-- InvariantBroken        a bug in KVCacheD
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence


class KVCachedError(Exception):
    """Base of all errors below."""


class PoolExhausted(KVCachedError):
    """The pool cannot supply what was asked for at this moment. Nothing was taken.

    `wanted` and `available` are in `unit` ("blocks", "pages" or "bytes"); `reason` says what stands in the way.
    """

    def __init__(self, wanted: int, available: int, unit: str, reason: str) -> None:
        sizes = [format_size(count) if unit == "bytes" else str(count) for count in (wanted, available)]
        super().__init__(f"{sizes[0]}{'' if unit == 'bytes' else f' {unit}'} wanted, {sizes[1]} available: {reason}")
        self.wanted = wanted
        self.available = available
        self.unit = unit
        self.reason = reason

    def __reduce__(self) -> tuple[type[PoolExhausted], tuple[int, int, str, str]]:
        return type(self), (self.wanted, self.available, self.unit, self.reason)


class Misuse(KVCachedError):
    """A caller's or an operator's mistake."""


class SettingError(Misuse):
    """A setting has a value that is not allowed."""


class GeometryError(Misuse):
    """Block, page and range sizes that cannot work together."""


class EngineNotSupported(Misuse):
    """The engine, its version or one of its features cannot be made elastic."""


class DeviceError(KVCachedError):
    """A driver call failed. `size_bytes` is 0 when the call has no size."""

    def __init__(self, call: str, code: int, size_bytes: int, message: str) -> None:
        size = f", {size_bytes} bytes" if size_bytes else ""
        super().__init__(f"{message} ({call} returned {code}{size})")
        self.call = call
        self.code = code
        self.size_bytes = size_bytes
        self.message = message

    def __reduce__(self) -> tuple[type[DeviceError], tuple[str, int, int, str]]:
        return type(self), (self.call, self.code, self.size_bytes, self.message)


class DeviceOutOfMemory(DeviceError):
    """The device, or on the host the table of map entries, is full. Everything was undone."""


class DeviceUnavailable(DeviceError):
    """The device cannot be used at all: no library, no driver, no such device, or a trial mapping failed."""


class PeerError(KVCachedError):
    """Another process of the pool or of the card."""


class PeerLost(PeerError):
    """The other process is gone."""


class PeerRefused(PeerError):
    """The other process answered no."""


class PeerTimeout(PeerError):
    """The other process did not answer within its deadline."""


class HandshakeMismatch(PeerError):
    """The other process differs in version, geometry or instance."""


class StateUnknown(KVCachedError):
    """It is not known which of `pages` are mapped. The pool refuses work from here on."""

    def __init__(self, message: str, pages: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.pages = tuple(pages)

    def __reduce__(self) -> tuple[type[StateUnknown], tuple[str, tuple[int, ...]]]:
        return type(self), (self.message, self.pages)


class InvariantBroken(KVCachedError):
    """A check of KVCacheD's own state failed. This is a bug in KVCacheD; please report it."""
