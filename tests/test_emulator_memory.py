"""Memory of the emulated device: physical objects, mappings, rights, allocations, and every misuse that is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from helpers import leaks
from helpers.emulated import FABRIC, NONE, POSIX, READ, Mapped, access, download, machine, memory_prop, refused, upload

from lamport_numba import emulator
from lamport_numba.emulator.memory import MEMORY


@pytest.fixture
def drv():
    with machine(devices=2) as made:
        yield made


@pytest.fixture
def size(drv):
    return 2 * drv.call("cuMemGetAllocationGranularity", memory_prop(), 0)


# Physical memory


def test_two_mappings_of_one_object_are_the_same_memory(drv, size):
    first = Mapped(drv, size)
    handle = drv.call("cuMemRetainAllocationHandle", first.address)
    second = Mapped(drv, size, handle=handle)
    drv.call("cuMemsetD32", first.address, 0x12345678, size // 4)
    assert (download(drv, second.address, size // 4) == 0x12345678).all()
    second.close()
    first.close()


def test_an_imported_descriptor_is_the_same_memory_and_may_be_closed(drv, size):
    mine = Mapped(drv, size)
    fd = drv.call("cuMemExportToShareableHandle", mine.handle, POSIX, 0)
    assert not os.get_inheritable(fd)
    handle = drv.call("cuMemImportFromShareableHandle", fd, POSIX)
    os.close(fd)
    other = Mapped(drv, size, handle=handle)
    data = np.arange(size // 4, dtype=np.uint32)
    drv.call("cuMemcpyHtoD", other.address, data.ctypes.data, size)
    assert (download(drv, mine.address, size // 4) == data).all()
    mine.close()
    assert (download(drv, other.address, size // 4) == data).all()  # lives on by its other handle and mapping
    other.close()


def test_memory_lives_while_it_is_mapped_although_its_handle_is_released(drv, size):
    mine = Mapped(drv, size)
    drv.call("cuMemRelease", mine.handle)
    drv.call("cuMemsetD8", mine.address, 7, size)
    assert (download(drv, mine.address, size, np.uint8) == 7).all()
    refused(drv, "cuMemRelease", mine.handle, text="released?")
    drv.call("cuMemUnmap", mine.address, size)
    drv.call("cuMemAddressFree", mine.address, size)


def test_free_memory_counts(drv, size):
    before, total = drv.call("cuMemGetInfo")
    handle = drv.call("cuMemCreate", size, memory_prop(), 0)
    assert drv.call("cuMemGetInfo") == (before - size, total)
    drv.call("cuMemRelease", handle)
    assert drv.call("cuMemGetInfo") == (before, total)


def test_a_device_that_is_full_answers_out_of_memory(drv, size):
    _, total = drv.call("cuMemGetInfo")
    refused(drv, "cuMemCreate", total + size, memory_prop(), 0, code=2)
    refused(drv, "cuMemAlloc", total + size, code=2)


def test_create_refuses_sizes_and_flags(drv, size):
    refused(drv, "cuMemCreate", size + 4096, memory_prop(), 0, text="multiple of the granularity")
    refused(drv, "cuMemCreate", 0, memory_prop(), 0)
    refused(drv, "cuMemCreate", size, memory_prop(), 1)
    refused(drv, "cuMemCreate", size, memory_prop(99), 0, code=101)
    refused(drv, "cuMemCreate", size, cuda.CUmemAllocationProp(), 0)


# Shareable handles


def test_export_wants_the_type_asked_for_at_creation(drv, size):
    handle = drv.call("cuMemCreate", size, memory_prop(types=NONE), 0)
    refused(drv, "cuMemExportToShareableHandle", handle, POSIX, 0, text="not asked for at creation")
    drv.call("cuMemRelease", handle)


def test_import_refuses_a_descriptor_that_is_no_allocation(drv):
    with open(__file__) as file:
        refused(drv, "cuMemImportFromShareableHandle", file.fileno(), POSIX, text="no exported allocation")
    refused(drv, "cuMemImportFromShareableHandle", 12345, POSIX)


def test_fabric_handles_are_not_permitted_although_the_attribute_says_1(drv, size):
    assert drv.attribute(0, "HANDLE_TYPE_FABRIC_SUPPORTED") == 1
    refused(drv, "cuMemCreate", size, memory_prop(types=FABRIC), 0, code=800, text="IMEX")


def test_fabric_handles_are_bytes_that_resolve_when_switched_on(size):
    with machine(fabric_handles=True) as drv:
        mine = Mapped(drv, size, handle=drv.call("cuMemCreate", size, memory_prop(types=FABRIC), 0))
        fabric = drv.call("cuMemExportToShareableHandle", mine.handle, FABRIC, 0)
        assert len(bytes(fabric.data)) == 64
        same = cuda.CUmemFabricHandle()
        same.data = bytes(fabric.data)
        other = Mapped(drv, size, handle=drv.call("cuMemImportFromShareableHandle", same, FABRIC))
        drv.call("cuMemsetD8", mine.address, 9, size)
        assert (download(drv, other.address, size, np.uint8) == 9).all()
        other.close()
        mine.close()


def test_a_fabric_handle_whose_creator_let_go_is_a_fresh_empty_object(size):
    with machine(fabric_handles=True) as drv:
        mine = Mapped(drv, size, handle=drv.call("cuMemCreate", size, memory_prop(types=FABRIC), 0))
        drv.call("cuMemsetD8", mine.address, 9, size)
        fabric = drv.call("cuMemExportToShareableHandle", mine.handle, FABRIC, 0)
        mine.close()
        fresh = Mapped(drv, size, handle=drv.call("cuMemImportFromShareableHandle", fabric, FABRIC))
        assert (download(drv, fresh.address, size, np.uint8) == 0).all()
        fresh.close()


# Reservations, mappings, rights


def test_nothing_can_be_touched_before_set_access(drv, size):
    handle = drv.call("cuMemCreate", size, memory_prop(), 0)
    address = drv.call("cuMemAddressReserve", size, 0, 0, 0)
    refused(drv, "cuMemsetD8", address, 0, size)
    drv.call("cuMemMap", address, size, 0, handle, 0)
    refused(drv, "cuMemsetD8", address, 0, size)
    drv.call("cuMemSetAccess", address, size, access(), 1)
    drv.call("cuMemsetD8", address, 0, size)
    drv.call("cuMemUnmap", address, size)
    refused(drv, "cuMemsetD8", address, 0, size)
    drv.call("cuMemAddressFree", address, size)
    drv.call("cuMemRelease", handle)


def test_read_only_access(drv, size):
    mine = Mapped(drv, size)
    drv.call("cuMemSetAccess", mine.address, size, access(flags=READ), 1)
    download(drv, mine.address, 4)
    refused(drv, "cuMemsetD8", mine.address, 0, 4, text="not permitted")
    mine.close()


def test_rights_are_of_one_device(drv, size):
    drv.primary(1)
    mine = Mapped(drv, size, device=0, devices=(1,))
    refused(drv, "cuMemsetD8", mine.address, 0, 4)
    with drv.current(1):
        drv.call("cuMemsetD8", mine.address, 3, 4)
    mine.close()


@pytest.mark.parametrize("alignment", [0, 1 << 21, 1 << 25])
def test_reservations_are_aligned(drv, size, alignment):
    address = int(drv.call("cuMemAddressReserve", size, alignment, 0, 0))
    assert address % max(alignment, 1) == 0
    drv.call("cuMemAddressFree", address, size)


def test_reserve_refuses(drv, size):
    refused(drv, "cuMemAddressReserve", size + 4096, 0, 0, 0, text="multiple")
    refused(drv, "cuMemAddressReserve", size, 3 << 20, 0, 0, text="power of two")
    refused(drv, "cuMemAddressReserve", size, 0, 0, 1)


def test_map_refuses(drv, size):
    mine = Mapped(drv, size)
    address = int(drv.call("cuMemAddressReserve", 2 * size, 0, 0, 0))
    refused(drv, "cuMemMap", address, size, size // 2, mine.handle, 0, text="offset")
    refused(drv, "cuMemMap", address, size, 0, mine.handle, 1)
    refused(drv, "cuMemMap", address, 2 * size, 0, mine.handle, 0)
    refused(drv, "cuMemMap", address + 2 * size, size, 0, mine.handle, 0, text="not inside one reservation")
    refused(drv, "cuMemMap", address + 4096, size, 0, mine.handle, 0, text="granularity")
    refused(drv, "cuMemMap", mine.address, size, 0, mine.handle, 0, text="mapped already")
    refused(drv, "cuMemMap", address, size, 0, 0xDEAD, 0)
    drv.call("cuMemAddressFree", address, 2 * size)
    mine.close()


def test_unmap_wants_whole_mappings_and_free_whole_reservations(drv, size):
    mine = Mapped(drv, size)
    refused(drv, "cuMemUnmap", mine.address, size // 2)
    refused(drv, "cuMemUnmap", mine.address + size // 2, size // 2)
    refused(drv, "cuMemAddressFree", mine.address, size, text="still in it")
    drv.call("cuMemUnmap", mine.address, size)
    refused(drv, "cuMemUnmap", mine.address, size)
    refused(drv, "cuMemAddressFree", mine.address, size // 2)
    drv.call("cuMemAddressFree", mine.address, size)
    refused(drv, "cuMemAddressFree", mine.address, size)
    drv.call("cuMemRelease", mine.handle)


def test_one_unmap_may_take_several_mappings(drv, size):
    handle = drv.call("cuMemCreate", size, memory_prop(), 0)
    address = int(drv.call("cuMemAddressReserve", 2 * size, 0, 0, 0))
    drv.call("cuMemMap", address, size, 0, handle, 0)
    refused(drv, "cuMemSetAccess", address, 2 * size, access(), 1)  # not fully mapped
    drv.call("cuMemMap", address + size, size, 0, handle, 0)
    drv.call("cuMemSetAccess", address, 2 * size, access(), 1)
    drv.call("cuMemsetD8", address, 1, 2 * size)  # a copy or fill may span mappings
    drv.call("cuMemUnmap", address, 2 * size)
    drv.call("cuMemAddressFree", address, 2 * size)
    drv.call("cuMemRelease", handle)


def test_set_access_refuses_a_device_without_a_context_here(drv, size):
    foreign = drv.device_count()
    emulator.configure(devices=foreign + 1)
    mine = Mapped(drv, size)
    refused(drv, "cuMemSetAccess", mine.address, size, access(foreign), 1, code=101, text="own")
    refused(drv, "cuMemSetAccess", mine.address, size, access(), 2)
    mine.close()


# Plain and pinned allocations


def test_copies_round_trip(drv):
    data = np.arange(1000, dtype=np.float64)
    address = upload(drv, data)
    other = int(drv.call("cuMemAlloc", data.nbytes))
    drv.call("cuMemcpyDtoD", other, address, data.nbytes)
    assert (download(drv, other, 1000, np.float64) == data).all()
    for one in (address, other):
        drv.call("cuMemFree", one)


@pytest.mark.parametrize(
    ("call", "value", "dtype"), [("D8", 0xAB, "u1"), ("D16", 0xABCD, "u2"), ("D32", 0x89ABCDEF, "u4")]
)
@pytest.mark.parametrize("count", [1, 3, 10_000])
def test_fills(drv, call, value, dtype, count):
    address = int(drv.call("cuMemAlloc", 4 * count))
    drv.call(f"cuMemset{call}", address, value, count)
    assert (download(drv, address, count, np.dtype(dtype)) == value).all()
    drv.call("cuMemFree", address)


def test_copies_are_checked_for_bounds(drv):
    data = np.zeros(64, np.uint8)
    address = upload(drv, data)
    refused(drv, "cuMemcpyDtoH", data.ctypes.data, address + 32, 64, text="illegal address")
    refused(drv, "cuMemcpyHtoD", address, data.ctypes.data, 65)
    refused(drv, "cuMemsetD32", address + 2, 0, 1)
    refused(drv, "cuMemcpyDtoD", address, 0, 4)
    drv.call("cuMemFree", address)
    refused(drv, "cuMemcpyDtoH", data.ctypes.data, address, 1)


def test_free_refuses_what_was_not_allocated(drv):
    address = int(drv.call("cuMemAlloc", 4096))
    refused(drv, "cuMemFree", address + 256)
    refused(drv, "cuMemFreeHost", address)
    drv.call("cuMemFree", address)
    refused(drv, "cuMemFree", address)
    drv.call("cuMemFree", 0)


def test_host_memory_is_seen_by_host_and_every_device(drv):
    address = drv.call("cuMemHostAlloc", 64, 0)
    host = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint32 * 16).from_address(address))
    host[:] = np.arange(16)
    for device in range(2):
        with drv.current(device):
            assert (download(drv, int(drv.call("cuMemHostGetDevicePointer", address, 0)), 16) == np.arange(16)).all()
    drv.call("cuMemFreeHost", address)
    refused(drv, "cuMemHostGetDevicePointer", address, 0)


def test_registered_memory(drv):
    data = np.arange(4096, dtype=np.uint32)
    drv.call("cuMemHostRegister", data.ctypes.data, data.nbytes, 0)
    refused(drv, "cuMemHostRegister", data.ctypes.data, data.nbytes, 0, code=712)
    assert int(drv.call("cuMemHostGetDevicePointer", data.ctypes.data, 0)) == data.ctypes.data
    drv.call("cuMemHostUnregister", data.ctypes.data)
    refused(drv, "cuMemHostUnregister", data.ctypes.data, code=713)


def test_pointer_attributes(drv, size):
    names = cuda.CUpointer_attribute
    drv.primary(1)
    mine = Mapped(drv, size, device=1, devices=(0,))
    host = drv.call("cuMemHostAlloc", 64, 0)
    ask = drv.call
    assert ask("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mine.address + 8) == 1
    assert (
        int(ask("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, mine.address + 8)) == mine.address
    )
    assert ask("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_RANGE_SIZE, mine.address + 8) == size
    kinds = cuda.CUmemorytype
    for address, kind in ((mine.address, kinds.CU_MEMORYTYPE_DEVICE), (host, kinds.CU_MEMORYTYPE_HOST)):
        assert ask("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == kind
    local = np.zeros(4)
    refused(drv, "cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, local.ctypes.data)
    drv.call("cuMemFreeHost", host)
    mine.close()


def test_peer_access_to_plain_allocations(drv):
    with drv.current(1):
        theirs = upload(drv, np.arange(16, dtype=np.uint32))
    refused(drv, "cuMemsetD32", theirs + (1 << 40), 0, 1)
    drv.call("cuCtxEnablePeerAccess", drv.primary(1), 0)
    refused(drv, "cuCtxEnablePeerAccess", drv.primary(1), 0, code=704)
    assert (download(drv, theirs, 16) == np.arange(16)).all()
    drv.call("cuCtxDisablePeerAccess", drv.primary(1))
    refused(drv, "cuCtxDisablePeerAccess", drv.primary(1), code=705)
    with drv.current(1):
        drv.call("cuMemFree", theirs)


# Contexts


def test_calls_without_a_context_are_refused(drv):
    former = drv.call("cuCtxPopCurrent")
    refused(drv, "cuMemAlloc", 64, code=201)
    refused(drv, "cuStreamCreate", 0, code=201)
    refused(drv, "cuCtxGetDevice", code=201)
    drv.call("cuCtxPushCurrent", former)


def test_releasing_the_primary_context_frees_what_it_holds(drv):
    device = 1
    retained = drv.call("cuDevicePrimaryCtxRetain", device)
    while drv.call("cuDevicePrimaryCtxGetState", device)[1]:
        drv.call("cuDevicePrimaryCtxRelease", device)
    refused(drv, "cuDevicePrimaryCtxRelease", device, code=201)
    drv._primary.pop(device, None)
    context = drv.call("cuDevicePrimaryCtxRetain", device)
    assert int(context) != int(retained)
    drv.call("cuCtxPushCurrent", context)
    before = drv.call("cuMemGetInfo")
    drv.call("cuMemAlloc", 1 << 20)
    assert drv.call("cuMemGetInfo") != before
    drv.call("cuDevicePrimaryCtxRelease", device)
    refused(drv, "cuMemAlloc", 64, code=709)
    drv.call("cuCtxPopCurrent")


def test_devices_have_one_uuid_each(drv):
    assert drv.device_uuid(0) != drv.device_uuid(1)
    assert len(drv.device_uuid(0)) == 16


def test_leaks_name_what_is_left(drv, size):
    mine = Mapped(drv, size)
    fd = drv.call("cuMemExportToShareableHandle", mine.handle, POSIX, 0)
    found = "\n".join(emulator.leaks())
    for word in ("handle", "reservation", "mapping", f"exported descriptor {fd}"):
        assert word in found
    os.close(fd)
    mine.close()
    assert leaks.new() == []


def test_descriptors_that_were_closed_are_not_remembered_for_ever(drv, size):
    mine = Mapped(drv, size)
    before = len(MEMORY.exported)
    for _ in range(50):
        os.close(drv.call("cuMemExportToShareableHandle", mine.handle, POSIX, 0))
    assert len(MEMORY.exported) < before + 50
    mine.close()
