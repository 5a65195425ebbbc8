"""Rendezvous on the host: our own duplicate of a communicator, and waits that end by a deadline and say who is missing.

Ranks send each other fixed-size frames, so a rank that waits knows exactly whose frame has not come. When its deadline
passes it calls the roll: it tells everybody that the rendezvous is over and listens for a moment. A rank that only
waited for somebody else answers with what *it* misses; so all end with the same names, and a messenger is not blamed. A
rank that comes too late finds the roll call and raises as well.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from .. import settings
from ..errors import ClosedError, LamportError, MulticastUnavailable, PeerTimeout, RendezvousTimeout, SetupError

__all__ = ["Communicator", "OutOfStep", "Step"]

_TAG: Final = 32101  # below 32767, the smallest upper bound that MPI promises
_ROLL_TAG: Final = 32102
_FRAME: Final = 2048  # bytes of every message
_HEADER: Final = struct.Struct("<4sIII")  # magic, number of the stage, checksum of its name, bytes of the whole payload
_MAGIC: Final = b"LNf1"
_ROOM: Final = _FRAME - _HEADER.size
_GRACE: Final = 0.75  # seconds to listen after the roll call
_LISTEN: Final = 0.02  # seconds between looks for a roll call

_abandoned: list[Any] = []  # requests that will never complete, and their buffers: MPI may still write to them


class OutOfStep(SetupError):
    """A rank has come to another stage than this one."""


class Step:
    """What a rank brings out of one step, and after the vote what all did."""

    value: Any = None
    values: Sequence[Any] = ()


class Communicator:
    """A duplicate of an mpi4py communicator, or of run_ranks's, for the library's own traffic. Collective.

    Attributes: ``rank``, ``size``, ``timeout`` (seconds; the deadline of each stage that is given none).

    Raises RendezvousTimeout (``missing`` names the ranks) if not all ranks come within ``timeout`` (None: what
    LAMPORT_NUMBA_SETUP_TIMEOUT says). After that the object refuses work.
    """

    def __init__(self, comm: Any, *, timeout: float | None = None) -> None:
        if not all(hasattr(comm, name) for name in ("Idup", "Isend", "Irecv", "Iprobe")):
            raise TypeError(
                f"comm is {comm!r}; expected an mpi4py communicator, as MPI.COMM_WORLD, or that of run_ranks"
            )
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
            raise ValueError(
                "comm is MPI.COMM_NULL; expected a communicator that has this process in it and is not freed"
            )
        if getattr(comm, "Is_inter", bool)():
            raise TypeError("comm is an inter-communicator; expected an intra-communicator")
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())
        self.timeout = float(settings.get("SETUP_TIMEOUT")) if timeout is None else float(timeout)
        self._pid = os.getpid()
        self._clock: Callable[[], float] = getattr(comm, "clock", time.monotonic)
        self._pause: Callable[[float], None] = getattr(comm, "pause", time.sleep)
        self._longest = _LISTEN if hasattr(comm, "pause") else 1e-3  # that pause ends when something arrives
        self._virtual = bool(getattr(comm, "virtual", False))  # time is, and only run_ranks may sleep
        self._stage = 0
        self._over: Exception | None = None  # why the rendezvous is over
        self._called: dict[str, Any] = {}  # what this rank has answered to the roll
        self._heard: dict[int, dict[str, Any]] = {}  # the rolls that others have called
        self._freed = False
        self._ears = [comm]  # where a roll may be called: the caller's communicator only until all have ours
        self._comm = self._duplicate(comm)
        self._ears = [comm, self._comm]
        self.barrier("start")
        self._ears = [self._comm]

    # Stages

    def all_gather(self, data: bytes, stage: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's ``data`` (any size), in rank order. ``stage`` is the name that errors carry."""
        self._check()
        number = self._stage
        self._stage += 1
        exchange = _Exchange(self._comm, self.rank, number, stage, data)
        try:
            self._await(exchange.advance, exchange.missing, stage, timeout)
            self._listen(stage, exchange.missing, self.timeout if timeout is None else timeout, complete=True)
        except BaseException:
            exchange.abandon()
            raise
        return exchange.results()

    def barrier(self, stage: str, timeout: float | None = None) -> None:
        """Wait until all ranks have come to ``stage``."""
        self.all_gather(b"", stage, timeout)

    def agree(
        self, stage: str, value: Any = None, error: BaseException | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Every rank's ``value`` (what JSON can carry), in rank order; if any rank has an ``error`` all raise the same.

        It is a SetupError that names the lowest rank that failed, the call and the code, and a MulticastUnavailable if
        that rank's error was one. A rank that only waited for another one is not named first.
        """
        ballot = {"value": value} if error is None else {"error": _describe(self.rank, stage, error)}
        ballots = list(map(json.loads, self.all_gather(json.dumps(ballot, default=str).encode(), stage, timeout)))
        failed = [rank for rank, ballot in enumerate(ballots) if "error" in ballot]
        if failed:
            failed.sort(key=lambda rank: ballots[rank]["error"]["waited"])
            raise _rebuild(ballots[failed[0]]["error"], failed[1:]) from error
        return [ballot["value"] for ballot in ballots]

    def vote(self, stage: str, error: BaseException | None = None) -> None:
        """Tell all ranks whether this one has failed; if any has, every rank raises the same error (see ``agree``)."""
        self.agree(stage, None, error)

    @contextmanager
    def step(self, stage: str) -> Iterator[Step]:
        """A local piece of set-up, then a vote: if the block raises on any rank, every rank raises the same error.

        The block sets ``value``; after it ``values`` has all ranks'. It must not wait for other ranks.
        """
        step = Step()
        try:
            yield step
        except Exception as error:
            self.agree(stage, None, error)
            raise AssertionError("unreachable: a vote with an error raises") from error
        step.values = self.agree(stage, step.value)

    def wait(
        self,
        done: Callable[[], bool],
        missing: Callable[[], tuple[int, ...]],
        stage: str,
        idle: Callable[[float], None],
    ) -> None:
        """A stage of another kind: until ``done()``; after the deadline ``missing()`` says who was waited for.

        ``idle(seconds)`` sleeps until there may be something to do, at most ``seconds``.
        """
        self._check()
        self._stage += 1
        self._await(done, missing, stage, None, self._pause if self._virtual else idle)

    def sleep(self, seconds: float) -> None:
        """Wait; virtual time under a replayable run."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            self._pause(left)

    def split_host(self) -> tuple[int, int]:
        """This rank's number among the ranks of its host, and how many those are. Collective.

        By the host's boot id: ``Split_type`` would block without a deadline.
        """
        hosts = self.agree("host", boot_id())
        return hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])

    @property
    def healthy(self) -> bool:
        """Whether all ranks are in step, as far as this one knows."""
        return self._over is None and not self._freed

    @property
    def left(self) -> tuple[int, str] | None:
        """The lowest rank that is known to have given up outside of any stage, and its reason."""
        gone = [(rank, answer["reason"]) for rank, answer in self._heard.items() if not answer["stage"]]
        return min(gone, default=None)

    def give_up(self, reason: str) -> None:
        """Tell the others, without waiting, that this rank leaves; they raise SetupError at their next stage."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_finalized():
            return
        if self._over is None and not self._freed and os.getpid() == self._pid:
            self._over = ClosedError(f"this rank gave up: {reason}")
            self._call_roll("", (), reason)

    def free(self) -> None:
        """Free the duplicate. Collective; nothing may be under way. Idempotent."""
        if not self._freed and self._over is None and os.getpid() == self._pid:
            self._freed = True
            self._comm.Free()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this object belongs to process {self._pid} and cannot be used in its fork {os.getpid()}: "
                "neither MPI nor CUDA survives a fork; start processes by mpirun or by spawn"
            )
        if self._over is not None:
            raise self._over
        if self._freed:
            raise ClosedError("the communicator was closed")

    # Waiting

    def _duplicate(self, comm: Any) -> Any:
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        duplicate, request = comm.Idup()
        try:
            self._await(lambda: bool(request.Test()), lambda: others, "duplicate the communicator", None)
        except BaseException:
            _abandoned.append((duplicate, request))
            raise
        return duplicate

    def _await(
        self,
        done: Callable[[], bool],
        missing: Callable[[], tuple[int, ...]],
        stage: str,
        timeout: float | None,
        idle: Callable[[float], None] | None = None,
    ) -> None:
        """Call ``done`` until it is true, with a growing pause; raise when the deadline passes or a roll is called."""
        idle, longest = (self._pause, self._longest) if idle is None else (idle, _LISTEN)
        seconds = self.timeout if timeout is None else timeout
        start = self._clock()
        listen = start + _LISTEN
        pause = 0.0
        while True:
            try:
                if done():
                    return
            except Exception as error:
                typed = error if isinstance(error, LamportError) else self._failed(stage, error)
                self._over = typed
                self._call_roll(stage, (), str(typed))
                if typed is error:
                    raise
                raise typed from error
            now = self._clock()
            if now - start >= seconds:
                self._end(stage, missing(), seconds)
            if now >= listen:
                self._listen(stage, missing, seconds)
                listen = now + _LISTEN
            idle(max(min(pause, start + seconds - now), 0.0))
            pause = min(pause * 1.5 + 1e-5, longest)

    def _failed(self, stage: str, error: Exception) -> SetupError:
        return _rebuild(_describe(self.rank, stage, error), [])

    # The roll call

    def _listen(
        self, stage: str, missing: Callable[[], tuple[int, ...]], seconds: float, *, complete: bool = False
    ) -> None:
        """Raise if another rank has called the roll.

        A ``complete`` stage stands if a rank has merely left since (``give_up`` names no stage): the next one raises.
        """
        self._hear()
        if any(answer["stage"] or not complete for answer in self._heard.values()):
            self._end(stage, missing(), seconds)

    def _hear(self) -> None:
        """Take in the rolls that others have called."""
        for rank in range(self.size):
            if rank != self.rank and rank not in self._heard:
                answer = self._answer(rank)
                if answer is not None:
                    self._heard[rank] = answer

    def _call_roll(self, stage: str, missing: tuple[int, ...], reason: str | None) -> None:
        """Tell every other rank that the rendezvous is over."""
        if self._called:
            return
        # ASCII, and short enough for a frame
        self._called = said = {
            "number": self._stage,
            "stage": stage[:100],
            "missing": missing[:100],
            "reason": reason and reason.encode("ascii", "replace")[:1000].decode(),
        }
        text = json.dumps(said).encode()
        for rank in range(self.size):
            for comm in self._ears if rank != self.rank else ():
                with suppress(Exception):  # that rank is dead, and MPI knows
                    _leave(comm.Isend(text, dest=rank, tag=_ROLL_TAG), text)

    def _end(self, stage: str, missing: tuple[int, ...], seconds: float) -> NoReturn:
        """Call the roll, hear the others, and raise the error that all of them raise."""
        self._call_roll(stage, missing, None)
        end = self._clock() + _GRACE
        self._hear()
        while len(self._heard) < self.size - 1 and self._clock() < end:
            self._pause(0.005)
            self._hear()
        self._over = _verdict(self.rank, stage, seconds, self._called, self._heard)
        raise self._over

    def _answer(self, rank: int) -> dict[str, Any] | None:
        """What ``rank`` said when it called the roll, if it has."""
        for comm in self._ears:
            if comm.Iprobe(source=rank, tag=_ROLL_TAG):
                buffer = bytearray(_FRAME)
                comm.Irecv(buffer, source=rank, tag=_ROLL_TAG).Wait()
                answer: dict[str, Any] = json.loads(buffer.rstrip(b"\0"))
                return answer
        return None


def boot_id() -> str:
    """The same for all processes of a host until it restarts, containers included."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


class _Exchange:
    """One all-gather in frames: what has been sent, what has come from whom."""

    def __init__(self, comm: Any, rank: int, number: int, stage: str, data: bytes) -> None:
        self._comm = comm
        self._number = number
        self._check = zlib.crc32(stage.encode())
        self._name = stage
        self._parts: dict[int, bytearray] = {rank: bytearray(data)}
        self._size = int(comm.Get_size())
        self._sends: list[tuple[Any, int, bytes]] = []
        self._receives: dict[int, tuple[Any, bytearray]] = {}
        frames = list(_frames(number, self._check, data))
        for step in range(1, self._size):  # every rank starts with another, so that nobody is flooded
            peer = (rank + step) % self._size
            self._sends += [(comm.Isend(frame, dest=peer, tag=_TAG), peer, frame) for frame in frames]
            self._post(peer)

    def _post(self, source: int) -> None:
        buffer = bytearray(_FRAME)
        self._receives[source] = (self._comm.Irecv(buffer, source=source, tag=_TAG), buffer)

    def missing(self) -> tuple[int, ...]:
        """Ranks whose part has not come, or that have not taken ours."""
        return tuple(sorted({*self._receives, *(peer for _, peer, _ in self._sends)}))

    def results(self) -> list[bytes]:
        return [bytes(self._parts[rank]) for rank in range(self._size)]

    def advance(self) -> bool:
        """Take what has come; True when all has, and all of ours has left."""
        for source, (request, buffer) in list(self._receives.items()):
            if _test(request, source, self._name):
                self._take(source, buffer)
        self._sends = [send for send in self._sends if not _test(send[0], send[1], self._name)]
        return not self._receives and not self._sends

    def abandon(self) -> None:
        """Give up what has not come."""
        for request, buffer in self._receives.values():
            request.Cancel()
            _leave(request, buffer)
        for request, _, frame in self._sends:
            _leave(request, frame)

    def _take(self, source: int, frame: bytearray) -> None:
        magic, number, check, length = _HEADER.unpack_from(frame)
        if magic != _MAGIC or number != self._number or check != self._check:
            raise OutOfStep(
                f"rank {source} is at another stage than '{self._name}': do all ranks run the same version of the "
                "library and construct the same objects in the same order?",
                rank=source,
                step=self._name,
            )
        part = self._parts.setdefault(source, bytearray())
        part += frame[_HEADER.size : _HEADER.size + min(length - len(part), _ROOM)]
        if len(part) < length:
            self._post(source)
        else:
            del self._receives[source]


def _leave(request: Any, buffer: Any) -> None:
    """Keep a request that is not complete, and its buffer, for as long as MPI may touch them."""
    try:
        if request.Test():
            return
    except Exception:
        return
    _abandoned.append((request, buffer))


def _test(request: Any, peer: int, stage: str) -> bool:
    try:
        return bool(request.Test())
    except Exception as error:
        if type(error).__module__ != "mpi4py.MPI":  # run_ranks's own errors pass
            raise
        raise SetupError(f"rank {peer} cannot be reached at '{stage}': {error}", rank=peer, step=stage) from error


def _frames(number: int, check: int, data: bytes) -> list[bytes]:
    header = _HEADER.pack(_MAGIC, number, check, len(data))
    cuts = max(math.ceil(len(data) / _ROOM), 1)
    return [(header + data[i * _ROOM : (i + 1) * _ROOM]).ljust(_FRAME, b"\0") for i in range(cuts)]


def _verdict(
    me: int, stage: str, seconds: float, mine: dict[str, Any], answers: dict[int, dict[str, Any]]
) -> SetupError:
    """Who is to blame: a rank that was missed at the earliest stage where anybody waits, and did not answer the roll.

    If all have answered, it is whoever most ranks missed: it came too late.
    """
    for rank in sorted(answers):
        if answers[rank]["reason"]:
            return SetupError(f"rank {rank} gave up: {answers[rank]['reason']}", rank=rank, step=stage)
    said = {**answers, me: mine}
    earliest = min(report["number"] for report in said.values())
    # in the duplication every rank misses all others, so there the late one learns from the others alone
    told = answers if answers and mine["number"] == 0 else said
    missed = Counter(rank for report in told.values() if report["number"] == earliest for rank in report["missing"])
    silent = tuple(sorted(set(missed) - set(said)))
    if silent:
        return RendezvousTimeout(stage, silent, seconds)
    most = max(missed.values(), default=0)
    late = tuple(sorted(rank for rank, count in missed.items() if count == most))
    who = f"this rank, {me}," if me in late else "they" if len(late) > 1 else "it"
    return RendezvousTimeout(stage, late, seconds, detail=f"{who} came after the deadline of the others")


def _describe(rank: int, stage: str, error: BaseException) -> dict[str, Any]:
    text = str(error) or type(error).__name__
    return {
        "rank": rank,
        "stage": stage,
        "text": text.removeprefix(f"rank {rank}: "),
        "call": getattr(error, "call", None),
        "code": getattr(error, "code", None),
        "waited": isinstance(error, PeerTimeout),
        "reason": error.reason if isinstance(error, MulticastUnavailable) else None,
    }


def _rebuild(said: dict[str, Any], also: list[int]) -> SetupError:
    """The error that every rank raises."""
    message = f"rank {said['rank']} failed at '{said['stage']}': {said['text']}"
    if also:
        message += f" (and so did rank{'s' if len(also) > 1 else ''} {', '.join(map(str, also))})"
    where = {"rank": said["rank"], "step": said["stage"], "call": said["call"], "code": said["code"]}
    if said["reason"] is not None:
        return MulticastUnavailable(message, reason=said["reason"], **where)
    return SetupError(message, **where)
