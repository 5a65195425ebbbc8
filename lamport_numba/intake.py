"""Arrays of any library taken in as plain numbers: address, shape, strides, dtype.

``as_buffer`` takes what carries ``__cuda_array_interface__`` (versions 2 and 3) or DLPack, and refuses the rest with
an error that says what to do. It copies nothing and waits for nothing.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from . import dlpack
from .driver import Driver, structs
from .errors import DriverError
from .streams import LEGACY, as_stream

__all__ = ["Buffer", "as_buffer", "byte_span", "checked_dtype", "contiguous_strides", "sentinel_safe"]

_HIGHEST: Final = 2**64
_HALF: Final = 2**63
_PLAIN: Final = {np.dtype(code).str: np.dtype(code) for code in "?bhilqBHILQefdgFDG"}  # without parsing, for speed
_TYPESTR: Final = re.compile(r"[<>|=]?[biufcmMSUVO]\d{1,9}(\[[^\[\]]*\])?")


class Buffer(NamedTuple):
    """Memory of the device, described. ``strides`` are in bytes, None where the elements lie in C order without gaps.

    ``nbytes`` counts the elements, not the span; ``stream`` is the producer's, to be waited for, or None; ``owner``
    keeps the memory alive. The address of an empty array is 0, whatever the producer said.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    nbytes: int
    readonly: bool
    stream: int | None
    owner: Any


def as_buffer(
    obj: Any,
    drv: Driver,
    device: int | None = None,
    *,
    stream: int = 0,
    capturing: bool = False,
    writable: bool = False,
    name: str = "array",
) -> Buffer:
    """Take ``obj`` in as a Buffer.

    ``device``: the memory must be that device's (None: not checked). ``stream``: where the buffer will be used; a
    DLPack producer is told so (unless ``capturing``) and orders it, while for the other interface the caller waits
    for ``Buffer.stream`` (see StreamOrder). ``writable``: refuse what is read-only. ``name``: the argument, for
    messages.

    Raises TypeError for what is no array of a device and for dtypes that cannot travel, ValueError for numbers that
    make no sense, for another device's memory, and for a read-only array that is to be written.
    """
    interface, refusal = _interface_of(obj)
    if interface is not None:
        found = _from_interface(interface, obj, name)
    elif hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        found = _from_dlpack(obj, drv, device, -1 if capturing else stream or LEGACY, name)
    elif refusal is not None:
        raise refusal
    else:
        if hasattr(obj, "__array_interface__") or isinstance(obj, list | tuple) or _has_host_bytes(obj):
            raise TypeError(_host_message(name, obj))
        raise TypeError(
            f"{name} is of type {type(obj).__name__}; expected a device array: with __cuda_array_interface__ or DLPack "
            "(numba, cupy, torch, or what lamport_numba.to_device returns)"
        )
    if writable and found.readonly:
        raise ValueError(f"{name} is read-only and would be written")
    if device is not None and found.nbytes:
        _check_device(found, drv, device, name)
    return found


def checked_dtype(dtype: Any, name: str = "array") -> np.dtype[Any]:
    """``dtype`` as numpy's; TypeError for objects, structures and sub-arrays, which do not travel as bytes."""
    found: np.dtype[Any] = np.dtype(dtype)
    if found.hasobject:
        raise TypeError(f"{name} has dtype {found}: Python objects mean nothing to another process")
    if found.fields is not None or found.subdtype is not None:
        raise TypeError(f"{name} has the structured dtype {found}: view it as uint8, or send its fields one by one")
    return found


def sentinel_safe(dtype: np.dtype[Any]) -> bool:
    """Whether the sentinel protocol changes nothing but the sign of a zero: floats of 2 and 4 bytes."""
    names = (dtype.name, dict(dtype.metadata or {}).get("name"))
    return dtype.isnative and ("bfloat16" in names or (dtype.kind == "f" and dtype.itemsize in (2, 4)))


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of C order without gaps."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _has_host_bytes(obj: Any) -> bool:
    try:
        memoryview(obj).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _host_message(name: str, obj: Any) -> str:
    what = "a numpy array" if isinstance(obj, np.ndarray) else f"of type {type(obj).__name__} and"
    return f"{name} is {what} in host memory; move it to the device first: lamport_numba.to_device({name})"


def _interface_of(obj: Any) -> tuple[Any, Exception | None]:
    """The interface's description, or None with the reason where the object has one but refuses to give it."""
    try:
        return getattr(obj, "__cuda_array_interface__", None), None
    except Exception as refusal:
        return None, refusal


def _from_interface(interface: Any, obj: Any, name: str) -> Buffer:
    if type(interface) is not dict and not isinstance(interface, Mapping):
        raise TypeError(f"__cuda_array_interface__ of {name} is of type {type(interface).__name__}; expected a dict")
    version = interface.get("version")
    if not isinstance(version, int) or version not in (2, 3):
        raise TypeError(f"__cuda_array_interface__ of {name} has version {version!r}; expected 2 or 3")
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array; fill or compress it first")
    shape = _integers(interface.get("shape"), "shape", name)
    dtype = _interface_dtype(interface, obj, name)
    strides = interface.get("strides")
    if strides is not None:
        strides = _integers(strides, "strides", name)
    stream = interface.get("stream")
    if stream is not None:
        stream = as_stream(stream)
    address, readonly = 0, False
    data = interface.get("data")
    pair = data if (type(data) is tuple or isinstance(data, Sequence)) and len(data) == 2 else None
    if pair is not None:
        readonly = bool(pair[1])
    if dtype.itemsize and 0 not in shape:
        if pair is None:
            raise TypeError(f"__cuda_array_interface__ of {name} has data {data!r}; expected (pointer, read-only)")
        address = _integer(pair[0], "pointer", name)
    return _described(address, shape, strides, dtype, readonly, stream, obj, name)


def _interface_dtype(interface: Mapping[str, Any], obj: Any, name: str) -> np.dtype[Any]:
    typestr = interface.get("typestr")
    plain = _PLAIN.get(typestr) if type(typestr) is str else None
    if plain is not None:
        return plain
    own = getattr(obj, "dtype", None)
    if isinstance(own, np.dtype) and own.str == typestr:
        return checked_dtype(own, name)  # ml_dtypes: the interface knows bfloat16 only as two raw bytes
    if not isinstance(typestr, str) or not _TYPESTR.fullmatch(typestr):
        raise TypeError(f"__cuda_array_interface__ of {name} has typestr {typestr!r}; expected one like '<f4'")
    try:
        dtype = np.dtype("V1" if typestr[-2:] == "f1" else typestr)  # some float of 8 bits; numpy has none
    except (TypeError, ValueError) as error:
        raise TypeError(f"__cuda_array_interface__ of {name} has typestr {typestr!r}: {error}") from None
    descr = interface.get("descr")
    if descr is not None and (not isinstance(descr, Sequence) or len(descr) != 1 or tuple(descr[0])[:1] != ("",)):
        raise TypeError(f"{name} has the structured dtype {descr!r}: view it as uint8, or send its fields one by one")
    return checked_dtype(dtype, name)


def _from_dlpack(obj: Any, drv: Driver, device: int | None, stream: int, name: str) -> Buffer:
    kind, number = dlpack.device_of(obj)
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        raise TypeError(_host_message(name, obj))
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise TypeError(f"{name} is on a device of DLPack type {kind}; expected {dlpack.CUDA} (CUDA)")
    if device is not None and kind == dlpack.CUDA and number != device:
        raise ValueError(f"{name} is on device {number}; expected device {device}")
    tensor = dlpack.read(obj, stream)
    dtype = checked_dtype(tensor.dtype, name)
    return _described(tensor.address, tensor.shape, tensor.strides, dtype, tensor.readonly, None, tensor.owner, name)


def _described(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    readonly: bool,
    stream: int | None,
    owner: Any,
    name: str,
) -> Buffer:
    """The common end: numbers that make sense, gaps recognised."""
    if shape and min(shape) < 0:
        raise ValueError(f"{name} has shape {shape}; expected no negative length")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"{name} has {len(strides)} strides for {len(shape)} dimensions")
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return Buffer(0, shape, None, dtype, 0, readonly, stream, owner)
    if strides is not None and _is_contiguous(shape, strides, dtype.itemsize):
        strides = None
    if not 0 < address < _HIGHEST:
        raise ValueError(f"{name} has {nbytes} bytes at address {address:#x}; expected an address of the device")
    low, high = (0, nbytes) if strides is None else byte_span(shape, strides, dtype.itemsize)
    far = strides is not None and any(not -_HALF <= stride < _HALF for stride in strides)
    if far or address + low < 0 or address + high > _HIGHEST or nbytes >= _HALF:
        raise ValueError(
            f"{name} with shape {shape}, strides {strides} and dtype {dtype} at {address:#x} leaves the address space"
        )
    return Buffer(address, shape, strides, dtype, nbytes, readonly, stream, owner)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def byte_span(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> tuple[int, int]:
    """Bytes from the address to the lowest byte and past the highest one."""
    if strides is None:
        return 0, math.prod(shape) * itemsize
    reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


def _check_device(found: Buffer, drv: Driver, device: int, name: str) -> None:
    # By the context that owns it: cuda-bindings 13.3 answers 0 for every DEVICE_ORDINAL. Pools and mappings have none.
    attribute = structs.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    try:
        context = drv.call("cuPointerGetAttribute", attribute, found.address)
    except DriverError as error:
        raise ValueError(
            f"{name} at address {found.address:#x} is not memory that the driver knows ({error.code_name}); "
            "was it freed, or made on another kind of device?"
        ) from error
    if int(context) and int(context) != int(drv.primary(device)):
        owner = drv.device_of(context)
        if owner != device:
            raise ValueError(f"{name} is on device {owner}; expected device {device}")


def _integers(value: Any, what: str, name: str) -> tuple[int, ...]:
    if type(value) is tuple and all(type(item) is int for item in value) and len(value) <= 64:
        return value
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"__cuda_array_interface__ of {name} has {what} {value!r}; expected a tuple of integers")
    if len(value) > 64:
        raise ValueError(f"{name} has {len(value)} dimensions; expected at most 64")
    return tuple(_integer(item, what, name) for item in value)


def _integer(value: Any, what: str, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"__cuda_array_interface__ of {name} has {value!r} in {what}; expected an integer") from None
