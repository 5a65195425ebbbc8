"""A grid in flight on one emulated device."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .addresses import Access, AddressTable, Entry, Kind, Member
from .fabric import Fabric
from .ptx import layout

if TYPE_CHECKING:
    from .ptx import Kernel

__all__ = ["Access", "AddressTable", "Entry", "Fabric", "Fault", "Grid", "Kind", "Member", "Status"]


class Status(IntEnum):
    """What `Grid.run` came back with."""

    RUNNING = layout.RUNNING  # the quantum is used up
    STALLED = layout.STALLED  # a whole pass in which no lane got anywhere
    FINISHED = layout.FINISHED
    FAULTED = layout.FAULTED


_STATUS = tuple(Status)


@dataclass(frozen=True)
class Fault:
    """What a thread did that the hardware would not allow."""

    kind: str
    kernel: str
    line: int
    text: str  # the PTX line
    ctaid: tuple[int, int, int]
    tid: tuple[int, int, int]
    address: int | None
    size: int

    def __str__(self) -> str:
        where = f" {self.address:#x} ({self.size} bytes)" if self.address is not None else ""
        return (
            f"{self.kind}{where}: kernel {self.kernel}, CTA {self.ctaid}, thread {self.tid}, "
            f"PTX line {self.line}: {self.text.strip()}"
        )


_POOLED = 64 << 20  # a block with more bytes of slots is not kept for the next grid
_PARAMS_AT = layout.GRID.size + -layout.GRID.size % 64
_SEQUENCE_AT = layout.GRID.offsets["sequence"]
_ORDER_AT = layout.GRID.offsets["order_step"]
_STEPS_AT = layout.GRID.offsets["steps"]
_FAULT = struct.Struct("=6IQI")


class _Block:
    """The native memory of one grid; used again by a later grid of the same kernel and shape.

    One mapping holds the header, the parameters and the memories of the access sites; others hold the CTAs' slots.
    """

    def __init__(
        self, kernel: Kernel, block: tuple[int, int, int], shared_bytes: int, frame_bytes: int, adversarial: bool
    ) -> None:
        self.shape = (block, shared_bytes, frame_bytes, adversarial)
        self.warps = -(-block[0] * block[1] * block[2] // layout.WARP_SIZE)
        self.lanes_at = layout.lanes_at(self.warps)
        self.shared_at = _up(self.lanes_at + self.warps * layout.WARP_SIZE * frame_bytes, 128)
        self.buffers_at = _up(self.shared_at + shared_bytes, 16)
        buffers, orphans = (n * layout.WORD.size * adversarial for n in (layout.BUFFER_LENGTH, layout.ORPHANS))
        self.slot_bytes = _up(self.buffers_at + buffers + 16, 128)
        self.caches_at = _up(_PARAMS_AT + kernel.param_bytes, 64)
        self.caches_bytes = layout.CACHE.size * len(kernel.sites)
        orphans_at = _up(self.caches_at + self.caches_bytes, 64)
        self.memory = mmap.mmap(-1, orphans_at + orphans + 64)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.orphans = self.address + orphans_at
        self.cast: tuple[Any, ...] = ()  # what the last grid in this block was, and its header as it began
        self.header = b""
        self.seen: int | None = None  # the table, and its version, that the sites remember
        self.table: AddressTable | None = None
        self.slots: ctypes.Array[ctypes.c_uint64] = (ctypes.c_uint64 * 0)()
        self.chunks: list[mmap.mmap] = []

    def grow(self, slots: int) -> None:
        """Have at least this many slots."""
        have = len(self.slots)
        more = max(slots - have, min(have, 64), 1)
        chunk = mmap.mmap(-1, more * self.slot_bytes)
        self.chunks.append(chunk)
        base = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        self.slots = (ctypes.c_uint64 * (have + more))(*self.slots, *(base + i * self.slot_bytes for i in range(more)))

    def forget(self, table: AddressTable) -> None:
        """Make every access site search anew, if the table is not what the sites remember."""
        if self.table is not table or self.seen != table.version:
            self.memory[self.caches_at : self.caches_at + self.caches_bytes] = bytes(self.caches_bytes)
            self.table, self.seen = table, table.version

    def get(self, name: str) -> int:
        """A 32-bit field of the header."""
        at = layout.GRID.offsets[name]
        return int.from_bytes(self.memory[at : at + 4], "little")

    def put(self, name: str, value: int) -> None:
        at = layout.GRID.offsets[name]
        self.memory[at : at + 4] = value.to_bytes(4, "little")


def _up(value: int, multiple: int) -> int:
    return value + -value % multiple


_sequence = itertools.count(1)


class Grid:
    """One launch of a kernel.

    Args:
        kernel: from `ptx.load`.
        table: the device's addresses.
        grid, block: extents (x, y, z).
        shared_bytes: dynamic shared memory of a CTA; the kernel's static part comes on top.
        params: the parameter block as `Kernel.params` lays it out.
        fabric: how its stores travel.
        released: whether ``griddepcontrol.wait`` passes from the start.
        variables: addresses of the module's variables, from `Module.place`; needed only where there are any.
    """

    def __init__(
        self,
        kernel: Kernel,
        table: AddressTable,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        fabric: Fabric,
        *,
        released: bool = True,
        variables: ctypes.Array[ctypes.c_uint64] | None = None,
    ) -> None:
        threads = block[0] * block[1] * block[2]
        total = grid[0] * grid[1] * grid[2]
        if min(*grid, *block) < 1 or threads > kernel.max_threads or total >= 1 << 31:
            raise ValueError(
                f"grid {grid} of blocks {block}: expected positive extents, "
                f"and at most {kernel.max_threads} threads a block"
            )
        if shared_bytes < 0 or len(params) < kernel.param_bytes:
            raise ValueError(
                f"{shared_bytes} bytes of shared memory and {len(params)} of parameters: "
                f"kernel {kernel.name} takes {kernel.param_bytes} bytes of parameters"
            )
        if kernel.uses_variables and variables is None:
            raise ValueError(f"kernel {kernel.name} uses variables of its module, whose addresses are missing")
        self.kernel = kernel
        self.table = table
        self.fabric = fabric
        self.total = total
        self.dimensions = block
        self._code = kernel.native(fabric.is_adversarial)
        self._run = self._code.run
        self._variables = variables
        self._fault: Fault | None = None
        self._status: Status | None = None
        self._final = (0, False, 0)  # resident, triggered and steps once the block is given back
        shape = (block, kernel.shared_bytes + shared_bytes, self._code.frame_bytes, fabric.is_adversarial)
        b = self._take_block(shape)
        self._block: _Block | None = b
        b.forget(table)
        b.memory[_PARAMS_AT : _PARAMS_AT + kernel.param_bytes] = params[: kernel.param_bytes]
        self._high = min(len(b.slots), total)  # slots to look at; those beyond `ctas` stay empty
        cast = (grid, table, variables, fabric, self._high)
        if b.cast == cast:
            b.memory[: layout.GRID.size] = b.header
        else:
            self._write_header(b, grid, block, shape)
            b.cast, b.header = cast, b.memory[: layout.GRID.size]
        if fabric.is_adversarial and total > 1:
            self._shuffle(b)
        b.memory[_SEQUENCE_AT : _SEQUENCE_AT + 8] = next(_sequence).to_bytes(8, "little")
        if not released:
            b.put("released", 0)

    def _write_header(
        self,
        b: _Block,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shape: tuple[tuple[int, int, int], int, int, bool],
    ) -> None:
        """Write the header as every grid of this shape begins; number, ``released`` and a drawn order come after."""
        kernel, table, fabric, total, variables = self.kernel, self.table, self.fabric, self.total, self._variables
        threads = block[0] * block[1] * block[2]
        layout.GRID.packer.pack_into(
            b.memory,
            0,
            *(b.address + _PARAMS_AT, ctypes.addressof(b.slots), b.address + b.caches_at),
            *(ctypes.addressof(variables) if variables is not None else 0, table.address, fabric.address),
            *(total, 0, 0, 0, 0, 1, 0, self._high),
            *block,
            *grid,
            *(threads, b.warps, b.lanes_at, shape[2], b.shared_at, shape[1], kernel.param_bytes, table.device),
            *(0, 0),
            *(0, 0, 0, 0, 0, 0, 0, 0, 0),
            *(b.orphans, 1, 0, 0, b.buffers_at, 0),
        )

    def _shuffle(self, b: _Block) -> None:
        """Draw the order in which CTAs are dispatched: its step and its start; else it is from 0 up."""
        drawn, step = divmod(self.fabric.draw(1 << 47), self.total)
        step += 1
        while math.gcd(step, self.total) != 1:
            step += 1
        start = drawn % self.total
        b.memory[_ORDER_AT : _ORDER_AT + 8] = (start << 32 | step).to_bytes(8, "little")

    def _take_block(self, shape: tuple[tuple[int, int, int], int, int, bool]) -> _Block:
        pool = self.kernel.pool
        for i in range(len(pool) - 1, -1, -1):
            if pool[i].shape == shape:
                try:
                    block: _Block = pool.pop(i)
                except IndexError:  # another thread was faster
                    break
                if block.shape == shape:
                    return block
        return _Block(self.kernel, *shape)

    def run(self, ctas: int, quantum: int) -> Status:
        """Run natively, without the GIL.

        Args:
            ctas: how many CTAs may be resident now; those that already are stay.
            quantum: about how many lane steps to take before coming back.
        """
        b = self._block
        if b is None:
            return self._status if self._status is not None else Status.FAULTED
        if ctas > self._high and self._high < self.total:
            self._high = min(ctas, self.total)
            if self._high > len(b.slots):
                b.cast = ()
                b.grow(self._high)
                at = layout.GRID.offsets["slots"]
                b.memory[at : at + 8] = ctypes.addressof(b.slots).to_bytes(8, "little")
            b.put("high", self._high)
        if b.seen != self.table.version:
            b.forget(self.table)
        status: int = self._run(b.address, ctas, quantum)
        if status >= layout.FINISHED:
            self._end(b, _STATUS[status])
        return _STATUS[status]

    def _end(self, b: _Block, status: Status) -> None:
        """Keep what may still be asked for, and give the block back (after a fault its slots are not clean)."""
        self._status = status
        self._final = (0, status == Status.FINISHED, self.steps)
        if status == Status.FAULTED:
            self._fault = self._read_fault(b)
        elif len(self.kernel.pool) < 16 and len(b.slots) * b.slot_bytes < _POOLED:
            self.kernel.pool.append(b)
        self._block = None

    def _read_fault(self, b: _Block) -> Fault:
        at = layout.GRID.offsets["fault_kind"]
        kind, site, lane, x, y, z, address, size = _FAULT.unpack_from(b.memory, at)
        line = self.kernel.sites[site][0] if site < len(self.kernel.sites) and kind != layout.F_STOPPED else 0
        dx, dy, _ = self.dimensions
        tid = (lane % dx, lane // dx % dy, lane // (dx * dy))
        return Fault(
            kind=layout.FAULTS[kind],
            kernel=self.kernel.name,
            line=line,
            text=self.kernel.line_text(line),
            ctaid=(x, y, z),
            tid=tid,
            address=address if size else None,
            size=size,
        )

    @property
    def resident(self) -> int:
        """CTAs that hold a slot now."""
        b = self._block
        return b.get("resident") if b is not None else self._final[0]

    @property
    def triggered(self) -> bool:
        """Whether every CTA has called ``griddepcontrol.launch_dependents`` or exited."""
        b = self._block
        return b.get("triggered") == self.total if b is not None else self._final[1]

    @property
    def steps(self) -> int:
        """Lane steps taken so far."""
        b = self._block
        if b is None:
            return self._final[2]
        return int.from_bytes(b.memory[_STEPS_AT : _STEPS_AT + 8], "little")

    def release(self) -> None:
        """Let ``griddepcontrol.wait`` pass from now on."""
        b = self._block
        if b is not None:
            b.put("released", 1)

    @property
    def fault(self) -> Fault | None:
        """What went wrong, after FAULTED."""
        return self._fault

    def abort(self) -> None:
        """Give the grid up: nothing of it runs again.

        From another thread it ends a `run` within a pass (answer FAULTED, fault "stopped").
        """
        b = self._block
        if b is not None:
            b.put("stop", 1)
