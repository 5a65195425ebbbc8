"""A mailbox's memory: the regions of a layout on every rank, the epoch, and the deadline with its report."""

from __future__ import annotations

import atexit
import ctypes
import struct
import sys
import warnings
import weakref
from types import TracebackType
from typing import Any

import numpy as np

from .. import settings
from .._version import __version__
from ..arrays import to_device
from ..collectives.arguments import naming
from ..collectives.ends import sweep
from ..driver import select, structs
from ..errors import ClosedError, MailboxTimeout, PeerLeft, SetupError
from ..symmetric import Communicator, SymmetricMemory
from .epoch import Epoch
from .holdings import MailboxHoldings
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
        ValueError, TypeError: a layout with peer regions and no communicator, or an argument that is not accepted, on
            its rank; SetupError on the others.
        SetupError and its kinds: on all ranks alike, if the set-up fails on one, or if the layouts differ.
    """

    _closed = True  # until it is built

    def __init__(
        self,
        comm: Any,
        layout: MailboxLayout,
        *,
        device: int | None = None,
        timeout: float | None = None,
        share_device: bool | None = None,
    ) -> None:
        if comm is None and layout.peer_bytes:
            raise ValueError(
                "a layout with peer regions needs a communicator: pass the ranks' comm, or name no peer regions"
            )
        self.layout = layout
        self._comm = None if comm is None else Communicator(comm)
        self.rank = 0 if self._comm is None else self._comm.rank
        self.world_size = 1 if self._comm is None else self._comm.size
        self._drv = select().for_rank(self.rank)
        try:
            self._construct(device, timeout, share_device)
        except BaseException as error:
            self._fail_construction(error)
            raise
        self._closed = False
        self._finalizer = weakref.finalize(self, MailboxHoldings.leave, self._holdings, 0.2)
        self._finalizer.atexit = False
        # By atexit and not by the finaliser: it must come before the end of the emulated device, which began earlier.
        atexit.register(self._holdings.leave)

    def _construct(self, device: int | None, timeout: float | None, share_device: bool | None) -> None:
        comm = self._comm
        seconds, self.device = self._checked(device, timeout)
        holdings = self._holdings = MailboxHoldings(self._drv, self.device)
        mine = 0
        if comm is not None:
            require_equal_layouts(comm, self.layout)
            if self.layout.peer_bytes:
                share = settings.get("SHARE_DEVICE") if share_device is None else bool(share_device)
                holdings.symmetric = SymmetricMemory(
                    comm, self._drv, self.device, self.layout.peer_bytes, multicast=False, share_device=share
                )
                mine = holdings.symmetric.local
        error: Exception | None = None
        try:
            with self._drv.current(self.device), self._drv.relaxed():
                sweep()
                self._build(holdings, mine, seconds)
        except Exception as failure:
            error = failure
        if comm is not None:
            comm.vote("zero the mailbox", error)  # nobody may put before every mailbox is zeroed
        elif error is not None:
            raise error

    def _checked(self, device: int | None, timeout: float | None) -> tuple[float, int]:
        """The timeout in seconds, and the device. A rank's own mistake is a SetupError on the others."""
        wrong: Exception | None = None
        try:
            seconds = settings.get("TIMEOUT") if timeout is None else float(timeout)
            if not seconds > 0:
                raise ValueError(f"timeout is {seconds}: a positive number of seconds is needed")
            ordinal = self._drv.default_device() if device is None else self._drv.checked_device(device)
        except Exception as error:
            wrong = naming(self.rank, error)
        if self._comm is not None:
            try:
                self._comm.vote("check the arguments", wrong)
            except SetupError:
                if wrong is None:
                    raise
        if wrong is not None:
            raise wrong
        return seconds, ordinal

    def _fail_construction(self, error: BaseException) -> None:
        if hasattr(self, "_holdings"):
            self._holdings.leave()
        if self._comm is None:
            return
        if isinstance(error, Exception) and self._comm.healthy:
            self._comm.free()  # all ranks know of the error, and raise too
        else:
            self._comm.give_up(f"{type(error).__name__}: {error}")

    def _build(self, holdings: MailboxHoldings, mine: int, seconds: float) -> None:
        call = self._drv.call
        layout = self.layout
        holdings.side = int(call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING))
        holdings.scratch = int(call("cuMemAlloc", max(layout.scratch_bytes, 16)))
        holdings.control = int(call("cuMemAlloc", CONTROL_BYTES))
        flags = structs.CU_MEMHOSTALLOC_PORTABLE | structs.CU_MEMHOSTALLOC_DEVICEMAP
        holdings.report = int(call("cuMemHostAlloc", REPORT_BYTES, flags))
        ctypes.memset(holdings.report, 0, REPORT_BYTES)
        at_device = int(call("cuMemHostGetDevicePointer", holdings.report, 0))
        control = _CONTROL.pack(0, 0, min(int(seconds * 1e9), 2**63), at_device, 0)
        if mine:
            call("cuMemsetD8", mine, 0, layout.peer_bytes)
        call("cuMemsetD8", holdings.scratch, 0, max(layout.scratch_bytes, 16))
        call("cuMemcpyHtoD", holdings.control, control, len(control))
        call("cuCtxSynchronize")
        self.scratch = np.uint64(holdings.scratch)
        self.control = np.uint64(holdings.control)
        symmetric = holdings.symmetric
        addresses = [symmetric.address(rank) for rank in range(self.world_size)] if symmetric else [0]
        self.peers = to_device(np.array(addresses, np.uint64), device=self.device, drv=self._drv)
        self.epoch = Epoch(
            self._drv,
            self.device,
            peer=mine,
            peer_bytes=layout.stride,
            scratch=holdings.scratch,
            scratch_bytes=layout.scratch_bytes,
            holdings=holdings,
        )
        holdings.held = (self.peers, self.epoch.state)

    @property
    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """(scratch, peers, epoch.state, control), in the order that kernels like to take them."""
        return self.scratch, self.peers, self.epoch.state, self.control

    def check(self) -> None:
        """Raise what a poll has reported: MailboxTimeout, which names region, pair and tags. Waits for nothing."""
        if self._closed:
            raise ClosedError("this mailbox memory is closed")
        written, region, pair, expected, seen, milliseconds, _ = _REPORT.unpack(
            ctypes.string_at(self._holdings.report, REPORT_BYTES)
        )
        if written:
            raise MailboxTimeout(self.layout.named(region), pair, expected, seen, milliseconds / 1e3, rank=self.rank)

    def close(self) -> None:
        """Free everything; collective, idempotent. Synchronises the device first.

        Raises PeerLeft if a rank has left without the others, with that rank's reason; RendezvousTimeout if one does
        not come. What is local is given back all the same.
        """
        if self._closed:
            return
        holdings = self._holdings
        try:
            with self._drv.current(self.device):
                self._drv.call("cuCtxSynchronize")
                if holdings.symmetric is not None:
                    holdings.symmetric.close()
                    holdings.symmetric = None
                holdings.free()
        except BaseException as error:
            gone = None if self._comm is None else self._comm.left
            self._end("it closed its mailbox memory without the others")
            if gone is not None and isinstance(error, SetupError):
                rank, why = gone
                raise PeerLeft(rank, None, cause=why) from error
            raise
        self._forget()
        if self._comm is not None:
            self._comm.free()

    def abandon(self) -> None:
        """Leave without the others, who get PeerLeft at their close. Frees what can be freed; idempotent."""
        self._end("it abandoned its mailbox memory")

    def _end(self, why: str) -> None:
        """Leave without the others; never raises."""
        if not self._closed:
            self._holdings.leave()
            self._forget()
            if self._comm is not None:
                self._comm.give_up(why)

    def _forget(self) -> None:
        self._closed = True
        self._finalizer.detach()
        if not self._holdings.anything():
            atexit.unregister(self._holdings.leave)

    def __enter__(self) -> MailboxMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the others may never come to a collective close
            self._end(f"it left its mailbox memory while an exception was passing: {kind.__name__}: {value}")

    def __del__(self) -> None:
        if not self._closed and not sys.is_finalizing():
            warnings.warn(f"unclosed MailboxMemory of rank {self.rank}", ResourceWarning, 2, self)


def require_equal_layouts(comm: Communicator, layout: MailboxLayout) -> None:
    """Compare all ranks' layouts; collective. Equal bytes are not enough: offsets are constants of each rank's kernel.

    Raises SetupError on all ranks, with every rank's layout.
    """
    text = f"{layout!r} of lamport-numba {__version__}"
    said = [words.decode() for words in comm.all_gather(text.encode(), "compare the layouts")]
    if len(set(said)) > 1:
        rows = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise SetupError(
            f"ranks were given different layouts: {rows}. Give every rank the same names, in the same order, with the "
            "same numbers of pairs",
            step="compare the layouts",
        )
