"""``run_ranks``: a whole world in one process, a thread and an emulated device for each rank.

For notebooks, for worlds larger than the machine, and, with a seed, for runs that replay exactly. The communicator
speaks the part of mpi4py's interface that a small program and our own rendezvous need.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeVar

from .. import driver
from ..errors import LamportError
from .baton import Baton

__all__ = ["RankAborted", "RanksTimeout", "ThreadComm", "ThreadRequest", "run_ranks"]

T = TypeVar("T")

_GRACE: Final = 5.0  # seconds for released ranks to unwind


class RankAborted(LamportError):
    """This rank was released from a wait because another rank of the same run_ranks failed."""


class RanksTimeout(LamportError, TimeoutError):
    """run_ranks ran past its limit of time; ``ranks`` were still running, and the message shows where."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class _World:
    """What the ranks of one run share: one lock, the messages on their way, the collectives that some have entered."""

    def __init__(self, size: int, baton: Baton | None) -> None:
        self.size = size
        self.baton = baton
        self.lock = threading.Lock()
        self.aborted: str | None = None
        self._news = [threading.Condition(self.lock) for _ in range(size)]
        self._counts = [0] * size

    def tell(self, world_rank: int) -> None:
        """Something happened that this rank may wait for. With the lock held."""
        self._counts[world_rank] += 1
        self._news[world_rank].notify_all()

    def abort(self, why: str) -> None:
        """Release everybody who waits."""
        with self.lock:
            if self.aborted is None:
                self.aborted = why
            for rank in range(self.size):
                self.tell(rank)

    def check(self) -> None:
        if self.aborted is not None:
            raise RankAborted(f"released from a wait: {self.aborted}")

    def wait(self, world_rank: int, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until ``ready()`` (evaluated with the lock held); False after ``seconds``. Raises RankAborted."""
        if self.baton is not None and self.baton.seated:
            done = self.baton.wait(lambda: self.aborted is not None or ready(), seconds)
            self.check()
            return done
        with self.lock:
            done = self._news[world_rank].wait_for(lambda: self.aborted is not None or ready(), seconds)
            self.check()
            return done

    def pause(self, world_rank: int, seconds: float) -> None:
        """Until something happens that concerns this rank, at most ``seconds``."""
        before = self._counts[world_rank]
        self.wait(world_rank, lambda: self._counts[world_rank] != before, seconds)


class _Collective:
    """One collective call of one communicator, as far as its ranks have come."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.parts: dict[int, Any] = {}
        self.left = size  # ranks that have not fetched the result
        self.groups: dict[Any, _Group] = {}  # new communicators by color


class _Group:
    """The shared part of one communicator: its members (ranks of the world), its mailboxes, its collectives."""

    def __init__(self, world: _World, members: Sequence[int]) -> None:
        self.world = world
        self.members = list(members)
        self.sent: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)  # (source, destination, tag)
        self.posted: dict[tuple[int, int, int], deque[_Receive]] = defaultdict(deque)
        self.collectives: dict[int, _Collective] = {}


class ThreadRequest:
    """A nonblocking operation: ``Test``, ``Wait``, ``Cancel``, as mpi4py has them."""

    def __init__(self, comm: ThreadComm, test: Callable[[], bool] | None = None) -> None:
        self._comm = comm
        self._test = test  # None: complete already

    def _poll(self) -> bool:
        if self._test is not None and self._test():
            self._test = None
        return self._test is None

    def Test(self) -> bool:
        """True once the operation is complete."""
        world = self._comm._world
        world.check()
        with world.lock:
            return self._poll()

    def Wait(self, timeout: float | None = None) -> bool:
        """Wait until it is complete; False after ``timeout`` seconds (ours; MPI has none)."""
        return self._comm._world.wait(self._comm._world_rank, self._poll, timeout)

    def Cancel(self) -> None:
        """Only a receive can be given up; a collective cannot."""

    def Free(self) -> None:
        """Nothing to free."""


class _Receive(ThreadRequest):
    """A posted receive."""

    def __init__(self, comm: ThreadComm, key: tuple[int, int, int], target: memoryview) -> None:
        super().__init__(comm, self._arrived)
        self._key = key
        self._target = target
        self._got: int | None = None

    def take(self, data: bytes) -> None:
        self._got = len(data)
        if len(data) <= len(self._target):
            self._target[: len(data)] = data

    def _arrived(self) -> bool:
        if self._got is not None and self._got > len(self._target):
            raise ValueError(f"message truncated: {self._got} bytes came for a buffer of {len(self._target)}")
        return self._got is not None

    def Cancel(self) -> None:
        """Give the receive up; its buffer is not touched any more."""
        with self._comm._world.lock:
            if self._got is None and self._test is not None:
                self._comm._group.posted[self._key].remove(self)
            self._test = None


class ThreadComm:
    """The communicator of ``run_ranks``: mpi4py's names, for ranks that are threads."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._world = group.world
        self._rank = rank
        self._world_rank = group.members[rank]
        self._calls = 0
        self._freed = False

    def __repr__(self) -> str:
        return f"<ThreadComm rank {self._rank} of {self.size}>"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._group.members)

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._group.members)

    # Beyond mpi4py: how our rendezvous waits

    @property
    def virtual(self) -> bool:
        """Whether time is virtual and only one rank runs at a time: then nothing else than ``pause`` may sleep."""
        return self._world.baton is not None

    def pause(self, seconds: float) -> None:
        """Sleep until a message or a completion for this rank arrives, at most ``seconds``."""
        self._world.pause(self._world_rank, seconds)

    def clock(self) -> float:
        """Seconds; virtual in a replayable run."""
        return self._world.baton.now() if self._world.baton is not None else time.monotonic()

    # Point to point

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> ThreadRequest:
        """Send the bytes of ``buf``; they are copied at once."""
        data = bytes(_bytes_of(buf))
        key = (self._rank, self._peer(dest), tag)
        with self._world.lock:
            self._group.sent[key].append(data)
            _deliver(self._group, key)
            self._world.tell(self._group.members[dest])
        return ThreadRequest(self)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> ThreadRequest:
        """Receive into ``buf`` (no wildcards). A longer message is an error, as in MPI."""
        key = (self._peer(source), self._rank, tag)
        request = _Receive(self, key, _bytes_of(buf))
        with self._world.lock:
            self._group.posted[key].append(request)
            _deliver(self._group, key)
        return request

    def Iprobe(self, source: int, tag: int = 0) -> bool:
        """Whether a message waits that no posted receive has taken (no wildcards)."""
        self._world.check()
        with self._world.lock:
            return bool(self._group.sent[(self._peer(source), self._rank, tag)])

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in 0..{self.size - 1}")
        return rank

    # Collectives: everybody gives a part, everybody sees all parts

    def _enter(self, kind: str, part: Any) -> tuple[_Collective, Callable[[], bool]]:
        if self._freed:
            raise LamportError(f"{kind} on a communicator that was freed")
        call, self._calls = self._calls, self._calls + 1
        group, world = self._group, self._world
        world.check()
        with world.lock:
            known = group.collectives.setdefault(call, _Collective(kind, self.size))
            if known.kind != kind:
                raise LamportError(
                    f"ranks disagree about collective {call}: rank {self._rank} {kind}, another {known.kind}"
                )
            known.parts[self._rank] = part
            if len(known.parts) == self.size:
                for member in group.members:
                    world.tell(member)
        left = False

        def complete() -> bool:
            nonlocal left
            if len(known.parts) < len(group.members):
                return False
            if not left:
                left = True
                known.left -= 1
                if known.left == 0:
                    group.collectives.pop(call, None)
            return True

        return known, complete

    def _all(self, kind: str, part: Any) -> list[Any]:
        known, complete = self._enter(kind, part)
        self._world.wait(self._world_rank, complete)
        return [known.parts[rank] for rank in range(self.size)]

    def Ibarrier(self) -> ThreadRequest:
        return ThreadRequest(self, self._enter("barrier", None)[1])

    def Barrier(self) -> None:
        self._all("barrier", None)

    barrier = Barrier

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> ThreadRequest:
        """Gather equal buffers of all ranks, in rank order, into ``recvbuf``."""
        known, complete = self._enter("Allgather", bytes(_bytes_of(sendbuf)))
        target = _bytes_of(recvbuf)

        def done() -> bool:
            if not complete():
                return False
            _fill(target, [known.parts[rank] for rank in range(self.size)])
            return True

        return ThreadRequest(self, done)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        _fill(_bytes_of(recvbuf), self._all("Allgather", bytes(_bytes_of(sendbuf))))

    def Bcast(self, buf: Any, root: int = 0) -> None:
        parts = self._all("Bcast", bytes(_bytes_of(buf)) if self._rank == root else None)
        if self._rank != root:
            _fill(_bytes_of(buf), [parts[root]])

    def allgather(self, sendobj: T) -> list[T]:
        return [pickle.loads(part) for part in self._all("allgather", pickle.dumps(sendobj))]

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        return pickle.loads(self._all("bcast", pickle.dumps(obj) if self._rank == root else None)[root])

    def gather(self, sendobj: T, root: int = 0) -> list[T] | None:
        parts = self._all("gather", pickle.dumps(sendobj))
        return [pickle.loads(part) for part in parts] if self._rank == root else None

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:
        """Reduce in rank order with ``op(a, b)`` (None: the sum)."""
        total, *rest = self.allgather(sendobj)
        for part in rest:
            total = total + part if op is None else op(total, part)
        return total

    # Communicators

    def _child(self, known: _Collective, color: Any, key: Any) -> ThreadComm | None:
        """The communicator of ``color`` after a split collective. With the lock held."""
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((k, rank) for rank, (c, k) in known.parts.items() if c == color)]
        if color not in known.groups:
            known.groups[color] = _Group(self._world, [self._group.members[rank] for rank in ranks])
        return ThreadComm(known.groups[color], ranks.index(self._rank))

    def Split(self, color: int = 0, key: int = 0) -> ThreadComm | None:
        """A communicator of the ranks with the same ``color``; a negative one (MPI.UNDEFINED) gives None."""
        known, complete = self._enter("Split", (None if color < 0 else color, key))
        self._world.wait(self._world_rank, complete)
        with self._world.lock:
            return self._child(known, *known.parts[self._rank])

    def Split_type(self, split_type: int = 0, key: int = 0) -> ThreadComm | None:
        """All ranks live on one host."""
        return self.Split(0, key)

    def Idup(self) -> tuple[ThreadComm, ThreadRequest]:
        """A duplicate, usable once the request is complete."""
        known, complete = self._enter("Idup", (0, self._rank))
        unborn = ThreadComm(self._group, self._rank)

        def born() -> bool:
            if not complete():
                return False
            child = self._child(known, 0, self._rank)
            assert child is not None
            unborn._group = child._group
            return True

        return unborn, ThreadRequest(self, born)

    def Dup(self) -> ThreadComm:
        comm, request = self.Idup()
        request.Wait()
        return comm

    Clone = Dup

    def Free(self) -> None:
        self._freed = True

    def Abort(self, errorcode: int = 1) -> None:
        """End the run: every rank that waits raises RankAborted."""
        self._world.abort(f"rank {self._rank} called Abort({errorcode})")


def _deliver(group: _Group, key: tuple[int, int, int]) -> None:
    sent, posted = group.sent[key], group.posted[key]
    while sent and posted:
        posted.popleft().take(sent.popleft())


def _bytes_of(buf: Any) -> memoryview:
    """The bytes behind a buffer or mpi4py's [buffer, ...] form."""
    view = memoryview(buf[0] if isinstance(buf, (list, tuple)) else buf)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return view.cast("B")


def _fill(target: memoryview, parts: list[bytes]) -> None:
    data = b"".join(parts)
    if len(data) > len(target):
        raise ValueError(f"{len(data)} bytes arrived for a buffer of {len(target)}")
    target[: len(data)] = data


def run_ranks(
    n: int,
    fn: Callable[[ThreadComm], T],
    *,
    fabric: str | None = None,
    seed: int | None = None,
    residency: int | None = None,
    timeout: float = 600.0,
) -> list[T]:
    """Run ``fn(comm)`` as ``n`` ranks, each a thread with its own emulated device, and return their results in rank
    order.

    ``fabric`` ("immediate" or "adversarial"), ``seed`` and ``residency`` (CTAs a device holds at once) configure the
    emulated devices for this run; None is what LAMPORT_NUMBA_FABRIC, _SEED and _RESIDENCY say. With a seed and the
    adversarial fabric the whole run replays exactly. Inside ``fn`` the library's default device is the rank's own.

    Raises the first exception that a rank raised, with a note naming the rank (attribute ``raised_on_rank``); the
    others are released from what they wait for. Raises RanksTimeout, naming the ranks that still run, after ``timeout``
    seconds.
    """
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n is {n!r}; expected the number of ranks, an integer from 1")
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 rank")
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; expected a function of one argument, the rank's communicator")
    with _devices(n, fabric, seed, residency) as session:
        return _run(n, fn, session, timeout)


class Session(Protocol):
    """The emulated devices of one run, as the engine lends them."""

    baton: Baton | None  # of a replayable run

    def abort(self, why: str) -> None:
        """End what still runs on the devices, so that threads in a synchronise return."""


def _run(n: int, fn: Callable[[ThreadComm], T], session: Session | None, timeout: float) -> list[T]:
    baton = None if session is None else session.baton
    world = _World(n, baton)
    group = _Group(world, range(n))
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []
    running = set(range(n))
    settled = threading.Event()  # all have ended, or one has failed

    def fail(rank: int, error: BaseException) -> None:
        errors.append((rank, error))
        world.abort(f"rank {rank} raised {type(error).__name__}: {error}")
        settled.set()

    def body(rank: int) -> None:
        try:
            with _seat(baton, rank), driver.thread_defaults(kind="emulated", device=rank, rank=rank):
                try:
                    results[rank] = fn(ThreadComm(group, rank))
                except BaseException as error:
                    fail(rank, error)
        except BaseException as error:  # the baton itself failed
            fail(rank, error)
        with world.lock:
            running.discard(rank)
            if not running:
                settled.set()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    try:
        settled.wait(timeout)
    except BaseException as error:
        _stop(world, session, threads, f"run_ranks was ended by {type(error).__name__}")
        raise
    if errors:
        _stop(world, session, threads, "another rank failed")
        raise _noted(*_root(errors))
    if not settled.is_set():
        with world.lock:
            late = tuple(sorted(running))
        where = _where(threads)
        _stop(world, session, threads, f"run_ranks passed its limit of {timeout:g} s")
        raise RanksTimeout(f"ranks {', '.join(map(str, late))} still ran after {timeout:g} s\n{where}", late)
    _join(threads, _GRACE)
    return results


def _stop(world: _World, session: Session | None, threads: list[threading.Thread], why: str) -> None:
    """Release the ranks that wait for each other, and after a moment also those that wait for a device."""
    world.abort(why)
    _join(threads, _GRACE)
    if session is not None and any(thread.is_alive() for thread in threads):
        session.abort(why)
        _join(threads, _GRACE)


def _root(errors: list[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """The first error that is not the echo of another's."""
    return next((pair for pair in errors if not isinstance(pair[1], RankAborted)), errors[0])


def _noted(rank: int, error: BaseException) -> BaseException:
    note = f"raised on rank {rank} of run_ranks"
    try:
        error.raised_on_rank = rank  # type: ignore[attr-defined]
        if sys.version_info >= (3, 11):
            error.add_note(note)
    except AttributeError:
        pass  # an exception with slots keeps its own counsel
    return error


def _join(threads: list[threading.Thread], timeout: float) -> None:
    """Join all, at most ``timeout`` seconds together."""
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))


def _where(threads: list[threading.Thread]) -> str:
    """The innermost frames of the threads that still run."""
    frames = sys._current_frames()
    text = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if thread.is_alive() and frame is not None:
            text.append(f"{thread.name}:\n{''.join(traceback.format_stack(frame)[-4:])}")
    return "".join(text)


@contextmanager
def _seat(baton: Baton | None, rank: int) -> Iterator[None]:
    if baton is None:
        yield
        return
    baton.join(rank)
    try:
        yield
    finally:
        baton.leave()


def _devices(
    n: int, fabric: str | None, seed: int | None, residency: int | None
) -> AbstractContextManager[Session | None]:
    """The emulated devices of one run: ``engine.session`` of the emulated driver."""
    try:
        engine: Any = importlib.import_module(".engine", __package__)
    except ModuleNotFoundError:
        return nullcontext()
    session: AbstractContextManager[Session] = engine.session(n, fabric=fabric, seed=seed, residency=residency)
    return session
