"""A mailbox's memory: the regions of a layout on every rank, the epoch, and the deadline with its report."""

from __future__ import annotations

import ctypes
import struct
from types import TracebackType
from typing import Any

import numpy as np

from .. import settings
from ..arrays import to_device
from ..driver import select, structs
from ..errors import ClosedError, MailboxTimeout
from ..symmetric import Communicator, SymmetricMemory
from .epoch import Epoch
from .layout import MailboxLayout
from .lowering import CONTROL_BYTES, REPORT_BYTES

_CONTROL = struct.Struct("<IIQQQ")  # alarm, -, timeout in ns, address of the report, -
_REPORT = struct.Struct("<I12xIQ4xIIII")  # written | region, pair | expected tag, seen tag, milliseconds, -


class MailboxMemory:
    """The memory of one tagged mailbox. Construction is collective over ``comm``.

    Peer regions alternate by the parity of the epoch. That is enough because a rank cannot be two launches ahead,
    *provided that every launch polls every rank*, and every pair that is put is polled in the same launch. A ring
    that polls only its neighbour breaks it.

    Attributes that kernels take as arguments:
        scratch: address of the scratch regions, uint64.
        peers: device array of uint64, each rank's peer regions as mapped here; a region lies at
            ``peers[rank] + layout.offset(name) + parity * layout.stride``.
        control: address of the control block for ``Mailbox(tag, control)``, uint64.
        epoch: the :class:`Epoch`; ``epoch.state`` is {tag, parity}.

    Args:
        comm: an mpi4py communicator or one of ``run_ranks``; None for a layout with scratch regions only.
        layout: the regions.
        device: ordinal of this rank's device; None takes the current one's, else one by the rank on this host.
        timeout: seconds that a poll waits before it gives up; None asks LAMPORT_NUMBA_TIMEOUT.
        share_device: whether two ranks may use one device; None asks LAMPORT_NUMBA_SHARE_DEVICE.

    Raises:
        ValueError: a layout with peer regions and no communicator, or a timeout that is not positive.
        SetupError and its kinds: on all ranks alike, if the set-up fails on one.
    """

    def __init__(
        self,
        comm: Any,
        layout: MailboxLayout,
        *,
        device: int | None = None,
        timeout: float | None = None,
        share_device: bool | None = None,
    ) -> None:
        self._closed = True  # until it is built
        seconds = settings.get("TIMEOUT") if timeout is None else float(timeout)
        if not seconds > 0:
            raise ValueError(f"timeout is {seconds}: a positive number of seconds is needed")
        if comm is None and layout.peer_bytes:
            raise ValueError("a layout with peer regions needs a communicator")
        self.layout = layout
        self._comm = None if comm is None else Communicator(comm)
        self.rank = 0 if self._comm is None else self._comm.rank
        self.world_size = 1 if self._comm is None else self._comm.size
        self._drv = select().for_rank(self.rank)
        self.device = self._drv.default_device() if device is None else int(device)
        self._symmetric: SymmetricMemory | None = None
        self._scratch = self._control = self._report = 0
        if self._comm is not None and layout.peer_bytes:
            share = settings.get("SHARE_DEVICE") if share_device is None else bool(share_device)
            self._symmetric = SymmetricMemory(
                self._comm, self._drv, self.device, layout.peer_bytes, multicast=False, share_device=share
            )
        error: BaseException | None = None
        try:
            with self._drv.current(self.device):
                self._build(seconds)
        except Exception as failure:
            error = failure
        self._closed = False
        try:
            if self._comm is not None:
                self._comm.vote("zero the mailbox", error)  # nobody may put before every mailbox is zeroed
            elif error is not None:
                raise error
        except BaseException:
            self.abandon()
            raise

    def _build(self, seconds: float) -> None:
        call = self._drv.call
        layout = self.layout
        mine = self._symmetric.local if self._symmetric else 0
        self._scratch = int(call("cuMemAlloc", max(layout.scratch_bytes, 16)))
        self._control = int(call("cuMemAlloc", CONTROL_BYTES))
        flags = structs.CU_MEMHOSTALLOC_PORTABLE | structs.CU_MEMHOSTALLOC_DEVICEMAP
        self._report = int(call("cuMemHostAlloc", REPORT_BYTES, flags))
        ctypes.memset(self._report, 0, REPORT_BYTES)
        at_device = int(call("cuMemHostGetDevicePointer", self._report, 0))
        control = _CONTROL.pack(0, 0, min(int(seconds * 1e9), 2**63), at_device, 0)
        if mine:
            call("cuMemsetD8", mine, 0, layout.peer_bytes)
        call("cuMemsetD8", self._scratch, 0, max(layout.scratch_bytes, 16))
        call("cuMemcpyHtoD", self._control, control, len(control))
        call("cuCtxSynchronize")
        self.scratch = np.uint64(self._scratch)
        self.control = np.uint64(self._control)
        addresses = [self._symmetric.address(rank) for rank in range(self.world_size)] if self._symmetric else [0]
        self.peers = to_device(np.array(addresses, np.uint64), device=self.device, drv=self._drv)
        self.epoch = Epoch(
            self._drv,
            self.device,
            peer=mine,
            peer_bytes=layout.stride,
            scratch=self._scratch,
            scratch_bytes=layout.scratch_bytes,
        )

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """(scratch, peers, epoch.state, control), in the order that kernels like to take them."""
        return self.scratch, self.peers, self.epoch.state, self.control

    def check(self) -> None:
        """Raise what a poll has reported: MailboxTimeout, which names region, pair and tags. Waits for nothing."""
        if self._closed:
            raise ClosedError("this mailbox memory is closed")
        written, region, pair, expected, seen, milliseconds, _ = _REPORT.unpack(
            ctypes.string_at(self._report, REPORT_BYTES)
        )
        if written:
            raise MailboxTimeout(self.layout.named(region), pair, expected, seen, milliseconds / 1e3, rank=self.rank)

    def close(self) -> None:
        """Free everything; collective, idempotent. Synchronises the device first."""
        if self._closed:
            return
        with self._drv.current(self.device):
            self._drv.call("cuCtxSynchronize")
            if self._symmetric is not None:
                self._symmetric.close()
            self._free()
        if self._comm is not None:
            self._comm.free()

    def abandon(self) -> None:
        """Free what can be freed without the peers; idempotent."""
        if self._closed:
            return
        with self._drv.current(self.device):
            self._free()
            if self._symmetric is not None:
                self._symmetric.abandon()
        if self._comm is not None:
            self._comm.give_up("it closed its mailbox memory without the others")

    def _free(self) -> None:
        self._closed = True
        for address, call in (
            (self._scratch, "cuMemFree"),
            (self._control, "cuMemFree"),
            (self._report, "cuMemFreeHost"),
        ):
            if address:
                self._drv.call(call, address)
        self._scratch = self._control = self._report = 0

    def __enter__(self) -> MailboxMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
