"""Replayable runs: one host thread or the devices run at a time, and a seed draws which is next.

There is no scheduler thread: whoever gives the baton up draws the next holder, running device work itself while that is
what the draw says. Time is virtual (``now``), so that deadlines are part of the replay.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from ..errors import LamportError

_LONGEST_SPELL = 64  # draws


class HostDeadlock(LamportError):
    """Every rank waits, the devices have nothing to do, and nobody has a deadline."""


class _Seat:
    """One host thread: what it waits for, and the lock it sleeps on."""

    def __init__(self) -> None:
        self.ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class Baton:
    """The baton of ``threads`` host threads.

    ``step()`` does a bounded piece of device work and returns False if there is none. ``clock()`` is the devices'
    virtual time in seconds and ``jump(t)`` moves it to ``t`` when nothing else can happen; without them the baton
    counts for itself.
    """

    def __init__(
        self,
        seed: int,
        threads: int,
        step: Callable[[], bool] | None = None,
        clock: Callable[[], float] | None = None,
        jump: Callable[[float], None] | None = None,
    ) -> None:
        self.draws = random.Random(f"baton {seed}")
        self._step = step
        self._clock = clock
        self._jump = jump
        self._skipped = 0.0
        self._seats: list[_Seat | None] = [None] * threads
        self._gathering = threading.Lock()
        self._absent = threads
        self._local = threading.local()
        self._stuck: str | None = None
        self._slow: _Seat | None = None
        self._spell = 0

    def now(self) -> float:
        """Virtual seconds."""
        return self._clock() if self._clock is not None else self._skipped

    def join(self, seat: int) -> None:
        """Take seat number ``seat``; returns, holding the baton, once all threads have joined and this one is drawn."""
        mine = _Seat()
        mine.ready = _always
        self._local.seat = seat
        with self._gathering:
            self._seats[seat] = mine
            self._absent -= 1
            last = self._absent == 0
        if last:
            self._pass_on(mine)
        else:
            mine.wake.acquire()
        mine.ready = None

    def leave(self) -> None:
        """Give the baton up for good."""
        self._seats[self._local.seat] = None
        del self._local.seat
        if any(seat is not None for seat in self._seats):
            self._pass_on(None)

    @property
    def seated(self) -> bool:
        """Whether the calling thread holds a seat (and so, while it runs, the baton)."""
        return hasattr(self._local, "seat")

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Give the baton up; return, holding it again, True once ``ready()`` is true, or False after ``seconds``."""
        mine = self._seats[self._local.seat]
        assert mine is not None
        mine.ready = ready
        mine.deadline = None if seconds is None else self.now() + seconds
        try:
            self._pass_on(mine)
            stuck, self._stuck = self._stuck, None
            if ready():
                return True
            if stuck is not None:
                raise HostDeadlock(stuck)
            return False
        finally:
            mine.ready = None

    def yield_(self) -> None:
        """Let others run; the draw may fall on the caller again."""
        self.wait(_always)

    def _pass_on(self, mine: _Seat | None) -> None:
        """Draw until a thread is next; wake it and, unless it is the caller's own, sleep."""
        chosen = self._draw()
        if chosen is mine:
            return
        chosen.wake.release()
        if mine is not None:
            mine.wake.acquire()

    def _change(self, waiting: list[_Seat]) -> None:
        """Now and then another rank, or none, is the slow one: the others and the devices go on far ahead of it."""
        self._spell -= 1
        if self._spell < 0:
            self._spell = self.draws.randrange(_LONGEST_SPELL)
            self._slow = self.draws.choice([*waiting, *[None] * len(waiting)])

    def _draw(self) -> _Seat:
        busy = self._step is not None
        while True:
            now = self.now()
            waiting = [seat for seat in self._seats if seat is not None]
            able = [s for s in waiting if (s.deadline is not None and now >= s.deadline) or (s.ready and s.ready())]
            quick = [s for s in able if s is not self._slow]
            if able and not (busy and self._step is not None and self.draws.random() < (0.5 if quick else 0.95)):
                self._change(waiting)
                return self.draws.choice(quick or able)
            if self._step is not None and self._step():
                busy = True
                continue
            busy = False
            if able:
                continue
            deadlines = [s.deadline for s in waiting if s.deadline is not None]
            if not deadlines:
                self._stuck = f"all {len(waiting)} ranks that still run wait for each other, and no device has work"
                return waiting[0]
            if self._jump is not None:
                self._jump(min(deadlines))
            else:
                self._skipped = min(deadlines)


def _always() -> bool:
    return True
