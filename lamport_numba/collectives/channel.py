"""A channel: one transport's mailbox, the device state beside it, and the kernel that serves both.

Kernels of two transports advance different generation words, so they never share a mailbox: an all-gather that uses
two transports has two channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..driver import Driver, structs
from ..errors import DriverError
from ..symmetric.communicator import Communicator
from ..symmetric.memory import SymmetricMemory
from .launch import Block, Kernel, load, wide
from .reports import CONTROL_BYTES, LEFT, Report, control_bytes, error_of, left, parse, report_offset

__all__ = ["Channel", "LamportChannel", "Plan", "RowChannel"]

PACK_BYTES = 16
SENTINEL = 0x80000000
_WARP = 32
_NO_CALL = 0xFFFFFFFF  # the number of the current call before there is one

_bound: list[SymmetricMemory] = []  # of objects that were left; their finalisers run at exit


@dataclass(frozen=True)
class Plan:
    """What the channels of one all-gather have in common. Capacity in packs, timeout in seconds."""

    capacity: int
    timeout: float
    share_device: bool
    pdl: bool
    host_alarm: int


class Channel:
    """Base of the channels: symmetric memory that begins with the control block, and a device allocation of our own.

    Construction is collective. The device's primary context is current in every method.
    """

    unit: ClassVar[int] = PACK_BYTES  # sizes of calls are multiples of it, and the kernel counts in it; in bytes
    generations: ClassVar[int]  # how many times the mailbox exists

    def __init__(self, comm: Communicator, drv: Driver, device: int, transport: str, plan: Plan) -> None:
        self.comm = comm
        self.drv = drv
        self.device = device
        self.transport = transport
        self.plan = plan
        self.rank, self.world = comm.rank, comm.size
        self.state = 0
        self._scratch = 0  # of the warm-up
        self._side: Any = None
        self.memory = SymmetricMemory(
            comm,
            drv,
            device,
            CONTROL_BYTES + self.mailbox_bytes(),
            multicast=transport == "multicast",
            share_device=plan.share_device,
        )
        mine = self.memory.survey.mine.uuid
        self._sharers = sum(facts.uuid == mine for facts in self.memory.survey.ranks)
        error = self._failure_of(self._prepare)
        try:
            comm.vote("fill the mailbox", error)  # nobody may publish before every mailbox is filled (I9)
            comm.vote("warm up", self._failure_of(self.warm_up))
        except Exception:
            self.abandon()
            raise

    @staticmethod
    def _failure_of(step: Callable[[], None]) -> Exception | None:
        try:
            step()
        except Exception as failure:
            return failure
        return None

    def _prepare(self) -> None:
        call = self.drv.call
        self._side = call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.state = self.drv.allocate("cuMemAlloc", self.state_bytes())
        call("cuMemsetD32Async", self.memory.local, 0, CONTROL_BYTES // 4, self._side)
        call("cuMemsetD32Async", self.state, 0, self.state_bytes() // 4, self._side)
        self.fill()
        self.load()
        nbytes = self.plan.capacity * PACK_BYTES
        self._scratch = self.drv.allocate("cuMemAlloc", nbytes * (1 + self.world))
        call("cuMemsetD8Async", self._scratch, 0, nbytes, self._side)
        self._first = self.block(self._scratch, self._scratch + nbytes, nbytes, 0, int(self._side))
        call("cuStreamSynchronize", self._side)

    def warm_up(self) -> None:
        """Touch every page once: one call of the whole capacity in each generation, which then do not count."""
        try:
            for _ in range(self.generations):
                self._first.launch()
            self.drv.call("cuStreamSynchronize", self._side)
            reports = self.reports()
            if reports:
                raise error_of(reports, self.rank)
            self.restart_calls()
        except DriverError:
            self.tell_left()  # the others' first call need not wait for the deadline
            raise
        finally:
            self._free_scratch()

    # What a kind of channel defines

    def mailbox_bytes(self) -> int:
        """Size of the mailbox, in bytes."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Size of the device state, in bytes, a multiple of 4. It starts as zeros."""
        raise NotImplementedError

    def fill(self) -> None:
        """Queue the mailbox's first contents on the side stream."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the kernels."""
        raise NotImplementedError

    def block(self, source: int, target: int, nbytes: int, code: int, stream: int) -> Block:
        """A packed launch of the call that gathers ``nbytes`` bytes at ``source`` into ``target``."""
        raise NotImplementedError

    def skip(self, stream: int) -> None:
        """Count a call that this rank refused."""
        raise NotImplementedError

    def skip_at_once(self) -> None:
        """The same where no call is queued or running: it is counted on return."""
        self.skip(int(self._side))
        self.drv.call("cuStreamSynchronize", self._side)

    def calls(self) -> int:
        """How many calls the device has completed or counted. Waits for nothing: synchronise first."""
        raise NotImplementedError

    def progress(self) -> tuple[int, bool]:
        """``calls()``, and whether one more is certainly under way."""
        return self.calls(), False

    def restart_calls(self) -> None:
        """Count the calls from 0 again; none is under way."""
        raise NotImplementedError

    # The same for all

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy device memory to the host, beside whatever the other streams do."""
        into = ctypes.create_string_buffer(nbytes)
        self.drv.call("cuMemcpyDtoHAsync", ctypes.addressof(into), address, nbytes, self._side)
        self.drv.call("cuStreamSynchronize", self._side)
        return into.raw

    def alarmed(self) -> bool:
        """Whether this rank's alarm is set, by a kernel of its own or by a peer."""
        return self.read(self.memory.local, 4) != b"\0\0\0\0"

    def reports(self) -> list[Report]:
        """What the ranks have reported, the root cause first."""
        return parse(self.read(self.memory.local, control_bytes(self.world)), self.world, self.unit)

    def silence(self) -> None:
        """Set this rank's alarm, so that its kernels leave soon; nobody else is told."""
        if self._side is not None:
            self.drv.call("cuMemsetD32Async", self.memory.local, 1, 1, self._side)
            self.drv.call("cuStreamSynchronize", self._side)

    def tell_left(self) -> None:
        """Report to every other rank that this one leaves, and set their alarms, unless they know of a failure."""
        if self._side is None or self.alarmed():
            return
        report = left(self.rank, self.calls())
        peers = [self.memory.address(rank) for rank in range(self.world) if rank != self.rank]
        for peer in peers:
            self.drv.call("cuMemcpyHtoDAsync", peer + report_offset(self.rank), report, len(report), self._side)
        self.drv.call("cuStreamSynchronize", self._side)  # as in the kernels: no kind before the rest
        for peer in peers:
            self.drv.call("cuMemsetD32Async", peer + report_offset(self.rank), LEFT, 1, self._side)
        self.drv.call("cuStreamSynchronize", self._side)  # no alarm before its report
        for peer in peers:
            self.drv.call("cuMemsetD32Async", peer, 1, 1, self._side)
        self.drv.call("cuStreamSynchronize", self._side)

    def limit(self, kernel: Kernel, threads: int) -> int:
        """How many CTAs of ``threads`` threads a grid of this rank may have, so that all of it is resident at once."""
        limit = kernel.resident_ctas(threads)
        if self._sharers > 1:
            # Each rank on the device may have two grids resident: this call's, and the next one's at its wait.
            limit //= self._sharers * (2 if self.plan.pdl else 1)
        return max(limit, 1)

    def grid(
        self, kernel: Kernel, columns: int, items: int, block: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Grid and block, (x, y) each, that cover ``items`` x ``columns``, or as much as is resident at once."""
        if block is None:
            block = (64 if items <= 64 else 128), 1
        limit = self.limit(kernel, block[0] * block[1])
        rows = min(columns // block[1], limit)
        return (max(min(-(-items // block[0]), limit // rows), 1), rows), block

    def close(self) -> None:
        """Free everything; collective. The caller has synchronised the streams of the calls."""
        try:
            self._free()
        finally:
            self.memory.close()

    def abandon(self) -> None:
        """Free what can be freed without the peers."""
        self._free()
        self.memory.abandon()

    def leave(self) -> None:
        """As ``abandon``, but peers may still run calls: a store of theirs through the multicast address must find our
        memory bound, so that stays until the process ends.
        """
        if self.transport == "multicast" and self.world > 1:
            self._free()
            _bound.append(self.memory)
        else:
            self.abandon()

    def keep(self) -> None:
        """Give nothing back before the process ends: kernels of ours may still run."""
        self.state, self._side = 0, None
        self.memory.keep()

    def _free_scratch(self) -> None:
        scratch, self._scratch = self._scratch, 0
        if scratch:
            self.drv.call("cuMemFree", scratch)

    def _free(self) -> None:
        self._free_scratch()
        state, self.state = self.state, 0
        side, self._side = self._side, None
        if state:
            self.drv.call("cuMemFree", state)
        if side is not None:
            self.drv.call("cuStreamDestroy", side)


class RowChannel(Channel):
    """What both protocols have: rows of packs with a header each, words of state a warp, one shape of kernel."""

    protocol: ClassVar[str]  # the kernels' files begin with it
    slot_bytes: ClassVar[int]  # of a pack in the mailbox
    words_a_warp: ClassVar[int]  # of device state

    def __init__(self, comm: Communicator, drv: Driver, device: int, transport: str, plan: Plan) -> None:
        # Header packs follow the payload's in each row, in a warp of their own.
        self.row = -(-plan.capacity // _WARP) * _WARP + 1
        super().__init__(comm, drv, device, transport, plan)

    @classmethod
    def largest_capacity(cls, world: int) -> int:
        """In bytes of a rank: the kernels count the bytes of one generation of the mailbox in 32 bits."""
        row = (1 << 32) // (world * cls.slot_bytes) - 1
        return row // _WARP * _WARP * PACK_BYTES

    def mailbox_bytes(self) -> int:
        return self.generations * self.world * self.row * self.slot_bytes

    def _generation_words(self) -> int:
        return self.words_a_warp * self.world * (self.row // _WARP + 1)

    def state_bytes(self) -> int:
        return 8 * self.world + 4 * (self._generation_words() + self.world + 1)

    @property
    def _peers(self) -> int:
        """Address of the table of all ranks' symmetric memory, which the device state begins with."""
        return self.state

    @property
    def _generations(self) -> int:
        return self.state + 8 * self.world

    def load(self) -> None:
        self._table = wide([self.memory.address(rank) for rank in range(self.world)])
        table = ctypes.addressof(self._table), 8 * self.world
        self.drv.call("cuMemcpyHtoDAsync", self._peers, *table, self._side)
        self.kernel = load(self.drv, self.device, f"{self.protocol}_{self.transport}.ptx")
        self._skip = load(self.drv, self.device, "lamport_skip.ptx")

    @property
    def _calls_address(self) -> int:
        return self._generations + 4 * self._generation_words()

    def block(self, source: int, target: int, nbytes: int, code: int, stream: int) -> Block:
        packs = -(-nbytes // PACK_BYTES)
        columns = self.world if self.transport == "multicast" else max(self.world - 1, 1)
        items = -(-packs // _WARP) * _WARP + _WARP
        grid, block = self.grid(self.kernel, columns, items, block_of(columns, items))
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        parameters: list[Any] = [
            u64(source),
            u64(target),
            u32(nbytes // self.unit),
            u32(code),
            u32(self.rank),
            u32(self.world),
            u32(self.row),
            u64(self._generations),
            u64(self._calls_address),
            u64(int(self.plan.timeout * 1e9)),
            u64(self.plan.host_alarm),
        ]
        if self.transport == "multicast":
            parameters += [u64(self.memory.multicast or 0), u64(self.memory.local)]
        parameters.append(u64(self._peers))
        return Block(self.kernel, parameters, grid=grid, threads=block, stream=stream, pdl=self.plan.pdl)

    def skip(self, stream: int) -> None:
        parameters = [ctypes.c_uint64(self._calls_address), ctypes.c_uint32(self.world)]
        Block(self._skip, parameters, grid=(1, 1), threads=_WARP, stream=stream, pdl=False).launch()

    def calls(self) -> int:
        return self.progress()[0]

    def progress(self) -> tuple[int, bool]:
        *calls, current = memoryview(self.read(self._calls_address, 4 * (self.world + 1))).cast("I")
        completed = min(count for source, count in enumerate(calls) if source != self.rank or self.world == 1)
        return completed, current == completed

    def restart_calls(self) -> None:
        self.drv.call("cuMemsetD32Async", self._calls_address, 0, self.world, self._side)
        self.drv.call("cuMemsetD32Async", self._calls_address + 4 * self.world, _NO_CALL, 1, self._side)
        self.drv.call("cuStreamSynchronize", self._side)


class LamportChannel(RowChannel):
    """The sentinel protocol of ptx/lamport_peer.ptx and ptx/lamport_multicast.ptx."""

    protocol = "lamport"
    generations = 3
    slot_bytes = PACK_BYTES
    words_a_warp = 1  # its generation

    def fill(self) -> None:
        mailbox = self.memory.local + CONTROL_BYTES
        self.drv.call("cuMemsetD32Async", mailbox, SENTINEL, self.mailbox_bytes() // 4, self._side)

    def residue(self) -> list[int]:
        """Indices of the 32-bit words of this rank's mailbox that are not the sentinel: none between calls (I1)."""
        raw = memoryview(self.read(self.memory.local + CONTROL_BYTES, self.mailbox_bytes())).cast("I")
        return [index for index, word in enumerate(raw) if word != SENTINEL]


def block_of(columns: int, items: int) -> tuple[int, int]:
    """The block (x, y) that measured best on an H200: columns side by side in the smallest calls."""
    if items <= 64:
        return 64, columns if columns <= 8 else 1
    if columns > 1 and items <= 512:
        return items, 1
    return 128, 1
