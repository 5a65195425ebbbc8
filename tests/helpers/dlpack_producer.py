"""DLPack producers of every kind, made by hand, so that no array library is needed."""

from __future__ import annotations

import ctypes
from typing import Any

from lamport_numba import dlpack

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Producer:
    """An object with DLPack methods that says what it was told to say.

    ``code``, ``bits``, ``lanes`` are DLPack's; ``strides`` count elements. ``asked`` collects its consumers' streams.
    """

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        code: int = 2,
        bits: int = 32,
        lanes: int = 1,
        device: tuple[int, int] = (dlpack.CUDA, 0),
        byte_offset: int = 0,
        versioned: bool = True,
        version: tuple[int, int] = (1, 1),
        flags: int = 0,
        name: bytes | None = None,
    ) -> None:
        self.versioned = versioned
        self.device = device
        self.asked: list[Any] = []
        self._name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides) if strides else None
        managed: Any = dlpack._Versioned() if versioned else dlpack._Managed()
        if versioned:
            managed.major, managed.minor = version
            managed.flags = flags
        tensor = managed.tensor
        tensor.data = address
        tensor.device_type, tensor.device_id = device
        tensor.ndim = len(shape)
        tensor.code, tensor.bits, tensor.lanes = code, bits, lanes
        tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = byte_offset
        self._managed = managed

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append(stream)
        return _new(ctypes.addressof(self._managed), self._name, None)
