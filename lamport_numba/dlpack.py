"""The consumer's side of DLPack, both the versioned capsule and the older one, read in place through ctypes.

The capsule is never consumed: as long as it lives its tensor lives, and its own destructor gives the tensor back. So
there is no deleter for us to call, and no finaliser.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "Tensor", "device_of", "read"]

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
CUDA_MANAGED: Final = 13

_READ_ONLY: Final = 1
_IS_COPIED: Final = 2


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_KINDS: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_NARROW_FLOATS: Final = {  # codes that numpy knows by name once ml_dtypes is imported
    4: "bfloat16",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
_FLOAT4_PAIR: Final = (17, 4, 2)


@dataclass(frozen=True)
class Tensor:
    """What a capsule says. ``strides`` are in bytes, or None; ``owner`` keeps the memory alive."""

    address: int
    device: tuple[int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    readonly: bool
    owner: Any


def device_of(obj: Any) -> tuple[int, int]:
    """(device type, device number) of an object with DLPack methods."""
    kind, number = obj.__dlpack_device__()
    return int(kind), int(number)


def read(obj: Any, stream: int) -> Tensor:
    """Ask ``obj`` for its tensor, ready for ``stream`` (1: legacy, 2: per-thread, -1: no order, else a handle)."""
    try:
        capsule = obj.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__(stream=stream)
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise TypeError(f"the array speaks DLPack {versioned.major}.{versioned.minor}; expected version 1")
        # what is written into a copy would be lost
        return _tensor(versioned.tensor, bool(versioned.flags & (_READ_ONLY | _IS_COPIED)), (obj, capsule))
    if _is_valid(capsule, b"dltensor"):
        return _tensor(_Managed.from_address(_pointer(capsule, b"dltensor")).tensor, False, (obj, capsule))
    raise TypeError(f"__dlpack__ of {type(obj).__name__} gave no unused DLPack capsule")


def _tensor(tensor: _Tensor, readonly: bool, owner: Any) -> Tensor:
    if not 0 <= tensor.ndim <= 64:
        raise ValueError(f"the array has {tensor.ndim} dimensions by DLPack; expected 0 to 64")
    dtype = _dtype(tensor.code, tensor.bits, tensor.lanes)
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = None
    if tensor.ndim and tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    address = tensor.data + tensor.byte_offset if tensor.data else 0
    return Tensor(address, (tensor.device_type, tensor.device_id), shape, strides, dtype, readonly, owner)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    what = f"DLPack type (code {code}, {bits} bits, {lanes} lanes)"
    if (code, bits, lanes) == _FLOAT4_PAIR:
        return np.dtype("V1", metadata={"name": "float4_e2m1fn_x2"})
    if lanes != 1 or bits % 8 or not bits:
        raise TypeError(f"the array's {what} has no whole bytes an element; reinterpret it as uint8 first")
    if code in _NARROW_FLOATS:
        name = _NARROW_FLOATS[code]
        try:
            return np.dtype(name)
        except TypeError:  # the bytes travel all the same, under their name
            return np.dtype(f"V{bits // 8}", metadata={"name": name})
    try:
        return np.dtype(f"{_KINDS[code]}{bits // 8}")
    except (KeyError, TypeError):
        raise TypeError(f"the array's {what} is not one that numpy has; reinterpret it as uint8 first") from None
