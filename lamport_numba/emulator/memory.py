"""The memory of this process: physical objects, reservations and mappings, allocations, and the rights of devices.

A device address is a host address of the process. A physical object is a memfd, so what another process imports is the
memory itself. What each device may touch stands in its address table; everything here keeps these tables true.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as cuda

from . import mapping
from .config import CONFIG
from .core import Refusal, handle, refuse, result
from .engine import ENGINE
from .grid import Access, Kind
from .machine import MACHINE, Context, Device

if TYPE_CHECKING:
    from .multicast import MulticastObject

__all__ = ["MEMORY", "Handle", "Mapping", "Memory", "Physical", "Region", "Reservation"]

HANDLE_TYPES = cuda.CUmemAllocationHandleType
NO_TYPE: Final = int(HANDLE_TYPES.CU_MEM_HANDLE_TYPE_NONE)
POSIX: Final = int(HANDLE_TYPES.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
FABRIC: Final = int(HANDLE_TYPES.CU_MEM_HANDLE_TYPE_FABRIC)
DEVICE_LOCATION: Final = int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
PINNED: Final = int(cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
_FLAGS: Final = cuda.CUmemAccess_flags
ACCESS: Final = {
    int(_FLAGS.CU_MEM_ACCESS_FLAGS_PROT_NONE): Access.NONE,
    int(_FLAGS.CU_MEM_ACCESS_FLAGS_PROT_READ): Access.READ,
    int(_FLAGS.CU_MEM_ACCESS_FLAGS_PROT_READWRITE): Access.READ_WRITE,
}
MEMORY_NAME: Final = "lamport-numba memory "
MULTICAST_NAME: Final = "lamport-numba multicast "
_ALIGNMENT: Final = 512  # of cuMemAlloc
_POOLED: Final = 64 << 20  # bytes of freed memory that are kept for the next allocation


class Region:
    """A range of addresses that can be accessed: an allocation, or a mapping with rights."""

    __slots__ = ("access", "base", "context", "device", "host", "mapping", "number", "size", "taken")

    def __init__(self, base: int, size: int, device: Device | None, *, host: bool = False) -> None:
        self.base = base
        self.size = size
        self.device = device  # whose memory it is; None: the host's
        self.host = host
        self.context: Context | None = None
        self.mapping: Mapping | None = None
        self.access: dict[int, Access] = {}  # by device index
        self.number = handle()
        self.taken = 0  # bytes that the system gave, 0 if they are not ours

    def __repr__(self) -> str:
        return f"<Region {self.base:#x}+{self.size}>"


class Physical:
    """Physical memory of a device: a memfd, the same object for all handles of this process."""

    def __init__(self, fd: int, size: int, device: int, types: int, serial: int) -> None:
        self.fd = fd
        self.size = size
        self.device = device
        self.types = types
        self.serial = serial
        self.inode = os.fstat(fd).st_ino
        self.references = 0  # handles and mappings
        self.key = (device << 52) | (serial << 40)
        self.binds: set[Any] = set()  # of multicast objects, made by this process
        self.charged: Device | None = None

    def take(self) -> None:
        """One more reference."""
        self.references += 1

    def drop(self) -> None:
        """One reference less; the last one ends the object in this process."""
        self.references -= 1
        if self.references == 0:
            for bind in list(self.binds):
                bind.freed = True  # R: an unbind after the memory is gone fails, and poisons a later call
            MEMORY.physicals.pop(self.inode, None)
            mapping.close(self.fd)
            if self.charged is not None:
                self.charged.used -= self.size


class Handle:
    """One generic allocation handle; ``object`` is Physical or a MulticastObject."""

    def __init__(self, thing: Physical | MulticastObject) -> None:
        self.number = handle()
        self.object = thing
        self.references = 1
        thing.take()


class Reservation:
    """A range of addresses and what is mapped into it, by base."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size
        self.mappings: dict[int, Mapping] = {}


class Mapping:
    """An object at an address. The region appears with the first rights."""

    def __init__(self, reservation: Reservation, base: int, size: int, thing: Physical | MulticastObject) -> None:
        self.reservation = reservation
        self.base = base
        self.size = size
        self.object = thing
        self.region: Region | None = None


class Memory:
    """All memory of this process."""

    def __init__(self) -> None:
        self.handles: dict[int, Handle] = {}
        self.physicals: dict[int, Physical] = {}  # by inode
        self.reservations: dict[int, Reservation] = {}
        self.exported: dict[int, int] = {}  # descriptors that the caller owns, and may close: the inode of each
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        self.reserved: list[int] = []
        self._free: dict[int, list[int]] = {}
        self._pooled = 0

    # Regions

    def region(self, address: int) -> Region | None:
        """The region that holds ``address``."""
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        region = self._regions[self._bases[at]]
        return region if address < region.base + region.size else None

    def reservation(self, address: int, size: int) -> Reservation:
        """The reservation that holds the whole range; refuses if there is none."""
        at = bisect_right(self.reserved, address) - 1
        if at >= 0:
            found = self.reservations[self.reserved[at]]
            if address + size <= found.base + found.size:
                return found
        raise Refusal(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes at {address:#x} are not inside one reservation")

    def add(self, region: Region, access: dict[int, Access]) -> None:
        """Make a region known, with the rights of each device."""
        with ENGINE.turn:
            self._regions[region.base] = region
            insort(self._bases, region.base)
            for index, rights in access.items():
                self.allow(region, index, rights)

    def allow(self, region: Region, index: int, rights: Access) -> None:
        """Change the rights of one device in a region that is not a multicast mapping."""
        table = MACHINE.devices[index].table
        before = region.access.get(index, Access.NONE)
        if before == rights:
            return
        with ENGINE.turn:
            if before:
                table.remove(region.base)
            if rights:
                local = region.device is not None and region.device.index == index
                kind = Kind.HOST if region.host else Kind.LOCAL if local else Kind.REMOTE
                table.add(region.base, region.size, kind, rights, key=self._key(region))
                region.access[index] = rights
            else:
                region.access.pop(index, None)

    @staticmethod
    def _key(region: Region) -> int:
        if region.mapping is not None:
            return int(region.mapping.object.key)
        return (1 << 63) | region.number << 20

    def remove(self, region: Region) -> None:
        """Forget a region and take all rights."""
        with ENGINE.turn:
            MACHINE.fabric.drain_range(region.base, region.size)
            for index in list(region.access):
                self.allow(region, index, Access.NONE)
            self._bases.remove(region.base)
            del self._regions[region.base]

    def welcome(self, device: Device) -> None:
        """A new device sees what every device sees: pinned host memory."""
        for region in self._regions.values():
            if region.host:
                local = region.access
                if device.index not in local:
                    device.table.add(region.base, region.size, Kind.HOST, Access.READ_WRITE, key=self._key(region))
                    local[device.index] = Access.READ_WRITE

    def peer_access(self, device: Device, peer: Device, on: bool) -> None:
        """Let ``device`` touch the plain allocations of ``peer``, or not."""
        for region in list(self._regions.values()):
            if region.device is peer and region.mapping is None:
                self.allow(region, device.index, Access.READ_WRITE if on else Access.NONE)

    # Allocations

    def allocate(self, context: Context, size: int, *, host: bool = False) -> Region:
        """Memory of the context's device, or pinned memory of the host."""
        device = context.device
        if not host and device.used + size > CONFIG.memory:
            refuse(
                result.CUDA_ERROR_OUT_OF_MEMORY,
                f"{size} bytes on device {device.index}, which has {CONFIG.memory - device.used} left",
            )
        self._settle(context)
        taken = max(mapping.PAGE, 1 << (size - 1).bit_length()) if size < 1 << 20 else -(-size // 4096) * 4096
        free = self._free.get(taken)
        if free:
            base = free.pop()
            self._pooled -= taken
        else:
            try:
                base = mapping.map_anonymous(taken)
            except OSError as error:
                refuse(result.CUDA_ERROR_OUT_OF_MEMORY, str(error))
        region = Region(base, size, None if host else device, host=host)
        region.taken, region.context = taken, context
        if host:
            access = {other.index: Access.READ_WRITE for other in MACHINE.devices}
        else:
            device.used += size
            access = {device.index: Access.READ_WRITE}
            for other in MACHINE.devices:
                if other.context is not None and device.index in other.context.peers:
                    access[other.index] = Access.READ_WRITE
        self.add(region, access)
        context.regions.add(region)
        return region

    def variable(self, context: Context, size: int, alignment: int, constant: bool) -> Region:
        """Memory for a module's variable."""
        region = self.allocate(context, max(size, 1))
        assert region.base % max(alignment, 1) == 0
        return region

    def free(self, region: Region) -> None:
        """Free an allocation once nothing runs that may still use it; never waits."""
        context = region.context
        assert context is not None
        if region in context.regions:
            context.regions.discard(region)
            if region.device is not None:
                region.device.used -= region.size
            context.idle_work.append(lambda: self._give_back(region))
            if not ENGINE.turn.mine and ENGINE.turn.take(False):  # mine: from a finaliser in the middle of something
                try:
                    self._settle(context)
                finally:
                    ENGINE.turn.give()

    @staticmethod
    def _settle(context: Context) -> None:
        """Do what had to wait until nothing runs, if nothing does; with the turn held."""
        if context.idle_work and context.idle:
            work, context.idle_work = context.idle_work, []
            for free in work:
                free()

    def _give_back(self, region: Region) -> None:
        self.remove(region)
        if not region.taken:
            return  # registered memory is the caller's
        if self._pooled + region.taken <= _POOLED:
            self._pooled += region.taken
            self._free.setdefault(region.taken, []).append(region.base)
        else:
            mapping.unmap(region.base, region.taken)

    def release_all(self, context: Context) -> None:
        """A context ends: its allocations and modules go with it."""
        from . import modules
        from .streams import EVENTS

        for region in list(context.regions):
            self.free(region)
        self._settle(context)
        modules.forget(context)
        for number in [number for number, event in EVENTS.items() if event.context is context]:
            del EVENTS[number]

    # Objects

    def handle_of(self, number: Any) -> Handle:
        """The live handle of a number."""
        found = self.handles.get(int(number))
        if found is None:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"no allocation handle {int(number):#x} (released?)")
        return found

    def physical_of(self, number: Any) -> Physical:
        """The physical memory of a handle; refuses a multicast object."""
        thing = self.handle_of(number).object
        if not isinstance(thing, Physical):
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"handle {int(number):#x} is a multicast object, not memory")
        return thing

    def new_handle(self, thing: Physical | MulticastObject) -> Any:
        """A handle of this process for an object."""
        made = Handle(thing)
        self.handles[made.number] = made
        return cuda.CUmemGenericAllocationHandle(made.number)

    def adopt(self, fd: int) -> Physical:
        """The object of a descriptor that we own now; the same one if the process knows it already."""
        inode = os.fstat(fd).st_ino
        known = self.physicals.get(inode)
        if known is not None:
            mapping.close(fd)
            return known
        device, serial, types, size = (int(word) for word in name_of(fd).removeprefix(MEMORY_NAME).split())
        MACHINE.grow(device + 1)
        physical = self.physicals[inode] = Physical(fd, size, device, types, serial)
        return physical

    # Reports

    def outstanding(self) -> list[str]:
        """What has not been given back, a line each."""
        lines = [
            f"handle {number:#x} of {_describe(held.object)}"
            + (f" ({held.references} references)" if held.references > 1 else "")
            for number, held in self.handles.items()
        ]
        for reservation in self.reservations.values():
            lines.append(f"reservation of {reservation.size} bytes at {reservation.base:#x}")
            lines += [f"mapping of {_describe(m.object)} at {m.base:#x}" for m in reservation.mappings.values()]
        self.exported = {fd: inode for fd, inode in self.exported.items() if _inode_of(fd) == inode}
        return lines + [f"exported descriptor {fd}" for fd in self.exported]

    def explain(self, device: Device, address: int) -> str:
        """What we know of an address that a kernel should not have touched; begins with "; " or is empty."""
        region = self.region(address)
        if region is not None:
            whose = (
                "host memory" if region.host else f"memory of device {region.device.index if region.device else '?'}"
            )
            if device.index not in region.access:
                return f"; that is {whose}, to which device {device.index} has no access"
            return f"; that is {whose}, byte {address - region.base} of {region.size}"
        at = bisect_right(self.reserved, address) - 1
        if at >= 0:
            reservation = self.reservations[self.reserved[at]]
            if address < reservation.base + reservation.size:
                for m in reservation.mappings.values():
                    if m.base <= address < m.base + m.size:
                        if isinstance(m.object, Physical):
                            return "; that is mapped, but no access was set"
                        return f"; that is a multicast mapping: {m.object.state(address - m.base)}"
                return "; that is reserved, but nothing is mapped there"
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            near = self._regions[self._bases[at]]
            return f"; the nearest memory below has {near.size} bytes and ends {address - near.base - near.size} before"
        return ""


MEMORY: Final = Memory()


def _inode_of(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def _describe(thing: Any) -> str:
    if isinstance(thing, Physical):
        return f"{thing.size} bytes of device {thing.device}"
    return f"a multicast object of {thing.size} bytes"


def name_of(fd: int) -> str:
    """The name that we gave a memfd; refuses a descriptor that is none of ours."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a file")
        link = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"descriptor {fd}: {error}")
    name = link.removeprefix("/memfd:").removesuffix(" (deleted)")
    if not name.startswith((MEMORY_NAME, MULTICAST_NAME)):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"descriptor {fd} is no exported allocation")
    return name


def multiple(value: int, of: int, what: str) -> None:
    if value % of:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{what} is {value}, not a multiple of the granularity {of}")


def fabric_permitted(types: int) -> None:
    """FABRIC handles want an IMEX channel, whatever the attribute says."""
    if types & FABRIC and not CONFIG.fabric_handles:
        refuse(result.CUDA_ERROR_NOT_PERMITTED, "no IMEX channel: configure(fabric_handles=True) provides one")


def borrow(process: int, number: int, inode: int) -> int | None:
    """Open a descriptor of another process of this user; None if it is no longer the same object."""
    try:
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        return None
    return fd
