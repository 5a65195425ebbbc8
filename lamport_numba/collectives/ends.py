"""What an all-gather holds of its device, and how one rank alone gives it back.

Memory is never unmapped while a kernel of ours may still run: it would fault, and under MPS take every client along.
So a rank that leaves by itself first sets its own alarm, which makes its kernels leave, then looks for a while whether
its stream has come to rest; what it cannot be sure of it keeps, to look again later, at the latest when the process
ends. The peers' mappings keep our memory alive as long as their kernels may store to it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..driver import Driver, structs
from ..symmetric import Communicator
from .channel import Channel
from .meet import Standing, meet
from .reports import Report

__all__ = ["Remains", "at_rest", "sweep"]

log = logging.getLogger("lamport_numba")

_WAIT: Final = 2.0  # seconds that a rank which leaves alone waits for its own kernels
_kept: deque[Remains] = deque()


def at_rest(drv: Driver, stream: int) -> bool:
    """Whether a stream has no work. A destroyed one has none; while it is captured nobody can tell, so it may have."""
    code, *status = drv.api.cuStreamIsCapturing(stream)
    if code:
        return True
    if status[0] != structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        return False  # and a query would break the capture
    return bool(drv.api.cuStreamQuery(stream)[0] != structs.CUresult.CUDA_ERROR_NOT_READY)


class Remains:
    """Channels, the host's alarm words, and where the calls run; a finaliser owns it when its object is gone.

    ``stream`` is the last one used; ``captured`` says that a graph, which can run anywhere, may hold our kernels.
    """

    def __init__(self, drv: Driver, device: int) -> None:
        self.drv = drv
        self.device = device
        self.pid = os.getpid()
        self.channels: dict[str, Channel] = {}
        self.parked: list[Channel] = []  # of before a reset: graphs captured then find the alarm there and leave
        self.host = 0
        self.stream: int | None = None
        self.captured = False
        self.held: tuple[object, ...] = ()  # what kernels that may still run use
        self.owned: tuple[Any, ...] = ()  # closed with the rest

    @property
    def all(self) -> list[Channel]:
        """Every channel, in the order of closing, which is the same on all ranks."""
        return [*self.channels.values(), *self.parked]

    def alarmed(self) -> bool:
        """Whether this rank's alarm is set."""
        return any(channel.alarmed() for channel in self.channels.values())

    def reports(self) -> list[Report]:
        """What the ranks have reported so far, the root cause first."""
        return sorted(report for channel in self.channels.values() for report in channel.reports())

    def come_to_rest(self, comm: Communicator, stage: str, refusals: int, timeout: float | None) -> list[Standing]:
        """Wait for all ranks' calls, which their deadlines bound, or stop them once they cannot complete; collective.

        ``refusals``: how many calls this rank has refused.
        """
        ranks = list(meet(comm, stage, partial(self._standing, refusals), timeout))
        if not ranks[comm.rank].at_rest:
            for channel in self.channels.values():
                channel.silence()
            while not self._at_rest():
                comm.sleep(1e-3)
        return ranks

    def _at_rest(self) -> bool:
        if self.stream is not None and not at_rest(self.drv, self.stream):
            return False
        if self.captured:
            self.drv.call("cuCtxSynchronize")  # a graph may run on any stream
        return True

    def _standing(self, refusals: int) -> Standing:
        rests = self._at_rest()  # before the rest is read
        progress = [channel.progress() for channel in self.channels.values()]
        return Standing(
            at_rest=rests,
            calls=sum(calls for calls, _ in progress),
            waiting=any(waiting for _, waiting in progress),
            refusals=refusals,
            captured=self.captured,
            alarmed=self.alarmed(),
        )

    def close(self) -> None:
        """Give everything back; collective, and no kernel runs."""
        for name in list(self.channels):
            self.channels[name].close()
            del self.channels[name]
        while self.parked:
            self.parked[0].close()
            del self.parked[0]
        self._free_host()

    def leave(self, wait: float = _WAIT) -> None:
        """Give back, without the others, what nothing uses any more. Never raises: finalisers call it."""
        try:
            if os.getpid() != self.pid:
                self._forget()  # a fork's child has nothing of this
            elif self.channels or self.parked or self.host:
                with self.drv.current(self.device), self.drv.relaxed():
                    for channel in self.all:
                        channel.silence()
                    if not self._try(wait):
                        log.info("a mailbox is kept until its kernels are known to be over")
                        _kept.append(self)
        except Exception as error:  # the context is lost, or the interpreter is ending
            log.debug("not everything was given back: %s", error)
            self._forget()

    def _try(self, wait: float) -> bool:
        if self.captured:
            return False
        end = time.monotonic() + wait
        while self.stream is not None and not at_rest(self.drv, self.stream):
            if time.monotonic() >= end:
                return False
            time.sleep(1e-4)
        for channel in self.all:
            channel.leave()
        self.channels.clear()
        self.parked.clear()
        for thing in self.owned:
            thing.close()
        self.held = self.owned = ()
        self._free_host()
        return True

    def _free_host(self) -> None:
        host, self.host = self.host, 0
        if host:
            self.drv.call("cuMemFreeHost", host)

    def _forget(self) -> None:
        for channel in self.all:
            channel.keep()
        self.channels.clear()
        self.parked.clear()
        self.host = 0


def sweep() -> None:
    """Look again whether what was kept can be given back now."""
    for _ in range(len(_kept)):
        with suppress(IndexError):  # another thread looks too
            _kept.popleft().leave(wait=0.0)
