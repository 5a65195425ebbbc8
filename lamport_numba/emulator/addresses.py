"""What one emulated device may touch: a sorted table of address ranges that native code reads.

A device address *is* a host address. The table says for every range whose memory it is and what is allowed; whatever
is not in the
table is a fault. Each access site of a kernel remembers the entry that it hit last, so the table is searched rarely.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from .ptx import layout

__all__ = ["Access", "AddressTable", "Entry", "Kind", "Member"]


class Kind(IntEnum):
    """Whose memory an entry is."""

    LOCAL = layout.LOCAL  # this device's own
    REMOTE = layout.REMOTE  # another device's
    HOST = layout.HOST  # pinned host memory
    MULTICAST = layout.MULTICAST  # every member's, by multimem only


class Access(IntFlag):
    """What the device may do with an entry."""

    NONE = 0
    READ = layout.READ
    WRITE = layout.WRITE
    READ_WRITE = layout.READ | layout.WRITE


@dataclass(frozen=True)
class Member:
    """One device's memory behind a multicast range: its address in this process, and a number that names it (see
    `AddressTable.add`)."""

    address: int
    key: int = 0


@dataclass(frozen=True)
class Entry:
    """A range [base, end) of device addresses."""

    base: int
    end: int
    kind: Kind
    access: Access
    key: int = 0
    members: tuple[Member, ...] = ()


class AddressTable:
    """The address ranges of one device.

    It may be changed only while no grid of this device is inside `Grid.run`.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._lock = threading.RLock()  # a finaliser may free memory in the middle of a change
        self._bases: list[int] = []
        self._entries: list[Entry] = []
        self._records: list[bytes] = []  # the entries as native code reads them
        self._members: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._header = ctypes.create_string_buffer(layout.TABLE.size)
        self._block = ctypes.create_string_buffer(64 * layout.ENTRY.size)
        self.version = 0
        self._publish()

    @property
    def address(self) -> int:
        """Where native code finds the table."""
        return ctypes.addressof(self._header)

    def add(
        self,
        base: int,
        size: int,
        kind: Kind,
        access: Access = Access.READ_WRITE,
        *,
        key: int = 0,
        members: Sequence[Member] = (),
    ) -> Entry:
        """Add the range of ``size`` bytes at ``base``.

        ``key`` names the memory independently of where it happens to be mapped (device and offset, say): the
        adversarial fabric
        hashes it, so that a run is replayed exactly although addresses differ. ``members`` are the copies behind a
        MULTICAST range.

        Raises:
            ValueError: an empty range, an overlap, or members where there can be none.
        """
        if size <= 0 or base <= 0 or base + size > layout.SHARED_WINDOW:
            raise ValueError(f"range of {size} bytes at {base:#x}: expected a positive size at a host address")
        if bool(members) != (kind == Kind.MULTICAST):
            raise ValueError(
                f"{len(members)} members of a {kind.name} range: only MULTICAST ranges have members, and all of them do"
            )
        entry = Entry(base, base + size, Kind(kind), Access(access), key, tuple(members))
        with self._lock:
            at = bisect_right(self._bases, base)
            for near in self._entries[max(at - 1, 0) : at + 1]:
                if near.base < entry.end and base < near.end:
                    raise ValueError(f"range [{base:#x}, {entry.end:#x}) overlaps [{near.base:#x}, {near.end:#x})")
            self._bases.insert(at, base)
            self._entries.insert(at, entry)
            self._records.insert(at, self._record(entry))
            self._publish()
        return entry

    def remove(self, base: int) -> Entry:
        """Remove the range that begins at ``base``, and return it."""
        with self._lock:
            at = self._index(base)
            del self._bases[at]
            entry = self._entries.pop(at)
            del self._records[at]
            self._members.pop(base, None)
            self._publish()
        return entry

    def protect(self, base: int, access: Access) -> None:
        """Change the rights of the range that begins at ``base``."""
        with self._lock:
            at = self._index(base)
            old = self._entries[at]
            entry = self._entries[at] = Entry(old.base, old.end, old.kind, Access(access), old.key, old.members)
            self._records[at] = self._record(entry)
            self._publish()

    def find(self, address: int) -> Entry | None:
        """The entry that holds ``address``, or None."""
        with self._lock:
            at = bisect_right(self._bases, address) - 1
            return self._entries[at] if at >= 0 and address < self._entries[at].end else None

    def check(self, address: int, size: int, access: Access) -> str | None:
        """Say why ``size`` bytes at ``address`` may not be accessed so by a copy; None if they may. Adjacent ranges
        count as one."""
        at, end = address, address + size
        while at < end:
            entry = self.find(at)
            if entry is None:
                return f"{layout.FAULTS[layout.F_ADDRESS]} {at:#x}"
            if entry.kind == Kind.MULTICAST:
                return f"{layout.FAULTS[layout.F_MULTICAST]} {at:#x}"
            if access & ~entry.access:
                return f"{layout.FAULTS[layout.F_ACCESS]} at {at:#x}"
            at = entry.end
        return None

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def _index(self, base: int) -> int:
        at = bisect_right(self._bases, base) - 1
        if at < 0 or self._bases[at] != base:
            raise ValueError(f"no range begins at {base:#x}")
        return at

    def _publish(self) -> None:
        """Write all entries where native code reads them; the version makes the sites' memories stale."""
        records = b"".join(self._records)
        if len(records) > len(self._block):
            self._block = ctypes.create_string_buffer(2 * len(records))
        ctypes.memmove(self._block, records, len(records))
        self.version += 1
        layout.TABLE.packer.pack_into(self._header, 0, len(self._entries), self.version, ctypes.addressof(self._block))

    def _record(self, e: Entry) -> bytes:
        fields = (e.base, e.end, e.kind, e.access, e.key, self._member_block(e), len(e.members), 0)
        return layout.ENTRY.packer.pack(*fields).ljust(layout.ENTRY.size, b"\0")

    def _member_block(self, entry: Entry) -> int:
        if not entry.members:
            return 0
        block = self._members.get(entry.base)
        if block is None:
            record = layout.MEMBER
            block = ctypes.create_string_buffer(len(entry.members) * record.size)
            for i, member in enumerate(entry.members):
                record.packer.pack_into(block, i * record.size, member.address, member.key)
            self._members[entry.base] = block
        return ctypes.addressof(block)
