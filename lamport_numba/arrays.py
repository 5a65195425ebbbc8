"""Device arrays that look the same on both devices: numba's on a GPU, ``DeviceArray`` on the emulated one."""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import driver
from .driver import Driver
from .errors import LamportError
from .intake import Buffer, as_buffer, byte_span, checked_dtype
from .streams import as_stream

__all__ = ["Buffer", "DeviceArray", "as_buffer", "device_array", "to_device"]


def to_device(x: Any, *, stream: Any = None, device: int | None = None, drv: Driver | None = None) -> Any:
    """Copy a host array to the device and return the device array.

    ``x``: anything numpy takes. ``stream``: the copy is enqueued there (its default: the legacy stream, waited for).
    ``device``: an ordinal; default the current one, else this rank's. Raises TypeError for object and structured dtypes
    and for a device that is no ordinal, ValueError for one that does not exist.
    """
    host = np.asarray(x)
    checked_dtype(host.dtype, "x")
    drv = drv or driver.select()
    device = drv.default_device() if device is None else drv.checked_device(device)
    if drv.kind == "cuda":
        if not (host.flags.c_contiguous or host.flags.f_contiguous):
            host = np.ascontiguousarray(host)
        drv.settle(device)
        with drv.current(device):
            return _numba_cuda().to_device(host, stream=_numba_stream(stream))
    order = "F" if host.flags.f_contiguous and not host.flags.c_contiguous else "C"
    array = DeviceArray(drv, device, host.shape, host.dtype, order=order)
    array.copy_to_device(host, stream=stream)
    return array


def device_array(
    shape: int | Iterable[int], dtype: Any, *, device: int | None = None, drv: Driver | None = None
) -> Any:
    """A device array with undefined contents. ``device``: default the current one, else this rank's."""
    drv = drv or driver.select()
    device = drv.default_device() if device is None else drv.checked_device(device)
    dtype = checked_dtype(dtype, "dtype")
    if drv.kind == "cuda":
        drv.settle(device)
        with drv.current(device), drv.relaxed():
            return _numba_cuda().device_array(_shape(shape), dtype)
    return DeviceArray(drv, device, shape, dtype)


def _numba_cuda() -> Any:
    from numba import cuda  # half a second to import, and not needed without a GPU

    return cuda


def _numba_stream(stream: Any) -> Any:
    handle = as_stream(stream)
    return _numba_cuda().external_stream(handle) if handle else 0


class DeviceArray:
    """An array of the emulated device, with what numba's device arrays have: shape, dtype, views, copies from and to
    the host.

    Attributes: ``shape``, ``strides`` (bytes), ``dtype``, ``ndim``, ``size``, ``nbytes``, ``device``.
    A copy without a stream waits for the legacy stream and is done on return; with one it waits for that stream.
    """

    def __init__(self, drv: Driver, device: int, shape: int | Iterable[int], dtype: Any, *, order: str = "C") -> None:
        dtype = checked_dtype(dtype, "dtype")
        shape = _shape(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = _Memory(drv, device, nbytes) if nbytes else None
        template: np.ndarray[Any, Any] = np.ndarray(shape, dtype, _bytes_at(memory), order="F" if order == "F" else "C")
        self._adopt(drv, device, memory, template)

    def _adopt(self, drv: Driver, device: int, memory: _Memory | None, template: np.ndarray[Any, Any]) -> None:
        self._drv = drv
        self._memory = memory
        # numpy does the arithmetic of views on it; its elements are never touched
        self._template = template
        self.device = device
        self.shape = template.shape
        self.strides = template.strides
        self.dtype = template.dtype
        self.ndim = template.ndim
        self.size = template.size
        self.nbytes = template.nbytes
        self.address = int(template.__array_interface__["data"][0]) if template.nbytes else 0

    def _like(self, template: np.ndarray[Any, Any]) -> DeviceArray:
        view = object.__new__(DeviceArray)
        view._adopt(self._drv, self.device, self._memory, template)
        return view

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device}, address={self.address:#x})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return int(self.shape[0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        contiguous = self._template.flags.c_contiguous
        return {
            "shape": self.shape,
            "strides": None if contiguous else self.strides,
            "data": (self.address, False),
            "typestr": self.dtype.str,
            "stream": None,
            "version": 3,
        }

    # Views: none copies

    @property
    def T(self) -> DeviceArray:
        """The view with the order of the axes reversed."""
        return self._like(self._template.T)

    def transpose(self, axes: Iterable[int] | None = None) -> DeviceArray:
        """The view with permuted axes."""
        return self._like(self._template.transpose(None if axes is None else tuple(axes)))

    def reshape(self, *shape: Any) -> DeviceArray:
        """The view with another shape of the same size; ValueError if the array is not contiguous."""
        if not self._template.flags.c_contiguous:
            raise ValueError(f"cannot reshape an array with strides {self.strides} without a copy; copy it first")
        return self._like(self._template.reshape(*shape))

    def ravel(self) -> DeviceArray:
        """The one-dimensional view; ValueError if the array is not contiguous."""
        return self.reshape(-1)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as another dtype, by numpy's rules."""
        return self._like(self._template.view(checked_dtype(dtype, "dtype")))

    def squeeze(self, axis: int | tuple[int, ...] | None = None) -> DeviceArray:
        """The view without axes of length one."""
        return self._like(self._template.squeeze(axis))

    def __getitem__(self, key: Any) -> Any:
        """A view by integers, slices, ... and None; the element itself where every axis has an integer."""
        view = self._like(self._template[_basic(key)])
        return view if view.ndim or ... in (key if isinstance(key, tuple) else (key,)) else view.copy_to_host()[()]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Copy a scalar or a host array, broadcast by numpy's rules, to a part of the array."""
        view = self._like(self._template[_basic(key)])
        view.copy_to_device(np.broadcast_to(np.asarray(value, dtype=self.dtype), view.shape))

    # Copies

    def copy_to_host(self, ary: np.ndarray[Any, Any] | None = None, stream: Any = None) -> np.ndarray[Any, Any]:
        """Copy to ``ary``, or to a new numpy array, and return it; complete on return."""
        if ary is not None and (ary.shape != self.shape or ary.dtype != self.dtype):
            raise ValueError(f"ary has shape {ary.shape} and dtype {ary.dtype}; expected {self.shape} and {self.dtype}")
        span, offset = self._span()
        held = np.empty(span, np.uint8)
        if span:
            self._move("cuMemcpyDtoHAsync", held, self.address + offset, stream)
        if span:
            found: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, held, -offset, self.strides)
        else:
            found = np.empty(self.shape, self.dtype)
        if ary is None:
            return found if self._template.flags.c_contiguous else found.copy(order="K")
        ary[...] = found
        return ary

    def copy_to_device(self, ary: Any, stream: Any = None) -> None:
        """Fill from a host array, or from another array of the device, of the same shape and dtype."""
        if isinstance(ary, DeviceArray):
            ary = ary.copy_to_host(stream=stream)
        host = np.asarray(ary)
        if host.shape != self.shape or host.dtype != self.dtype:
            raise ValueError(
                f"ary has shape {host.shape} and dtype {host.dtype}; expected {self.shape} and {self.dtype}"
            )
        span, offset = self._span()
        if not span:
            return
        held = np.empty(span, np.uint8)
        if span != self.nbytes:  # between the elements lies what must stay
            self._move("cuMemcpyDtoHAsync", held, self.address + offset, stream)
        np.ndarray(self.shape, self.dtype, held, -offset, self.strides)[...] = host
        self._move("cuMemcpyHtoDAsync", held, self.address + offset, stream)

    def _span(self) -> tuple[int, int]:
        """(bytes from the lowest to past the highest, distance of the lowest from the address: not positive)."""
        if not self.nbytes:
            return 0, 0
        low, high = byte_span(self.shape, self.strides, self.dtype.itemsize)
        return high - low, low

    def _move(self, call: str, host: np.ndarray[Any, Any], address: int, stream: Any) -> None:
        handle = as_stream(stream)
        with self._drv.current(self.device):
            if call == "cuMemcpyHtoDAsync":
                self._drv.call(call, address, host.ctypes.data, host.nbytes, handle)
            else:
                self._drv.call(call, host.ctypes.data, address, host.nbytes, handle)
            self._drv.call("cuStreamSynchronize", handle)


class _Memory:
    """An allocation that is freed with its last array."""

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, drv: Driver, device: int, nbytes: int) -> None:
        with drv.current(device), drv.relaxed():
            self.address = drv.allocate("cuMemAlloc", nbytes)
        self.nbytes = nbytes
        weakref.finalize(self, _free, drv, device, self.address)


def _free(drv: Driver, device: int, address: int) -> None:
    try:
        with drv.current(device), drv.relaxed():
            drv.call("cuMemFree", address)
    except LamportError:
        pass  # a finaliser has nobody to tell; the emulated device reports leaks itself


def _bytes_at(memory: _Memory | None) -> Any:
    return (ctypes.c_char * memory.nbytes).from_address(memory.address) if memory else b""


def _shape(shape: int | Iterable[int]) -> tuple[int, ...]:
    lengths = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
    if min(lengths, default=0) < 0:
        raise ValueError(f"shape is {lengths}; expected no negative length")
    return lengths


def _basic(key: Any) -> tuple[Any, ...]:
    items = key if isinstance(key, tuple) else (key,)
    for item in items:
        if not (item is None or item is ... or isinstance(item, slice)):
            if isinstance(item, bool | np.bool_):
                raise TypeError("a device array is indexed by integers, slices, ... and None; not by booleans")
            try:
                operator.index(item)
            except TypeError:
                raise TypeError(
                    f"a device array is indexed by integers, slices, ... and None; not by {type(item).__name__}"
                ) from None
    return items if ... in items else (*items, ...)  # numpy then gives a view even of one element
