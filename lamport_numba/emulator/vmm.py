"""Virtual memory calls: physical memory, shareable handles, reservations, mappings and rights."""

from __future__ import annotations

import os
import struct
from bisect import insort
from typing import Any, Final

from cuda.bindings import driver as cuda

from . import mapping
from .config import CONFIG
from .core import Refusal, address_of, api, refuse, result
from .engine import ENGINE
from .grid import Access
from .machine import MACHINE, Device, device_of
from .memory import (
    ACCESS,
    DEVICE_LOCATION,
    FABRIC,
    HANDLE_TYPES,
    MEMORY,
    MEMORY_NAME,
    MULTICAST_NAME,
    PINNED,
    POSIX,
    Mapping,
    Physical,
    Region,
    Reservation,
    borrow,
    fabric_permitted,
    multiple,
    name_of,
)
from .multicast import MulticastMapping, MulticastObject

# Physical memory


def _check_prop(prop: Any) -> tuple[Device, int]:
    if prop is None or int(prop.type) != PINNED:
        refuse(result.CUDA_ERROR_INVALID_VALUE, "the type of an allocation is CU_MEM_ALLOCATION_TYPE_PINNED")
    if int(prop.location.type) != DEVICE_LOCATION:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "only memory of a device is emulated (location type DEVICE)")
    device = device_of(prop.location.id)
    types = int(prop.requestedHandleTypes)
    if types & ~(POSIX | FABRIC):
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, f"handle types {types:#x}: only POSIX and FABRIC are emulated")
    return device, types


@api(1)
def cuMemGetAllocationGranularity(prop: Any, option: Any) -> int:
    _check_prop(prop)
    return CONFIG.granularity


@api(1)
def cuMemCreate(size: int, prop: Any, flags: int) -> Any:
    device, types = _check_prop(prop)
    if flags != 0 or size <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"size {size}, flags {flags}; expected a positive size and flags 0")
    multiple(size, CONFIG.granularity, "size")
    fabric_permitted(types)
    with MACHINE.lock:
        if device.used + size > CONFIG.memory:
            refuse(
                result.CUDA_ERROR_OUT_OF_MEMORY,
                f"{size} bytes on device {device.index}, which has {CONFIG.memory - device.used} left",
            )
        device.serial += 1
        name = f"{MEMORY_NAME}{device.index} {device.serial} {types} {size}"
        try:
            fd = mapping.make_memfd(name, size)
        except OSError as error:
            refuse(result.CUDA_ERROR_OUT_OF_MEMORY, str(error))
        physical = Physical(fd, size, device.index, types, device.serial)
        physical.charged = device
        device.used += size
        MEMORY.physicals[physical.inode] = physical
        return MEMORY.new_handle(physical)


@api()
def cuMemRelease(handle: Any) -> None:
    with MACHINE.lock:
        held = MEMORY.handle_of(handle)
        held.references -= 1
        if held.references == 0:
            del MEMORY.handles[held.number]
            held.object.drop()


@api(1)
def cuMemRetainAllocationHandle(addr: Any) -> Any:
    address = address_of(addr)
    with MACHINE.lock:
        for reservation in MEMORY.reservations.values():
            for mapped in reservation.mappings.values():
                if mapped.base <= address < mapped.base + mapped.size:
                    for held in MEMORY.handles.values():
                        if held.object is mapped.object:
                            held.references += 1
                            return cuda.CUmemGenericAllocationHandle(held.number)
                    return MEMORY.new_handle(mapped.object)
    raise Refusal(result.CUDA_ERROR_INVALID_VALUE, f"nothing is mapped at {address:#x}")


@api(1)
def cuMemGetAllocationPropertiesFromHandle(handle: Any) -> Any:
    physical = MEMORY.physical_of(handle)
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = physical.device
    try:
        prop.requestedHandleTypes = HANDLE_TYPES(physical.types)
    except ValueError:
        prop.requestedHandleTypes = HANDLE_TYPES.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


# Shareable handles

_FABRIC: Final = struct.Struct("=8sIIiIQQQ16x")  # magic, kind, process, descriptor, numDevices, inode, size, types
_MAGIC: Final = b"lamportE"


@api(1)
def cuMemExportToShareableHandle(handle: Any, handleType: Any, flags: int) -> Any:
    kind = int(handleType)
    held = MEMORY.handle_of(handle)
    thing = held.object
    if flags != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {flags}; only 0 is defined")
    if kind not in (POSIX, FABRIC) or not thing.types & kind:
        refuse(
            result.CUDA_ERROR_INVALID_VALUE,
            f"handle type {kind} was not asked for at creation (types {thing.types:#x})",
        )
    if kind == POSIX:
        fd = os.dup(thing.fd)  # close-on-exec, as Python makes them
        MEMORY.exported[fd] = thing.inode
        return fd
    fabric_permitted(kind)
    multicast, extra = (0, thing.device) if isinstance(thing, Physical) else (1, thing.team)
    made = cuda.CUmemFabricHandle()
    made.data = _FABRIC.pack(_MAGIC, multicast, os.getpid(), thing.fd, extra, thing.inode, thing.size, thing.types)
    return made


@api(1)
def cuMemImportFromShareableHandle(osHandle: Any, shHandleType: Any) -> Any:
    kind = int(shHandleType)
    if kind == POSIX:
        return _import_fd(address_of(osHandle))
    if kind == FABRIC:
        fabric_permitted(kind)
        return _import_fabric(osHandle)
    raise Refusal(result.CUDA_ERROR_NOT_SUPPORTED, f"handle type {kind} is not emulated")


def _import_fd(number: int) -> Any:
    name = name_of(number)
    fd = os.dup(number)
    with MACHINE.lock:
        return MEMORY.new_handle(MulticastObject.adopt(fd) if name.startswith(MULTICAST_NAME) else MEMORY.adopt(fd))


def _import_fabric(given: Any) -> Any:
    data = bytes(given.data) if hasattr(given, "data") and not isinstance(given, memoryview) else bytes(given)
    if len(data) != _FABRIC.size or not data.startswith(_MAGIC):
        refuse(result.CUDA_ERROR_INVALID_VALUE, "these 64 bytes are no fabric handle of this machine")
    _, multicast, process, number, extra, inode, size, types = _FABRIC.unpack(data)
    with MACHINE.lock:
        fd = borrow(process, number, inode)
        if fd is None:  # R: the creator's last reference is gone: a fresh, empty object
            if multicast:
                return MEMORY.new_handle(MulticastObject.create(extra, size, types))
            device = device_of(extra)
            device.serial += 1
            fd = mapping.make_memfd(f"{MEMORY_NAME}{extra} {device.serial} {types} {size}", size)
        return MEMORY.new_handle(MulticastObject.adopt(fd) if multicast else MEMORY.adopt(fd))


# Addresses and mappings


@api(1)
def cuMemAddressReserve(size: int, alignment: int, addr: Any, flags: int) -> Any:
    if flags != 0 or size <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"size {size}, flags {flags}; expected a positive size and flags 0")
    if not MACHINE.initialised:
        refuse(result.CUDA_ERROR_NOT_INITIALIZED)
    if alignment & (alignment - 1):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"alignment {alignment} is no power of two")
    multiple(size, CONFIG.granularity, "size")
    try:
        base = mapping.reserve(size, max(alignment, CONFIG.granularity, CONFIG.multicast_granularity), address_of(addr))
    except OSError as error:
        refuse(result.CUDA_ERROR_OUT_OF_MEMORY, str(error))
    with MACHINE.lock:
        MEMORY.reservations[base] = Reservation(base, size)
        insort(MEMORY.reserved, base)
    return cuda.CUdeviceptr(base)


@api()
def cuMemAddressFree(ptr: Any, size: int) -> None:
    base = address_of(ptr)
    with MACHINE.lock:
        reservation = MEMORY.reservations.get(base)
        if reservation is None or reservation.size != size:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes at {base:#x} are not a whole reservation")
        if reservation.mappings:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{len(reservation.mappings)} mappings are still in it")
        del MEMORY.reservations[base]
        MEMORY.reserved.remove(base)
        mapping.unmap(base, size)


@api()
def cuMemMap(ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    base = address_of(ptr)
    thing = MEMORY.handle_of(handle).object
    if flags != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {flags}; only 0 is defined")
    if offset != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"offset {offset}; a mapping begins at 0")
    physical = isinstance(thing, Physical)
    granularity = CONFIG.granularity if physical else CONFIG.multicast_granularity
    multiple(size, granularity, "size")
    multiple(base, granularity, "address")
    if not 0 < size <= thing.size:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"size {size}; the object has {thing.size} bytes")
    reservation = MEMORY.reservation(base, size)
    if not isinstance(thing, Physical):
        thing.await_team("cuMemMap")
    with MACHINE.lock:
        for other in reservation.mappings.values():
            if other.base < base + size and base < other.base + other.size:
                refuse(result.CUDA_ERROR_INVALID_VALUE, f"{other.size} bytes at {other.base:#x} are mapped already")
        if isinstance(thing, Physical):
            mapping.map_at(base, size, thing.fd)
        reservation.mappings[base] = Mapping(reservation, base, size, thing)
        thing.take()


@api()
def cuMemUnmap(ptr: Any, size: int) -> None:
    base = address_of(ptr)
    with ENGINE.turn, MACHINE.lock:
        reservation = MEMORY.reservation(base, size)
        for mapped in _covered(reservation, base, size):
            _unmap(mapped)


def _covered(reservation: Reservation, base: int, size: int) -> list[Mapping]:
    """The mappings that make up a range exactly; refuses holes and cuts."""
    found, at = [], base
    while at < base + size:
        mapped = reservation.mappings.get(at)
        if mapped is None or mapped.base + mapped.size > base + size:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes at {base:#x} are not whole mappings without a hole")
        found.append(mapped)
        at += mapped.size
    return found


def _unmap(mapped: Mapping) -> None:
    if isinstance(mapped.object, Physical):
        if mapped.region is not None:
            MEMORY.remove(mapped.region)
        mapping.map_at(mapped.base, mapped.size)
    else:
        for device in MACHINE.devices:
            for follower in [f for f in device.multicasts if f.mapping is mapped]:
                assert isinstance(follower, MulticastMapping)
                follower.end()
    del mapped.reservation.mappings[mapped.base]
    mapped.object.drop()


@api()
def cuMemSetAccess(ptr: Any, size: int, desc: Any, count: int) -> None:
    base = address_of(ptr)
    wanted: list[tuple[Device, Access]] = []
    for one in list(desc or ())[:count]:
        if int(one.location.type) != DEVICE_LOCATION or int(one.flags) not in ACCESS:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"location type {int(one.location.type)}, flags {int(one.flags)}")
        device = device_of(one.location.id)
        if device.context is None:  # D own device only; # undocumented: which error
            refuse(
                result.CUDA_ERROR_INVALID_DEVICE, f"device {device.index} is not this process's own (it has no context)"
            )
        wanted.append((device, ACCESS[int(one.flags)]))
    if not wanted or len(wanted) != count:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{count} access descriptors; {len(wanted)} given")
    with ENGINE.turn, MACHINE.lock:
        for mapped in _covered(MEMORY.reservation(base, size), base, size):
            for device, access in wanted:
                _set_access(mapped, device, access)


def _set_access(mapped: Mapping, device: Device, access: Access) -> None:
    thing = mapped.object
    if isinstance(thing, Physical):
        if mapped.region is None:
            mapping.protect(mapped.base, mapped.size, True)
            mapped.region = Region(mapped.base, mapped.size, MACHINE.devices[thing.device])
            mapped.region.mapping = mapped
            MEMORY.add(mapped.region, {})
        MEMORY.allow(mapped.region, device.index, access)
        return
    if not thing.has(device):
        refuse(result.CUDA_ERROR_INVALID_DEVICE, f"device {device.index} is not of the multicast team")
    for follower in [f for f in device.multicasts if f.mapping is mapped]:
        follower.end()
    if access:
        MulticastMapping(mapped, device, access)


@api(1)
def cuMemGetAccess(location: Any, ptr: Any) -> int:
    device, address = device_of(location.id), address_of(ptr)
    region = MEMORY.region(address)
    if region is None:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"nothing is mapped at {address:#x}")
    rights = region.access.get(device.index, Access.NONE)
    return next(flag for flag, access in ACCESS.items() if access == rights)
