"""What tests of the emulated device share: the driver, filled-in structs, kernels loaded from text, and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from lamport_numba import driver, emulator

from . import leaks

POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
NONE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
READ_WRITE = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
READ = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
PDL = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@contextmanager
def machine(**changes: Any) -> Iterator[driver.Driver]:
    """The emulated driver with device 0 current on a machine changed so; afterwards nothing may be left behind."""
    drv = driver.select("emulated")
    defaults = emulator.Config()
    before = {name: getattr(emulator.CONFIG, name) for name in changes if name != "devices"}
    if changes.get("devices", 1) > emulator.CONFIG.devices:
        emulator.configure(devices=changes["devices"])
    emulator.configure(**{name: changes[name] for name in before})
    try:
        with drv.current(0):
            yield drv
        assert leaks.new() == []
    finally:
        emulator.clear()
        emulator.configure(**before)
        assert emulator.CONFIG.granularity == defaults.granularity
        for device in range(drv.device_count()):
            drv.api.cuDevicePrimaryCtxReset(device)


def refused(drv: driver.Driver, name: str, *args: Any, code: int = 1, text: str = "") -> None:
    """Make a call and assert that it answers ``code`` and that the reason holds ``text``."""
    answer = getattr(drv.api, name)(*args)
    assert int(answer[0]) == code, (name, answer, emulator.last_refusal())
    assert all(value is None for value in answer[1:])
    assert text in emulator.last_refusal()


def memory_prop(device: int = 0, types: Any = POSIX) -> Any:
    """Properties of physical memory of a device."""
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.requestedHandleTypes = types
    return prop


def access(device: int = 0, flags: Any = READ_WRITE) -> list[Any]:
    """A list of one access descriptor."""
    desc = cuda.CUmemAccessDesc()
    desc.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    desc.location.id = device
    desc.flags = flags
    return [desc]


def multicast_prop(team: int, size: int, types: int = int(POSIX)) -> Any:
    """Properties of a multicast object."""
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices, prop.size, prop.handleTypes, prop.flags = team, size, types, 0
    return prop


class Mapped:
    """Memory of ``device``, mapped with access for ``devices``."""

    def __init__(
        self, drv: driver.Driver, size: int, device: int = 0, devices: tuple[int, ...] = (0,), handle: Any = None
    ):
        self.drv, self.size = drv, size
        self.handle = handle if handle is not None else drv.call("cuMemCreate", size, memory_prop(device), 0)
        self.address = int(drv.call("cuMemAddressReserve", size, 0, 0, 0))
        drv.call("cuMemMap", self.address, size, 0, self.handle, 0)
        for one in devices:
            drv.call("cuMemSetAccess", self.address, size, access(one), 1)

    def close(self) -> None:
        """Unmap, free, release."""
        self.drv.call("cuMemUnmap", self.address, self.size)
        self.drv.call("cuMemAddressFree", self.address, self.size)
        self.drv.call("cuMemRelease", self.handle)


def upload(drv: driver.Driver, data: Any) -> int:
    """A device allocation with these bytes."""
    host = np.ascontiguousarray(data)
    address = int(drv.call("cuMemAlloc", host.nbytes))
    drv.call("cuMemcpyHtoD", address, host.ctypes.data, host.nbytes)
    return address


def download(drv: driver.Driver, address: int, shape: Any, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
    """The bytes at a device address."""
    host = np.empty(shape, dtype)
    drv.call("cuMemcpyDtoH", host.ctypes.data, address, host.nbytes)
    return host


class Kernel:
    """A kernel from PTX text, launched with ints (32 or 64 bits as its parameters say)."""

    def __init__(self, drv: driver.Driver, text: str, name: str) -> None:
        self.drv = drv
        self.function = drv.call("cuModuleGetFunction", drv.load_module(text), name.encode())
        self._blocks: list[Any] = []

    def pack(self, args: tuple[int, ...]) -> int:
        """The address of an array of pointers to the values."""
        if not args:
            return 0
        values = (ctypes.c_uint64 * len(args))(*args)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * len(args))(*(base + 8 * i for i in range(len(args))))
        self._blocks += [values, pointers]
        return ctypes.addressof(pointers)

    def config(self, grid: int, block: int, stream: Any = 0, pdl: bool = False) -> Any:
        """A launch configuration."""
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.hStream = cuda.CUstream(int(stream))
        if pdl:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = PDL
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def __call__(self, *args: int, grid: int = 1, block: int = 32, stream: Any = 0, pdl: bool = False) -> None:
        self.drv.call("cuLaunchKernelEx", self.config(grid, block, stream, pdl), self.function, self.pack(args), 0)


SPIN = """.version 8.1
.target sm_90
.address_size 64
.visible .entry spin(.param .u64 at)
{
    .reg .pred %p; .reg .b32 %x; .reg .b64 %a;
    ld.param.u64 %a, [at];
AGAIN:
    ld.volatile.global.u32 %x, [%a];
    setp.eq.u32 %p, %x, 0;
    @%p bra AGAIN;
    ret;
}
"""
"""A kernel whose threads spin until the word at ``at`` is not 0."""
