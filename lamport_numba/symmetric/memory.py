"""Symmetric memory: each rank's buffer, mapped into every other rank.

Made step by step; after each step all ranks vote, so nobody waits for a rank that has failed, and every rank raises the
same error after it has undone its own part.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from contextlib import ExitStack
from typing import Final

from .. import driver as seam
from .. import settings
from ..driver import structs
from ..errors import ClosedError, RendezvousTimeout, SetupError
from . import handles, multicast
from .communicator import Communicator
from .ledger import Ledger, Turn
from .survey import Survey, survey
from .transport import why_no_multicast

__all__ = ["SymmetricMemory"]

log = logging.getLogger("lamport_numba")

_MINIMUM: Final = structs.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM


class SymmetricMemory:
    """``nbytes`` bytes on every rank's device, each mapped into every rank. Collective.

    Args:
        communicator: the library's own; it stays the caller's.
        drv, device: the driver and the ordinal of this rank's device.
        nbytes: at least so many; the same on all ranks.
        multicast: also make an address through which a store lands in every rank's memory; MulticastUnavailable if
            that cannot be.
        share_device: whether several ranks may use one device (None: what LAMPORT_NUMBA_SHARE_DEVICE says).
        handle_kind: "posix" or "fabric" instead of what fits.
        timeout: seconds; the deadline of each step (None: the communicator's).

    Attributes: ``rank``, ``world_size``, ``nbytes`` (rounded up to what the driver wants), ``local`` (address of this
    rank's memory), ``multicast`` (the multicast address, or None), ``survey`` (what the ranks told each other).

    Raises SetupError, the same on every rank, naming the rank that failed, the call and its code; RendezvousTimeout
    naming the ranks that did not come. All that was made is given back then, and another try may follow.
    """

    def __init__(
        self,
        communicator: Communicator,
        drv: seam.Driver,
        device: int,
        nbytes: int,
        *,
        multicast: bool = False,
        share_device: bool | None = None,
        handle_kind: str | None = None,
        timeout: float | None = None,
    ) -> None:
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}; expected at least 1")
        self.rank = communicator.rank
        self.world_size = communicator.size
        self.multicast: int | None = None
        self._communicator = communicator
        self._drv = drv.for_rank(communicator.rank)
        self._device = device
        self._pid = os.getpid()
        self._closed = False
        self._ledger = Ledger(self._drv, device)
        self._finalizer = weakref.finalize(self, Ledger.abandon, self._ledger)
        former = communicator.timeout
        communicator.timeout = former if timeout is None else timeout
        try:
            share = bool(settings.get("SHARE_DEVICE")) if share_device is None else share_device
            with ExitStack() as stack:
                with communicator.step("make the context current"):
                    stack.enter_context(self._drv.current(device))
                self._build(nbytes, multicast, share, handle_kind)
        except SetupError as error:
            self._undo(meet=not isinstance(error, RendezvousTimeout))
            raise
        except BaseException as error:  # Ctrl-C, or a mistake of ours: the others must not wait for this rank
            communicator.give_up(f"{type(error).__name__}: {error}".rstrip(": "))
            self._undo(meet=False)
            raise
        finally:
            communicator.timeout = former

    def address(self, rank: int) -> int:
        """Where ``rank``'s memory is mapped in this process."""
        self._check()
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; expected 0..{self.world_size - 1}")
        return self._base + rank * self.nbytes

    @property
    def sharers(self) -> int:
        """The largest number of ranks that use one device."""
        return max(len(ranks) for ranks in self.survey.devices().values())

    @property
    def local(self) -> int:
        """The address of this rank's own memory."""
        return self.address(self.rank)

    def close(self) -> None:
        """Give everything back. Collective; the caller has synchronised what uses the memory. Idempotent.

        Raises SetupError on every rank if one could not give all back: the rest is kept, and ``close`` can be called
        again. Raises RendezvousTimeout if a rank does not come; ``abandon`` is what is left then.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            raise ClosedError(f"this memory belongs to process {self._pid}, not to its fork {os.getpid()}")
        self._communicator.barrier("before close")  # nobody stores to this memory any more
        with self._communicator.step("close"):
            self._ledger.settle()
        self._closed = True
        self._finalizer.detach()

    def abandon(self) -> None:
        """Give this rank's part back without the others. What still runs must not use the memory. Idempotent."""
        self._closed = True
        self._ledger.abandon()
        self._finalizer.detach()

    def keep(self) -> None:
        """Leave everything as it is until the process ends: something may still use the memory. Idempotent."""
        self._closed = True
        self._finalizer.detach()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the symmetric memory was closed")
        if os.getpid() != self._pid:
            raise ClosedError(f"this memory belongs to process {self._pid}, not to its fork {os.getpid()}")

    # Set-up

    def _build(self, nbytes: int, team: bool, share: bool, kind: str | None) -> None:
        c = self._communicator
        wish = {"bytes": nbytes, "multicast": team, "share_device": share, "handle_kind": kind}
        found = self.survey = survey(c, self._drv, self._device, **wish)
        found.require_equal()
        if not share:
            _refuse_sharing(found)
        missing = why_no_multicast(found) if team else None
        if missing is not None:
            raise missing
        kind = kind or handles.handle_kind(found, self._probe_fabric)
        self._round(nbytes, kind, team)
        self._create(kind)
        if team:
            self.multicast = multicast.attach(
                c, found, self._drv, self._device, self._ledger, self._memory, self.nbytes, kind, self._alignment
            )

    def _round(self, nbytes: int, kind: str, team: bool) -> None:
        """Round the size up to every granularity of every rank."""
        self._prop = handles.allocation(self._device, kind)
        with self._communicator.step("granularity") as step:
            step.value = [int(self._drv.call("cuMemGetAllocationGranularity", self._prop, _MINIMUM))]
            if team:
                step.value.append(multicast.granularity(self._drv, nbytes, self.world_size, kind))
        unit = math.lcm(*(one for ranks in step.values for one in ranks))
        self.nbytes = -(-nbytes // unit) * unit
        self._alignment = unit if unit & (unit - 1) == 0 else 0  # the driver takes powers of two only

    def _create(self, kind: str) -> None:
        """Make this rank's memory, pass its handle round, and map everybody's into one range of addresses."""
        c, drv, ledger = self._communicator, self._drv, self._ledger
        parcel = None
        try:
            with c.step("create memory") as step:
                self._memory = drv.allocate("cuMemCreate", self.nbytes, self._prop, 0)
                ledger.owe(Turn.RELEASE, "cuMemRelease", self._memory)
                total = self.nbytes * self.world_size
                self._base = int(drv.call("cuMemAddressReserve", total, self._alignment, 0, 0))
                ledger.owe(Turn.ADDRESS, "cuMemAddressFree", self._base, total)
                self._map(self.rank, self._memory)
                parcel = handles.Parcel(drv, kind, self._memory)
                step.value = parcel.address
            assert parcel is not None
            ranks = range(self.world_size)
            error = parcel.exchange(c, self.survey, step.values, ranks, self._import, "exchange handles")
            c.vote("map the peers' memory", error)
        finally:
            if parcel is not None:
                parcel.close()

    def _import(self, rank: int, handle: int) -> None:
        """Map the memory of ``rank``, imported under ``handle``; the mapping keeps it alive."""
        drop = self._ledger.owe(Turn.RELEASE, "cuMemRelease", handle)
        self._map(rank, handle)
        drop()

    def _map(self, rank: int, handle: int) -> None:
        address = self._base + rank * self.nbytes
        self._drv.call("cuMemMap", address, self.nbytes, 0, handle, 0)
        self._ledger.owe(Turn.UNMAP, "cuMemUnmap", address, self.nbytes)
        self._drv.call("cuMemSetAccess", address, self.nbytes, [handles.read_write(self._device)], 1)

    def _probe_fabric(self) -> list[bool]:
        """Whether FABRIC handles really work, on each rank: the device's attribute is not to be trusted."""
        with self._communicator.step("probe fabric handles") as step:
            step.value = handles.fabric_works(self._drv, self._device, self.survey.mine.fabric)
        return list(step.values)

    def _undo(self, meet: bool) -> None:
        """Give back what a failed construction has made, and wait until all ranks have."""
        self.abandon()
        if meet:
            try:
                self._communicator.barrier("undo")
            except (SetupError, ClosedError) as error:
                log.warning("rank %d: after a failed construction: %s", self.rank, error)


def _refuse_sharing(found: Survey) -> None:
    ranks = found.sharing()
    if ranks:
        device = found.ranks[ranks[0]]
        names = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        raise SetupError(
            f"ranks {names} use one device ({device.name}, UUID {device.uuid}, host {device.host}); give each its own "
            "(see CUDA_VISIBLE_DEVICES), or allow it by share_device=True or LAMPORT_NUMBA_SHARE_DEVICE=1",
            rank=ranks[-1],
            step="survey",
        )
