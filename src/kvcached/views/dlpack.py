# SPDX-License-Identifier: Apache-2.0
"""Tensors over a raw address that need not be mapped yet: `torch.from_dlpack(view)`, `numpy.from_dlpack(view)`.

A capsule offers the consumer a description of the tensor and a deleter. From the offer on, until the consumer calls the deleter,
the description and the owner of the memory stay alive, whatever happens to the view and the capsule.

Capsules have no destructor. One written in Python would run while the exception is pending with which a consumer refuses the
capsule, and would lose it. So a view remembers its offers and takes back, when it dies, those that nobody accepted.
"""

from __future__ import annotations

import atexit
import ctypes
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceType(IntEnum):
    """DLPack's numbers of the kinds of memory."""

    CPU = 1
    CUDA = 2
    ROCM = 10


_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
# Not every consumer knows the float8 codes, so these are offered as bytes: `torch.from_dlpack(view).view(torch.float8_e4m3fn)`.
_DTYPES: Final = {
    "int8": (_INT, 8),
    "int16": (_INT, 16),
    "int32": (_INT, 32),
    "int64": (_INT, 64),
    "uint8": (_UINT, 8),
    "float16": (_FLOAT, 16),
    "float32": (_FLOAT, 32),
    "bfloat16": (_BFLOAT, 16),
    "float8_e4m3fn": (_UINT, 8),
    "float8_e5m2": (_UINT, 8),
}
_VERSION: Final = (1, 0)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`, named as torch names it. Raises `Misuse` with the names that are known."""
    return _data_type(dtype)[1] // 8


def _data_type(dtype: str) -> tuple[int, int]:
    known = _DTYPES.get(dtype)
    if known is None:
        raise Misuse(f"dtype {dtype!r} is not known; use one of {', '.join(_DTYPES)}")
    return known


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# A capsule keeps a pointer to its name, so the names live as long as this module.
_NAME: Final = b"dltensor"
_NAME_VERSIONED: Final = b"dltensor_versioned"
_NAME_TAKEN_BACK: Final = b"used_dltensor"

# Prototypes of our own: argument types set on `ctypes.pythonapi` itself would change it for everyone in the process.
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


class _Offer:
    """What one capsule points at. The interpreter's table of exit handlers keeps it alive until `release`."""

    def __init__(self, view: DLPackView, versioned: bool) -> None:
        dims = ctypes.c_int64 * len(view.shape)
        self._shape = dims(*view.shape)  # the structure below holds bare pointers to both
        self._strides = dims(*view.strides)
        self._owner = view.owner
        self._name = _NAME_VERSIONED if versioned else _NAME
        pointer = ctypes.POINTER(ctypes.c_int64)
        tensor = _Tensor(
            view.address,
            _Device(view.device_type, view.device_id),
            len(view.shape),
            _DataType(*_data_type(view.dtype), 1),
            ctypes.cast(self._shape, pointer),
            ctypes.cast(self._strides, pointer),
            0,
        )
        self._managed: _Managed | _ManagedVersioned
        if versioned:
            self._managed = _ManagedVersioned(*_VERSION, id(self), _release_versioned, 0, tensor)
        else:
            self._managed = _Managed(tensor, id(self), _release_plain)
        atexit.register(self._disarm)
        self.capsule = _capsule_new(ctypes.addressof(self._managed), self._name, None)

    @property
    def is_accepted(self) -> bool:
        """Whether a consumer has taken the tensor: consumers rename the capsule."""
        return not _capsule_is(self.capsule, self._name)

    def take_back(self) -> None:
        _capsule_rename(self.capsule, _NAME_TAKEN_BACK)
        self.release()

    def release(self) -> None:
        """The consumer's deleter, or `take_back`: nothing points at the memory any more."""
        atexit.unregister(self._disarm)
        self._owner = None

    def _disarm(self) -> None:
        """A tensor may die after the interpreter, where calling Python would crash; its consumer reads the structure even then."""
        self._managed.deleter = _Deleter()
        _keep_for_ever(self)


def _release(kind: type[_Managed | _ManagedVersioned], address: int) -> None:
    offer: _Offer = ctypes.cast(kind.from_address(address).context, ctypes.py_object).value
    offer.release()


# ctypes takes the GIL for these, so a consumer may call them from any thread.
_release_plain = _Deleter(partial(_release, _Managed))
_release_versioned = _Deleter(partial(_release, _ManagedVersioned))


class DLPackView:
    """A strided tensor at `address`, for `from_dlpack` of torch, numpy and others. Making one touches no memory.

    `strides` are in elements; `dtype` is named as torch names it, float8 kinds arrive as uint8 (view them in the consumer).
    `owner` is kept alive as long as the view or any tensor made from it. Keep the view until the consumer has its tensor.
    Raises `Misuse` for an unknown dtype, or a shape and strides that do not match.
    """

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: str,
        device_type: DeviceType,
        device_id: int,
        owner: object,
    ) -> None:
        self._offers: list[_Offer] = []
        self.address = address
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = dtype
        self.device_type = DeviceType(device_type)
        self.device_id = device_id
        self.owner = owner
        _data_type(dtype)
        if len(self.shape) != len(self.strides) or min((*self.shape, *self.strides), default=0) < 0:
            raise Misuse(f"shape {self.shape} and strides {self.strides} do not describe a tensor: as many of both, none below 0")

    def __dlpack_device__(self) -> tuple[int, int]:
        return int(self.device_type), self.device_id

    def __dlpack__(
        self,
        *,
        stream: object = None,  # nothing was queued that the consumer's stream would have to wait for
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule over the same memory. Raises `BufferError` when a copy or another device is wanted."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this memory can only be viewed where it is, not copied or moved")
        offer = _Offer(self, versioned=max_version is not None and max_version >= _VERSION)
        self._offers = [*(one for one in self._offers if not one.is_accepted), offer]
        return offer.capsule

    def __del__(self) -> None:
        for offer in self._offers:
            if not offer.is_accepted:
                offer.take_back()
