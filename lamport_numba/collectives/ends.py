"""What an object of ours holds of its device, and how one rank alone gives it back.

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

__all__ = ["Holdings", "Remains", "at_rest", "sweep"]

log = logging.getLogger("lamport_numba")

_WAIT: Final = 2.0  # seconds that a rank which leaves alone waits for its own kernels
_kept: deque[Holdings] = deque()


def at_rest(drv: Driver, stream: int) -> bool:
    """Whether a stream has no work. A destroyed one has none; while it is captured nobody can tell, so it may have."""
    code, *status = drv.api.cuStreamIsCapturing(stream)
    if code:
        return True
    if status[0] != structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        return False  # and a query would break the capture
    return bool(drv.api.cuStreamQuery(stream)[0] != structs.CUresult.CUDA_ERROR_NOT_READY)


class Holdings:
    """What one object holds of its device, and how its rank alone gives it back; a finaliser owns it when that is gone.

    ``captured`` says that a graph, which can run anywhere, may hold our kernels.
    """

    def __init__(self, drv: Driver, device: int) -> None:
        self.drv = drv
        self.device = device
        self.pid = os.getpid()
        self.captured = False
        self.held: tuple[object, ...] = ()  # what kernels that may still run use

    def leave(self, wait: float = _WAIT) -> None:
        """Give back, without the others, what nothing uses any more. Never raises: finalisers call it."""
        try:
            if os.getpid() != self.pid:
                self.forget()  # a fork's child has nothing of this
            elif self.anything():
                with self.drv.current(self.device), self.drv.relaxed():
                    self.silence()
                    if not self._try(wait):
                        log.info("a mailbox is kept until its kernels are known to be over")
                        _kept.append(self)
        except Exception as error:  # the context is lost, or the interpreter is ending
            log.debug("not everything was given back: %s", error)
            self.forget()

    def _try(self, wait: float) -> bool:
        if self.captured:
            return False
        end = time.monotonic() + wait
        while not self.streams_rest():
            if time.monotonic() >= end:
                return False
            time.sleep(1e-4)
        self.give_back()
        self.held = ()
        return True

    # What a kind of object defines

    def anything(self) -> bool:
        """Whether anything is held."""
        raise NotImplementedError

    def silence(self) -> None:
        """Set the own alarm, so that the own kernels leave soon."""
        raise NotImplementedError

    def streams_rest(self) -> bool:
        """Whether the streams of the own kernels have no work."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Free what can be freed without the others; no kernel of ours runs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give nothing back before the process ends."""
        raise NotImplementedError


class Remains(Holdings):
    """An all-gather's: channels, the host's alarm words, and where the calls run. ``stream`` is the last one used."""

    def __init__(self, drv: Driver, device: int) -> None:
        super().__init__(drv, device)
        self.channels: dict[str, Channel] = {}
        self.parked: list[Channel] = []  # of before a reset: graphs captured then find the alarm there and leave
        self.host = 0
        self.stream: int | None = None
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
        if not self.streams_rest():
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

    def anything(self) -> bool:
        return bool(self.channels or self.parked or self.host)

    def silence(self) -> None:
        for channel in self.all:
            channel.silence()

    def streams_rest(self) -> bool:
        return self.stream is None or at_rest(self.drv, self.stream)

    def give_back(self) -> None:
        for channel in self.all:
            channel.leave()
        self.channels.clear()
        self.parked.clear()
        for thing in self.owned:
            thing.close()
        self.owned = ()
        self._free_host()

    def _free_host(self) -> None:
        host, self.host = self.host, 0
        if host:
            self.drv.call("cuMemFreeHost", host)

    def forget(self) -> None:
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
