"""Multicast objects, across threads and processes, strict about every rule.

A multicast object is a memfd that holds a small table: which devices were added, what is bound where. Its descriptor
travels like that of memory. A writer holds a file lock, which the kernel drops when a process dies, and commits each
record by one word, so a death in the middle leaves a table that can be read. Memory that another process has bound is
mapped through /proc/<pid>/fd, when a kernel is about to write to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Final

from . import faults, mapping
from .config import CONFIG
from .core import address_of, api, refuse, result
from .engine import ENGINE
from .grid import Access, Kind, Member
from .machine import MACHINE, Device, device_of
from .memory import (
    FABRIC,
    MEMORY,
    MULTICAST_NAME,
    POSIX,
    Mapping,
    Physical,
    borrow,
    fabric_permitted,
    multiple,
    name_of,
)

__all__ = ["Bind", "MulticastMapping", "MulticastObject", "live_binds"]

_TEAM: Final = 256  # devices that a table has room for
_BINDS: Final = 1024
_FREE, _LIVE, _DEAD = 0, 1, 2  # dead: the memory was freed while it was bound


class _Added(ctypes.Structure):
    _fields_: ClassVar = [("state", ctypes.c_uint32), ("device", ctypes.c_uint32)]


class _Bound(ctypes.Structure):
    _fields_: ClassVar = [
        ("state", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("process", ctypes.c_uint32),
        ("descriptor", ctypes.c_int32),
        ("inode", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("memory_offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("number", ctypes.c_uint64),  # of this bind among all of the object's: a slot may be used again
    ]


class _Table(ctypes.Structure):
    _fields_: ClassVar = [
        ("version", ctypes.c_uint64),  # moves on after every change
        ("numbers", ctypes.c_uint64),
        ("added", _Added * _TEAM),
        ("binds", _Bound * _BINDS),
    ]


_TABLE_BYTES: Final = -(-ctypes.sizeof(_Table) // mapping.PAGE) * mapping.PAGE


class Bind:
    """Memory that this process has bound. ``freed``: it was freed before it was unbound."""

    def __init__(self, owner: MulticastObject, slot: int, physical: Physical, offset: int, size: int) -> None:
        self.owner = owner
        self.slot = slot
        self.physical = physical
        self.device = physical.device
        self.offset = offset
        self.size = size
        self._freed = False

    @property
    def freed(self) -> bool:
        return self._freed

    @freed.setter
    def freed(self, value: bool) -> None:
        self._freed = value
        with self.owner.locked() as table:
            table.binds[self.slot].state = _DEAD


class MulticastObject:
    """One multicast object as this process knows it. ``team``: how many devices it is for."""

    known: ClassVar[dict[int, MulticastObject]] = {}

    def __init__(self, fd: int, team: int, size: int, types: int, *, imported: bool) -> None:
        self.fd = fd
        self.team = team
        self.size = size
        self.types = types
        self.imported = imported
        self.inode = os.fstat(fd).st_ino
        self.key = 0
        self.references = 0
        self.binds: list[Bind] = []  # of this process
        # A descriptor that came by SCM_RIGHTS shares its locks with the sender's; this one is ours alone.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._address = mapping.map_shared(fd, _TABLE_BYTES)
        self.table = _Table.from_address(self._address)
        MulticastObject.known[self.inode] = self

    @classmethod
    def create(cls, team: int, size: int, types: int) -> MulticastObject:
        """A new object, without devices."""
        return cls(
            mapping.make_memfd(f"{MULTICAST_NAME}{team} {types} {size}", _TABLE_BYTES),
            team,
            size,
            types,
            imported=False,
        )

    @classmethod
    def adopt(cls, fd: int) -> MulticastObject:
        """The object of a descriptor that we own now; the same one if the process knows it already."""
        known = cls.known.get(os.fstat(fd).st_ino)
        if known is not None:
            mapping.close(fd)
            return known
        team, types, size = (int(word) for word in name_of(fd).removeprefix(MULTICAST_NAME).split())
        return cls(fd, team, size, types, imported=True)

    def take(self) -> None:
        """One more reference."""
        self.references += 1

    def drop(self) -> None:
        """One reference less; the last one ends the object in this process."""
        self.references -= 1
        if self.references == 0:
            for bind in list(self.binds):
                bind.freed = True
                bind.physical.binds.discard(bind)
            self.binds.clear()
            MulticastObject.known.pop(self.inode, None)
            del self.table
            mapping.unmap(self._address, _TABLE_BYTES)
            mapping.close(self._lock_fd)
            mapping.close(self.fd)

    @contextmanager
    def locked(self) -> Iterator[_Table]:
        """Hold the table against all threads and processes; the version moves on at the end."""
        with self._thread_lock:
            self._depth += 1
            if self._depth == 1:
                self._lock()
            try:
                yield self.table
                self.table.version += 1
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        end = time.monotonic() + CONFIG.multicast_wait
        while not self._try_lock():
            if time.monotonic() > end:  # its holder was stopped
                self._depth -= 1
                refuse(result.CUDA_ERROR_TIMEOUT, "a stopped process holds the multicast object")
            time.sleep(0.0005)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def devices(self) -> list[int]:
        """Indices of the devices that were added, in that order."""
        return [entry.device for entry in self.table.added[: self.team] if entry.state == _LIVE]

    def has(self, device: Device) -> bool:
        """Whether the device is of the team."""
        return device.index in self.devices()

    def bound(self) -> list[_Bound]:
        """The live records, of all processes."""
        return [entry for entry in self.table.binds if entry.state == _LIVE]

    def await_team(self, call: str) -> None:
        """Block until all devices are added: for a bounded time, where hardware would block for ever."""

        def complete() -> bool:
            return bool(self.table.added[self.team - 1].state == _LIVE)

        limit = CONFIG.multicast_wait
        baton = ENGINE.baton
        if baton is not None and baton.seated:
            baton.wait(complete, limit)
        else:
            end, nap = time.monotonic() + limit, 0.0002
            while not complete() and time.monotonic() < end:
                time.sleep(nap)
                nap = min(nap * 2, 0.005)
        if not complete():
            text = f"deadlock: {len(self.devices())} of {self.team} devices added"
            print(f"emulated device: {call} blocked for {limit:g} s; {text}", file=sys.stderr)
            refuse(result.CUDA_ERROR_TIMEOUT, text)  # undocumented: hardware never comes back

    def state(self, offset: int) -> str:
        """What is bound at an offset, in words."""
        bound = sorted(b.device for b in self.bound() if b.offset <= offset < b.offset + b.size)
        missing = sorted(set(self.devices()) - set(bound))
        if missing:
            return f"at offset {offset} nothing is bound by device {', '.join(map(str, missing))}"
        return f"at offset {offset} devices {', '.join(map(str, bound))} are bound"


class MulticastMapping:
    """A multicast object at an address, as one device reaches it: entries in its table that follow the binds."""

    def __init__(self, mapped: Mapping, device: Device, access: Access) -> None:
        assert isinstance(mapped.object, MulticastObject)
        self.mapping = mapped
        self.device = device
        self.access = access
        self.object = mapped.object
        self._seen = -1
        self._entries: list[int] = []
        self._windows: dict[int, tuple[int, int]] = {}  # by number of the bind: address and size
        device.multicasts.append(self)
        self.follow()

    def follow(self) -> None:
        """Bring the entries up to date, if anything was bound or unbound since."""
        if self.object.table.version != self._seen:
            with ENGINE.turn, self.object._thread_lock:
                self._refresh()

    def end(self) -> None:
        """The mapping or its rights are gone."""
        with ENGINE.turn:
            self._clear()
            for window in self._windows.values():
                self._close(window)
            self._windows.clear()
            self.device.multicasts.remove(self)

    def _clear(self) -> None:
        for base in self._entries:
            self.device.table.remove(base)
        self._entries.clear()

    def _refresh(self) -> None:
        self._seen = self.object.table.version
        self._clear()
        team, bound = sorted(self.object.devices()), self.object.bound()
        size = self.mapping.size
        cuts = sorted({0, size, *(b.offset for b in bound), *(b.offset + b.size for b in bound)})
        used = set()
        for start, end in pairwise(cuts):
            if start >= size:
                break
            here = sorted((b for b in bound if b.offset <= start < b.offset + b.size), key=_device_of_bind)
            if [b.device for b in here] != team or len(team) < self.object.team:
                continue  # a store would miss somebody: no entry, so it is a fault
            members = []
            for b in here:
                used.add(b.number)
                at = start - b.offset
                members.append(Member(self._window(b) + at, b.key + b.memory_offset + at))
            base = self.mapping.base + start
            self.device.table.add(base, end - start, Kind.MULTICAST, self.access, members=members)
            self._entries.append(base)
        for number in set(self._windows) - used:
            self._close(self._windows.pop(number))

    def _window(self, bound: _Bound) -> int:
        """The bound memory, mapped into this process."""
        known = self._windows.get(bound.number)
        if known is None:
            fd = borrow(bound.process, bound.descriptor, bound.inode)
            if fd is None:  # its process died: what is stored there goes nowhere
                known = (mapping.map_anonymous(bound.size), bound.size)
            else:
                known = (mapping.map_shared(fd, bound.size, bound.memory_offset), bound.size)
                mapping.close(fd)
            self._windows[bound.number] = known
        return known[0]

    @staticmethod
    def _close(window: tuple[int, int]) -> None:
        MACHINE.fabric.drain_range(*window)
        mapping.unmap(*window)


def _device_of_bind(bound: _Bound) -> int:
    return int(bound.device)


def live_binds() -> list[str]:
    """What this process has bound and not unbound, a line each."""
    return [
        f"binding of {bind.size} bytes of device {bind.device} at offset {bind.offset} of a multicast object"
        for owner in MulticastObject.known.values()
        for bind in owner.binds
    ]


def _object_of(number: Any) -> MulticastObject:
    thing = MEMORY.handle_of(number).object
    if not isinstance(thing, MulticastObject):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"handle {int(number):#x} is memory, not a multicast object")
    return thing


def _supported() -> None:
    if not MACHINE.initialised:
        refuse(result.CUDA_ERROR_NOT_INITIALIZED)
    if not CONFIG.multicast_supported:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "this machine has no multicast (configure(multicast_supported=True))")


def _check_prop(prop: Any) -> tuple[int, int, int]:
    if prop is None or int(prop.size) <= 0 or int(prop.numDevices) <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, "size, numDevices and handleTypes are to be filled in first")
    if int(prop.numDevices) > _TEAM:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{int(prop.numDevices)} devices; at most {_TEAM}")
    if int(prop.flags) != 0 or int(prop.handleTypes) & ~(POSIX | FABRIC):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {int(prop.flags)}, handle types {int(prop.handleTypes):#x}")
    return int(prop.numDevices), int(prop.size), int(prop.handleTypes)


@api(1)
def cuMulticastGetGranularity(prop: Any, option: Any) -> int:
    _supported()
    _check_prop(prop)
    return CONFIG.multicast_recommended if int(option) == 1 else CONFIG.multicast_granularity


@api(1)
def cuMulticastCreate(prop: Any) -> Any:
    _supported()
    team, size, types = _check_prop(prop)
    multiple(size, CONFIG.multicast_granularity, "size")
    fabric_permitted(types)
    with MACHINE.lock:
        return MEMORY.new_handle(MulticastObject.create(team, size, types))


@api()
def cuMulticastAddDevice(mcHandle: Any, dev: Any) -> None:
    _supported()
    thing, device = _object_of(mcHandle), device_of(dev)
    with thing.locked() as table:
        devices = thing.devices()
        if device.index in devices:  # undocumented: which error
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"device {device.index} was added already")
        if len(devices) == thing.team:  # undocumented: which error
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"all {thing.team} devices were added already")
        entry = table.added[len(devices)]
        entry.device = device.index
        entry.state = _LIVE  # the commit: a death before it leaves nothing


def _bind(thing: MulticastObject, offset: int, physical: Physical, memory_offset: int, size: int, flags: int) -> None:
    if flags != 0 or size <= 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"size {size}, flags {flags}; expected a positive size and flags 0")
    for value, what in ((offset, "mcOffset"), (memory_offset, "memOffset"), (size, "size")):
        multiple(value, CONFIG.multicast_granularity, what)
    if offset + size > thing.size or memory_offset + size > physical.size:
        refuse(
            result.CUDA_ERROR_INVALID_VALUE,
            f"{size} bytes at {offset} of {thing.size} and at {memory_offset} of {physical.size}: outside an object",
        )
    if (thing.types or thing.imported) and not physical.types:
        refuse(result.CUDA_ERROR_INVALID_VALUE, "a shareable multicast object takes shareable memory only")
    thing.await_team("cuMulticastBindMem")
    if physical.device not in thing.devices():
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"device {physical.device} of the memory is not of the multicast team")
    _slots(thing, physical.device)
    with thing.locked() as table:
        free = None
        for slot, entry in enumerate(table.binds):
            if entry.state == _FREE:
                free = slot if free is None else free
                if entry.number == 0:
                    break  # nothing was ever bound from here on
            elif entry.state == _LIVE and entry.device == physical.device and _overlap(entry, offset, size):
                refuse(
                    result.CUDA_ERROR_INVALID_VALUE,
                    f"device {entry.device} has {entry.size} bytes bound at {entry.offset} already",
                )
        if free is None:
            refuse(result.CUDA_ERROR_OUT_OF_MEMORY, f"{_BINDS} binds of one object")
        table.numbers += 1
        entry = table.binds[free]
        entry.device, entry.process, entry.descriptor = physical.device, os.getpid(), physical.fd
        entry.inode, entry.offset, entry.memory_offset, entry.size = physical.inode, offset, memory_offset, size
        entry.key, entry.number = physical.key, table.numbers
        entry.state = _LIVE
        bind = Bind(thing, free, physical, offset, size)
        thing.binds.append(bind)
        physical.binds.add(bind)


def _overlap(entry: _Bound, offset: int, size: int) -> bool:
    return bool(entry.offset < offset + size and offset < entry.offset + entry.size)


def _slots(thing: MulticastObject, device: int) -> None:
    taken = [o for o in MulticastObject.known.values() if any(bind.device == device for bind in o.binds)]
    if thing not in taken and len(taken) >= CONFIG.multicast_slots:
        refuse(result.CUDA_ERROR_OUT_OF_MEMORY, f"all {CONFIG.multicast_slots} multicast slots are taken")


@api()
def cuMulticastBindMem(mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int) -> None:
    _supported()
    _bind(_object_of(mcHandle), mcOffset, MEMORY.physical_of(memHandle), memOffset, size, flags)


@api()
def cuMulticastBindMem_v2(
    mcHandle: Any, dev: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
) -> None:
    _supported()
    physical = MEMORY.physical_of(memHandle)
    if device_of(dev).index != physical.device:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "binding memory for a device other than its own is not emulated")
    _bind(_object_of(mcHandle), mcOffset, physical, memOffset, size, flags)


@api()
def cuMulticastBindAddr(mcHandle: Any, mcOffset: int, memptr: Any, size: int, flags: int) -> None:
    _supported()
    region = MEMORY.region(address_of(memptr))
    if region is None or region.mapping is None or not isinstance(region.mapping.object, Physical):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address_of(memptr):#x} is not mapped from cuMemCreate's memory")
    _bind(_object_of(mcHandle), mcOffset, region.mapping.object, address_of(memptr) - region.base, size, flags)


@api()
def cuMulticastUnbind(mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
    _supported()
    thing, device = _object_of(mcHandle), device_of(dev)
    with thing.locked() as table:
        for bind in thing.binds:
            if (bind.device, bind.offset, bind.size) == (device.index, mcOffset, size):
                break
        else:
            refuse(
                result.CUDA_ERROR_INVALID_VALUE,
                f"device {device.index} has bound nothing of {size} bytes at {mcOffset}; give what the bind had",
            )
        table.binds[bind.slot].state = _FREE
        thing.binds.remove(bind)
        bind.physical.binds.discard(bind)
    if bind.freed:
        text = "an earlier cuMulticastUnbind failed: the memory was freed before it was unbound"
        faults.poison(result.CUDA_ERROR_INVALID_VALUE, text)  # undocumented: which call, which error
        refuse(result.CUDA_ERROR_INVALID_VALUE, "the memory was freed before it was unbound")
