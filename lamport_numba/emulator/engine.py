"""Who executes the devices' work, and in which order.

*Whoever waits helps*: a host thread in a synchronising call runs the work of all devices itself, so the fast path hands
nothing from thread to thread. One thread drives at a time (``Engine.turn``); another one that waits sleeps until what
it waits for is done, or until the drive is its own. A background thread takes over when work is queued and nobody waits
(the host is in MPI, say).

Under a replayable ``run_ranks`` there is neither: the baton asks for one ``step`` at a time, and a seed draws which.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from . import faults
from .baton import Baton
from .config import CONFIG, configure
from .core import result
from .grid import Status
from .machine import MACHINE, Context, Device, sequence

if TYPE_CHECKING:
    from .launch import Launch
    from .streams import Operation, Stream

__all__ = ["ENGINE", "Engine", "Session", "session"]

_SPINS: Final = 100  # stalled rounds that only yield the processor, before sleeps begin
_FEW_SPINS: Final = 2
_EARLY: Final = 8  # rounds that a kernel waits before its programmatic dependent starts early
_ODDS: Final = 0.1  # of its starting in a round, with the adversarial fabric
_NAP: Final = 20e-6
_LONGEST_NAP: Final = 500e-6
_TICK: Final = 0.0005  # seconds between two looks of the background thread; longer while others see to the work
_LONGEST_TICK: Final = 0.004
_FIRST_JUMP: Final = 1000.0  # nanoseconds of virtual time, when nothing moves
_LONGEST_JUMP: Final = 0.25e9
_DEADLOCK: Final = 7200e9  # as long as this without progress; deadlines of kernels have passed before

_FINISHED, _FAULTED, _STALLED = int(Status.FINISHED), int(Status.FAULTED), int(Status.STALLED)

_CODES: Final = {
    "illegal address": result.CUDA_ERROR_ILLEGAL_ADDRESS,
    "access not permitted": result.CUDA_ERROR_ILLEGAL_ADDRESS,
    "misaligned address": result.CUDA_ERROR_MISALIGNED_ADDRESS,
    "assertion failed": result.CUDA_ERROR_ASSERT,
    "stopped": result.CUDA_ERROR_LAUNCH_TIMEOUT,
    "ordinary access to a multicast address": result.CUDA_ERROR_ILLEGAL_ADDRESS,  # undefined on hardware
    "multimem access to an ordinary address": result.CUDA_ERROR_ILLEGAL_ADDRESS,  # undefined on hardware
    "shared memory out of bounds": result.CUDA_ERROR_ILLEGAL_ADDRESS,
    "local memory out of bounds": result.CUDA_ERROR_ILLEGAL_ADDRESS,
}


class Turn:
    """The right to run device work and to change what it runs on: one thread has it, and may take it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0
        self.wanted = 0  # threads that block for it: a long drive gives way to them
        self.napping = False
        self.news = threading.Event()  # something happened that a napping driver should see

    @property
    def mine(self) -> bool:
        """Whether the calling thread has it (a finaliser may run in the middle of a drive)."""
        return self._owner == threading.get_ident()

    def take(self, blocking: bool = True) -> bool:
        """Take it; False if another thread has it and ``blocking`` is not set."""
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return True
        if not self._lock.acquire(False):
            if not blocking:
                return False
            self.wanted += 1
            self.news.set()
            try:
                self._lock.acquire()
            finally:
                self.wanted -= 1
        self._owner, self._depth = me, 1
        return True

    def give(self) -> None:
        """Give it back."""
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()

    def give_way(self) -> None:
        """Let those who block for it have it first."""
        if self._depth == 1:
            self.give()
            while self.wanted:
                time.sleep(_NAP)
            self.take()

    def __enter__(self) -> Turn:
        self.take()
        return self

    def __exit__(self, *passing: object) -> None:
        self.give()


class Engine:
    """Runs the operations of all streams of this process."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.baton: Baton | None = None  # of a replayable run: then only ``step`` runs anything
        self.draws = random.Random(0)  # for the order of grids, with the adversarial fabric
        self.rounds = 0
        self._driven = False  # a waiting thread drives
        self._crowd = False  # several host threads wait for devices: what a kernel waits for may be theirs to launch
        self._sleepers: list[tuple[Callable[[], bool], threading.Lock]] = []
        self._alarm = threading.Event()
        self._thread: threading.Thread | None = None
        self._asleep = True
        self._jump = _FIRST_JUMP
        self._still = 0
        self._waited = 0.0

    # Waiting

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once ``ready()``; meanwhile run what there is to run."""
        if self.baton is not None and self.baton.seated:
            if not self.turn.mine:
                self.baton.wait(ready)
            return
        if self.turn.mine:  # from a finaliser inside a drive: the drive itself goes on afterwards
            return
        while not ready():
            if self._driven:
                self._sleep(ready)
                continue
            self.turn.take()
            if self._driven:  # another one was faster and has given way; it drives on
                self.turn.give()
                continue
            self._driven = True
            try:
                self._drive(ready)
            except KeyboardInterrupt:
                self.stop("Ctrl-C ended the kernels that were running")
                raise
            finally:
                self._driven = False
                self.turn.give()
                if self._sleepers:
                    self._wake(True)

    def wait_stream(self, stream: Stream) -> None:
        """Return once the stream is idle or its context is ruined."""
        self.wait(lambda: not (stream.queue or stream.running))

    def glance(self) -> None:
        """Help a little: for those who poll."""
        if self.baton is not None and self.baton.seated:
            if not self.turn.mine:
                self.baton.yield_()
        elif not self.turn.mine and self.turn.take(False):
            try:
                self.round()
            finally:
                self.turn.give()
        else:
            time.sleep(0)

    def _drive(self, ready: Callable[[], bool]) -> None:
        stalls = 0
        turn = self.turn
        while not ready():
            if self.round():
                stalls = 0
                if self._sleepers:
                    self._wake(False)
            else:
                stalls += 1
                before = time.monotonic_ns()
                self._pause(stalls)
                MACHINE.fabric.advance(time.monotonic_ns() - before)  # or no deadline would ever pass
            if turn.wanted:
                turn.give_way()

    def _pause(self, stalls: int) -> None:
        """Give the processor away: at first only to whoever can use it at once, then for longer and longer."""
        fabric = MACHINE.fabric
        if fabric.is_adversarial and fabric.in_flight:
            fabric.land(fabric.draw(fabric.in_flight) + 1, hurry=True)
            return
        spins = _FEW_SPINS if self._crowd else _SPINS
        if stalls <= spins:
            os.sched_yield()
        else:
            turn = self.turn
            turn.napping = True
            turn.news.wait(min(_NAP * (stalls - spins), _LONGEST_NAP))
            turn.napping = False
            turn.news.clear()

    def _sleep(self, ready: Callable[[], bool]) -> None:
        self._crowd = True
        bed = threading.Lock()
        bed.acquire()
        entry = (ready, bed)
        self._sleepers.append(entry)
        if self._driven:  # else the driver has just left, and nobody would wake us
            bed.acquire(timeout=0.05)
        if entry in self._sleepers:
            self._sleepers.remove(entry)

    def _wake(self, leaving: bool) -> None:
        """Wake the sleepers whose wait is over; a driver that leaves wakes one more, to drive."""
        for entry in list(self._sleepers):
            ready, bed = entry
            if not ready():
                if not leaving:
                    continue
                leaving = False  # one is enough
            try:
                self._sleepers.remove(entry)
                bed.release()
            except (ValueError, RuntimeError):
                pass  # it woke by itself

    # New work

    def at_once(self, stream: Stream, launch: Launch) -> bool:
        """Start a kernel from the launch itself, on a device that has no other work; False if that cannot be.

        A small kernel then ends there, and a gather has published before the host goes on.
        """
        if MACHINE.fabric.is_adversarial or self.turn.mine or not self.turn.take(False):
            return False
        try:
            launch.stream = stream
            launch.number = next(sequence)
            launch.start()
            stream.last = launch
            status = launch.grid.run(launch.limit, CONFIG.quantum)
            if status == _FINISHED:
                launch.done = True
                stream.running.pop()
                stream.device.grids.pop()
                launch.end()
            elif status == _FAULTED:
                self._fault(launch)
            elif status == _STALLED:
                launch.waits = 1
        finally:
            if launch in stream.running:  # also if Ctrl-C came in between
                self.busy(stream)
            self.turn.give()
        return True

    def busy(self, stream: Stream) -> None:
        """The stream has work from now on."""
        if self.turn.napping:
            self.turn.news.set()
        stream.device.busy[stream] = None
        MACHINE.working[stream.device] = None
        self.kick()

    # The background

    def kick(self) -> None:
        """Work was queued: see that the background thread looks after it if nobody waits."""
        if self._asleep and self.baton is None:
            self._asleep = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._background, name="emulated-device", daemon=True)
                self._thread.start()
            self._alarm.set()

    def _background(self) -> None:
        while True:
            if not self._work():
                self._asleep = True
                if not self._work():
                    self._alarm.wait()
                self._asleep = False
            self._alarm.clear()
            idle = 0
            seen = -1
            tick = _TICK
            while idle < 20:
                time.sleep(tick)
                if self.baton is not None or not self._work():
                    idle += 1
                    tick = min(2 * tick, _LONGEST_TICK)
                elif self.rounds != seen or self._driven:
                    tick = min(2 * tick, _LONGEST_TICK)
                elif self.turn.take(False):
                    tick = _TICK
                    try:
                        self._drive(lambda: self._driven or bool(self.turn.wanted) or not self._work())
                    finally:
                        self.turn.give()
                seen = self.rounds

    @staticmethod
    def _work() -> bool:
        return bool(MACHINE.working) or MACHINE.fabric.in_flight > 0

    # Running, with the turn held

    def round(self) -> bool:
        """Start what may start, run every grid once; whether anything got anywhere."""
        self.rounds += 1
        moved = False
        for device in list(MACHINE.working):
            started = False
            for stream in list(device.busy):
                if stream.queue and self._start(stream):
                    started = True
                if not stream.queue and not stream.running:
                    self._rest(stream)
            grids = device.grids
            if len(grids) == 1:  # a kernel that has only just started and waits for others has not moved anything
                launch = grids[0]
                moved |= self._run(launch, launch.limit, CONFIG.quantum)
            elif grids:
                for launch in self._order(grids):
                    moved |= self._run(launch, self._room(device, launch), CONFIG.quantum)
            else:
                moved |= started
        return moved

    def _order(self, grids: list[Launch]) -> list[Launch]:
        """The oldest first; by lot with the adversarial fabric."""
        if MACHINE.fabric.is_adversarial:
            return self.draws.sample(grids, len(grids)) if len(grids) > 2 else grids[:: self.draws.choice((1, -1))]
        return list(grids)

    @staticmethod
    def _room(device: Device, launch: Launch) -> int:
        """How many CTAs of ``launch`` may be resident, beside what the other grids hold."""
        others = sum(other.grid.resident * other.cost for other in device.grids if other is not launch)
        return int(max(device.multiprocessors * UNIT - others, 0) // launch.cost)

    def _start(self, stream: Stream) -> bool:
        """Start operations of the stream as long as they may start."""
        moved = False
        queue = stream.queue
        while queue and self._may_start(stream, queue[0]):
            operation = queue[0]
            operation.start()
            stream.last = operation
            if queue and queue[0] is operation:  # only now: others take an empty stream for idle
                queue.popleft()
            moved = True
        return moved

    def _may_start(self, stream: Stream, operation: Operation) -> bool:
        if stream.running:
            # A programmatic dependent starts early: once its direct predecessor has triggered or is over.
            last = stream.last
            if not operation.programmatic or not (last.done or last.grid.triggered):  # type: ignore[union-attr]
                return False
            if not last.done and not self._starts_early(last):  # type: ignore[union-attr, arg-type]
                return False
        if stream.legacy:
            context, number = stream.context, operation.number
            for other in stream.device.busy:
                if other.blocking and other.context is context and 0 < other.oldest() < number:
                    return False
        elif stream.blocking:
            legacy = stream.context.legacy
            if (legacy.queue or legacy.running) and 0 < legacy.oldest() < operation.number:
                return False
        return all(other.done for other in operation.after)

    def _starts_early(self, last: Launch) -> bool:
        """Whether a programmatic dependent of ``last``, which still runs, starts now. Two grids at once cost more than
        they give if the first only waits for a moment; the adversarial fabric draws."""
        if MACHINE.fabric.is_adversarial:
            return self.baton is not None or self.draws.random() < _ODDS
        return not 0 < last.waits < _EARLY

    def _run(self, launch: Launch, ctas: int, quantum: int) -> bool:
        """Run a grid; whether it got anywhere."""
        status = launch.grid.run(ctas, quantum)
        if status == _STALLED:
            launch.waits += 1
            return False
        launch.waits = 0
        if status == _FINISHED:
            self._finish(launch)
        elif status == _FAULTED:
            self._fault(launch)
        return True

    def _finish(self, launch: Launch) -> None:
        stream = launch.stream
        assert stream is not None
        launch.done = True
        stream.running.remove(launch)
        stream.device.grids.remove(launch)
        for other in stream.running:
            if other.primary is launch:
                other.grid.release()
        launch.end()
        if not stream.queue and not stream.running:
            self._rest(stream)

    @staticmethod
    def _rest(stream: Stream) -> None:
        """The stream has nothing left to do."""
        device, context = stream.device, stream.context
        device.busy.pop(stream, None)
        if stream.queue:  # somebody queued in this moment
            device.busy[stream] = None
        if not device.busy:
            MACHINE.working.pop(device, None)
            if device.busy:
                MACHINE.working[device] = None
        if context.idle_work and context.idle:
            work, context.idle_work = context.idle_work, []
            for free in work:
                free()

    # Faults

    def _fault(self, launch: Launch) -> None:
        from .memory import MEMORY

        fault = launch.grid.fault
        kind = fault.kind if fault is not None else "unknown"
        stream = launch.stream
        assert stream is not None
        context = stream.context
        hint = MEMORY.explain(context.device, fault.address) if fault is not None and fault.address else ""
        self._ruin(context, _CODES.get(kind, result.CUDA_ERROR_LAUNCH_FAILED), f"{fault}{hint}", fault)

    def _ruin(self, context: Context, code: Any, text: str, fault: Any = None) -> None:
        """Make the context answer ``code`` from now on, and give up all its work."""
        if context.error is None:
            context.error = code
            faults.set_last_fault(fault if fault is not None else text)
            print(f"emulated device {context.device.index}: {code.name} ({int(code)}): {text}", file=sys.stderr)
        self.drop(context)

    def drop(self, context: Context) -> None:
        """Give up all work of a context."""
        device = context.device
        for launch in [launch for launch in device.grids if launch.stream.context is context]:
            launch.grid.abort()
            launch.done = True
            device.grids.remove(launch)
            launch.end()
        for stream in [context.legacy, *context.streams.values(), *device.busy]:
            if stream.context is not context:
                continue
            for operation in stream.queue:
                operation.done = True
            stream.queue.clear()
            stream.running.clear()
            self._rest(stream)
        work, context.idle_work = context.idle_work, []
        for free in work:
            free()

    def stop(self, why: str) -> None:
        """End every kernel of this process; their contexts are ruined."""
        for device in MACHINE.devices:
            for launch in device.grids:
                launch.grid.abort()
        with self.turn:
            for device in MACHINE.devices:
                if device.context is not None and device.busy:
                    self._ruin(device.context, result.CUDA_ERROR_LAUNCH_TIMEOUT, why)

    def shut_down(self) -> None:
        """End everything, and keep the turn so that no thread of this process runs anything again."""
        for device in MACHINE.devices:
            for launch in list(device.grids):
                launch.grid.abort()
        self.turn.take()

    # One step at a time, for the baton

    def step(self) -> bool:
        """Do one piece of device work, drawn by lot; False if there is none. With the baton's holder waiting."""
        with self.turn:
            return self._step()

    def _step(self) -> bool:
        fabric, draws = MACHINE.fabric, self.draws
        grids: list[Launch] = []
        moved = False
        for device in sorted(MACHINE.working, key=_index):
            for stream in list(device.busy):
                if stream.queue and self._may_start(stream, stream.queue[0]) and draws.random() < 0.5:
                    moved = self._start(stream)
                    self._still = 0
                if not stream.queue and not stream.running:
                    self._rest(stream)
            grids += device.grids
        if not grids:
            if fabric.in_flight:
                fabric.land(draws.randint(1, 64))
                return True
            return moved or bool(MACHINE.working)
        launch = draws.choice(grids)
        assert launch.stream is not None
        quantum = 1 << draws.randrange(12)
        if self._run(launch, self._room(launch.stream.device, launch), quantum):
            self._still, self._jump, self._waited = 0, _FIRST_JUMP, 0.0
        else:
            self._still += 1
            if self._still > 4 * len(grids):
                self._nothing_moves()
        return True

    def _nothing_moves(self) -> None:
        """Every grid waits: let words land, else let time pass, faster and faster."""
        fabric = MACHINE.fabric
        if fabric.in_flight:
            fabric.land(self.draws.randint(1, 16))
            return
        fabric.advance(int(self._jump))
        self._waited += self._jump
        self._jump = min(self._jump * 1.005, _LONGEST_JUMP)  # slow: a kernel looks at its clock once in many polls
        if self._waited < _DEADLOCK:
            return
        for device in MACHINE.devices:
            if device.context is not None and device.grids:
                held = ", ".join(f"{x.function.name} ({x.grid.resident} CTAs resident)" for x in device.grids)
                text = f"deadlock: no thread of any kernel can go on, and no word is in flight; {held}"
                self._ruin(device.context, result.CUDA_ERROR_LAUNCH_TIMEOUT, text)
        self._jump, self._waited = _FIRST_JUMP, 0.0

    def hesitate(self) -> None:
        """At a launch of a replayable run: sometimes let others go first, so that ranks are skewed."""
        baton = self.baton
        if baton is not None and baton.seated and not self.turn.mine and baton.draws.random() < 0.25:
            baton.yield_()


UNIT: Final = 1 << 20  # shares of one multiprocessor

ENGINE: Final = Engine()


class Session:
    """The devices of one ``run_ranks``: ``baton`` is there if the run is replayable."""

    def __init__(self, baton: Baton | None) -> None:
        self.baton = baton
        self.aborted = False

    def abort(self, why: str) -> None:
        """End what still runs on the devices, so that threads in a synchronise return."""
        self.aborted = True
        ENGINE.stop(why)

    def give_back(self) -> None:
        """Let the contexts work again that the abort has ruined: the next run borrows the same devices."""
        for device in MACHINE.devices:
            context = device.context
            if self.aborted and context is not None and context.error == result.CUDA_ERROR_LAUNCH_TIMEOUT:
                context.error = None


_in_session = threading.Lock()


@contextmanager
def session(
    n: int, *, fabric: str | None = None, seed: int | None = None, residency: int | None = None
) -> Iterator[Session]:
    """Lend ``n`` devices to a run whose ranks are threads; None leaves a value as it is configured.

    Raises RuntimeError if another such run is going on in this process.
    """
    if not _in_session.acquire(False):
        raise RuntimeError("another run_ranks is going on in this process; they cannot share the devices")
    try:
        before = {"fabric": CONFIG.fabric, "seed": CONFIG.seed, "residency": CONFIG.residency}
        asked = {"fabric": fabric, "seed": seed, "residency": residency}
        configure(**{**before, **{name: value for name, value in asked.items() if value is not None}})
        MACHINE.grow(n)
        baton = None
        if CONFIG.fabric == "adversarial":
            for device in MACHINE.devices:
                device.serial = 0  # names of memory are part of the replay
            baton = Baton(CONFIG.seed, n, ENGINE.step, _clock, _jump)
            MACHINE.fabric.hasten(False)  # all ranks look by turns, in this process
        ENGINE.baton = baton
        ENGINE.draws = baton.draws if baton is not None else random.Random(CONFIG.seed)
        lent = Session(baton)
        try:
            yield lent
        finally:
            ENGINE.baton = None
            _drain()
            lent.give_back()
            configure(**before)
    finally:
        _in_session.release()


def _index(device: Device) -> int:
    return device.index


def _clock() -> float:
    return MACHINE.fabric.now() / 1e9


def _jump(when: float) -> None:
    MACHINE.fabric.advance(max(int(when * 1e9) - MACHINE.fabric.now(), 0) + 1)


def _drain(seconds: float = 5.0) -> None:
    """Let work that the ranks have left behind end, or end it."""
    end = time.monotonic() + seconds
    ENGINE.wait(lambda: not MACHINE.working or time.monotonic() > end)
    if MACHINE.working:
        ENGINE.stop(f"work was left behind and did not end within {seconds:g} s")
