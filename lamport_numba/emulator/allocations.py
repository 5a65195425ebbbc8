"""Plain and pinned allocations, and what a pointer is."""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

from cuda.bindings import driver as cuda

from . import graphs
from .config import CONFIG
from .core import Refusal, address_of, api, refuse, result
from .engine import ENGINE
from .grid import Access
from .machine import MACHINE, current
from .memory import MEMORY, Region
from .streams import stream_of

# Plain allocations


@api(1)
def cuMemAlloc(bytesize: int) -> Any:
    context = current()
    graphs.forbid_unsafe("cuMemAlloc")
    if bytesize <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{bytesize} bytes")
    with ENGINE.turn, MACHINE.lock:
        return cuda.CUdeviceptr(MEMORY.allocate(context, bytesize).base)


@api()
def cuMemFree(dptr: Any) -> None:
    _free(dptr, host=False)


@api(1)
def cuMemAllocAsync(bytesize: int, hStream: Any) -> Any:
    """Not ordered: the memory is there at once."""
    stream = stream_of(hStream)
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "memory nodes in graphs are not emulated")
    if bytesize <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{bytesize} bytes")
    with ENGINE.turn, MACHINE.lock:
        return cuda.CUdeviceptr(MEMORY.allocate(stream.context, bytesize).base)


@api()
def cuMemFreeAsync(dptr: Any, hStream: Any) -> None:
    stream = stream_of(hStream)
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "memory nodes in graphs are not emulated")
    _free(dptr, host=False)


def _free(pointer: Any, *, host: bool) -> None:
    address = address_of(pointer)
    current()
    if address == 0:
        return
    with MACHINE.lock:
        region = MEMORY.region(address)
        if (
            region is None
            or region.base != address
            or region.context is None
            or region.host != host
            or not region.taken
        ):
            what = "cuMemHostAlloc" if host else "cuMemAlloc"
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is not what {what} returned (freed already?)")
        if region.context is None or region not in region.context.regions:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} was freed already")
        MEMORY.free(region)


@api(2)
def cuMemGetInfo() -> tuple[int, int]:
    device = current().device
    return CONFIG.memory - device.used, CONFIG.memory


# Pinned host memory


@api(1)
def cuMemHostAlloc(bytesize: int, Flags: int) -> int:
    return _host(bytesize, Flags)


@api(1)
def cuMemAllocHost(bytesize: int) -> int:
    return _host(bytesize, 0)


def _host(size: int, flags: int) -> int:
    context = current()
    graphs.forbid_unsafe("cuMemHostAlloc")
    if size <= 0 or int(flags) & ~7:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes, flags {flags}")
    with ENGINE.turn, MACHINE.lock:
        region = MEMORY.allocate(context, size, host=True)
        ctypes.memset(region.base, 0, region.size)  # a pool of ours may have used it before
        return region.base


@api()
def cuMemFreeHost(p: Any) -> None:
    _free(p, host=True)


@api()
def cuMemHostRegister(p: Any, bytesize: int, Flags: int) -> None:
    context, base = current(), address_of(p)
    if not base or bytesize <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{bytesize} bytes at {base:#x}")
    with ENGINE.turn, MACHINE.lock:
        if MEMORY.region(base) is not None or MEMORY.region(base + bytesize - 1) is not None:
            refuse(result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, f"{base:#x}")
        region = Region(base, bytesize, None, host=True)
        region.context = context
        MEMORY.add(region, {device.index: Access.READ_WRITE for device in MACHINE.devices})
        context.regions.add(region)


@api()
def cuMemHostUnregister(p: Any) -> None:
    base = address_of(p)
    current()
    with MACHINE.lock:
        region = MEMORY.region(base)
        if region is None or region.base != base or not region.host or region.taken or region.context is None:
            refuse(result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, f"{base:#x}")
        MEMORY.free(region)


@api(1)
def cuMemHostGetDevicePointer(p: Any, Flags: int) -> Any:
    address = address_of(p)
    region = MEMORY.region(address)
    if region is None or not region.host:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no pinned host memory")
    return cuda.CUdeviceptr(address)


# What a pointer is


@api(1)
def cuPointerGetAttribute(attribute: Any, ptr: Any) -> Any:
    return _attribute(int(attribute), address_of(ptr))


@api(1)
def cuPointerGetAttributes(numAttributes: int, attributes: Any, ptr: Any) -> list[Any]:
    address = address_of(ptr)
    if MEMORY.region(address) is None:
        return [0] * numAttributes  # D: unknown pointers give null values here, not an error
    return [_attribute(int(attribute), address) for attribute in list(attributes)[:numAttributes]]


@api(2)
def cuMemGetAddressRange(dptr: Any) -> tuple[Any, int]:
    region = MEMORY.region(address_of(dptr))
    if region is None:
        refuse(result.CUDA_ERROR_NOT_FOUND, f"{address_of(dptr):#x} is no memory of the driver")
    return cuda.CUdeviceptr(region.base), region.size


def _attribute(attribute: int, address: int) -> Any:
    region = MEMORY.region(address)
    if region is None:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no memory of the driver")
    names = cuda.CUpointer_attribute
    device = region.device if region.device is not None else region.context.device if region.context else None
    if attribute == names.CU_POINTER_ATTRIBUTE_CONTEXT:
        return device.context.handle if device is not None and device.context is not None else cuda.CUcontext(0)
    if attribute == names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        kinds = cuda.CUmemorytype
        return kinds.CU_MEMORYTYPE_HOST if region.host else kinds.CU_MEMORYTYPE_DEVICE
    if attribute == names.CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return cuda.CUdeviceptr(address)
    if attribute == names.CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return address if region.host else _no_host_pointer(address)
    if attribute == names.CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return region.number
    if attribute == names.CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return False
    if attribute == names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return device.index if device is not None else 0
    if attribute == names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return cuda.CUdeviceptr(region.base)
    if attribute == names.CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return region.size
    if attribute == names.CU_POINTER_ATTRIBUTE_MAPPED:
        return True
    if attribute == names.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return region.mapping.object.types if region.mapping is not None else 0
    raise Refusal(result.CUDA_ERROR_INVALID_VALUE, f"pointer attribute {attribute} is not emulated")


def _no_host_pointer(address: int) -> NoReturn:
    refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is memory of a device")
