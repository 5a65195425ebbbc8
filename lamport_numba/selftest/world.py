"""What a case works with: the ranks, payloads that differ by rank and position, device memory, and a record of what
was wrong. A wrong word is recorded and does not raise, so that the ranks stay in step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import driver
from ..arrays import device_array
from ..collectives import LamportAllGather
from ..driver import structs
from ..graphs import Graph

Words = np.ndarray[Any, np.dtype[np.uint32]]

SENTINEL = np.uint32(0x80000000)
PACK = 16  # bytes
_MOST_PROBLEMS = 5  # recorded a case and rank; the rest is counted


class World:
    """One rank's view of a case.

    ``collective`` builds the all-gather (``LamportAllGather`` by default) with ``options``; ``exact`` says that it
    delivers the sentinel as it is. ``largest`` is the capacity in bytes that a case with large sizes should reach.
    """

    def __init__(
        self,
        comm: Any,
        *,
        collective: Callable[..., Any] | None = None,
        exact: bool = False,
        options: Mapping[str, Any] | None = None,
        largest: int | None = None,
    ) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.drv = driver.select()
        self.device = self.drv.default_device()
        self.exact = exact
        self.options = {"transport": "auto", "timeout": 30.0, **(options or {})}
        self.transports: set[str] = set()  # that were used
        self.calls = 0
        self.problems: list[str] = []
        self.unlisted = 0
        if largest is None:
            largest = 1 << 20 if self.drv.kind == "cuda" else 1 << 16 if self.size <= 4 else 1 << 12
        self.largest = largest
        self._collective = collective or LamportAllGather
        self._pending: list[tuple[Any, Any, str]] = []
        self._held: list[Any] = []  # host memory of copies on their way

    # Gathers

    def build(self, capacity: Any, **options: Any) -> Any:
        """A new all-gather."""
        return self._collective(self.comm, capacity, **{**self.options, **options})

    @contextmanager
    def gather(self, capacity: int, **options: Any) -> Iterator[Any]:
        """A new all-gather; at the end it must have reported nothing and left nothing in any mailbox."""
        with self.build(capacity, **options) as made:
            used = made.transport
            self.transports |= {used} if isinstance(used, str) else set(used.values())
            yield made
            self.check_mailbox(made)

    def check_mailbox(self, gather: Any) -> None:
        """Every rank's mailbox is all sentinel once all ranks are done (I1), and the device has reported nothing."""
        self.drv.call("cuCtxSynchronize")
        self.comm.Barrier()
        gather.check()
        for transport, channel in gather._channels.items():
            residue: list[int] = channel.residue() if hasattr(channel, "residue") else []
            if residue:
                self.problem(f"{len(residue)} words are left in the mailbox of {transport}, the first at {residue[0]}")
        self.comm.Barrier()  # nobody publishes before all have looked

    # Payloads

    def payload(self, call: int, nbytes: int, rank: int | None = None) -> Words:
        """What ``rank`` (this one) sends in ``call``: no two ranks, calls or positions have the same words."""
        seed = (self.rank if rank is None else rank) * 0x85EBCA6B + call * 0xC2B2AE35
        words = np.arange(nbytes // 4, dtype=np.uint64) * np.uint64(0x9E3779B1) + np.uint64(seed & 0xFFFFFFFF)
        mixed = (words ^ (words >> np.uint64(15))) & np.uint64(0xFFFFFFFF)
        return mixed.astype(np.uint32)

    def expected(self, parts: list[Words]) -> Words:
        """What all ranks receive of these parts: in rank order, the sentinel as 0."""
        words = np.concatenate([np.ascontiguousarray(part).view(np.uint32).reshape(-1) for part in parts])
        return words if self.exact else np.where(words == SENTINEL, np.uint32(0), words)

    # Device memory. Copies go through the driver, on the stream that is named.

    def empty(self, nbytes: int, dtype: Any = np.float32) -> Any:
        """A one-dimensional device array of ``nbytes`` bytes."""
        return device_array((nbytes // np.dtype(dtype).itemsize,), dtype, device=self.device, drv=self.drv)

    def array(self, host: np.ndarray[Any, Any], stream: int = 0) -> Any:
        """A device array with the contents of ``host``."""
        made = device_array(host.shape, host.dtype, device=self.device, drv=self.drv)
        self.write(made, host, stream)
        return made

    def floats(self, words: Words, stream: int = 0) -> Any:
        """A float32 device array with these bits."""
        return self.array(words.view(np.float32), stream)

    def write(self, array: Any, host: np.ndarray[Any, Any], stream: int = 0) -> None:
        """Copy ``host`` into a contiguous device array."""
        host = np.array(host, order="C")
        self._held.append(host)
        self.drv.call("cuMemcpyHtoDAsync", address_of(array), host.ctypes.data, host.nbytes, stream)

    def read(self, array: Any, nbytes: int, stream: int = 0) -> Words:
        """The 32-bit words of a contiguous device array, after all work of the stream."""
        words = np.empty(nbytes // 4, np.uint32)
        self.drv.call("cuMemcpyDtoHAsync", words.ctypes.data, address_of(array), nbytes, stream)
        self.drv.call("cuStreamSynchronize", stream)
        self._held.clear()
        return words

    @contextmanager
    def stream(self) -> Iterator[int]:
        """A new stream, as a handle."""
        made = self.drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            yield int(made)
        finally:
            self.drv.call("cuStreamSynchronize", made)
            self.drv.call("cuStreamDestroy", made)

    @contextmanager
    def graph(self, stream: int, capture: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """What ``capture()`` queues on the stream, as a graph; gives a function that launches it there."""
        with Graph(self.drv, stream, capture) as made:
            yield made.launch

    # Calls and their check

    def queue(self, gather: Any, nbytes: int, stream: int = 0) -> None:
        """Queue one call with its own payload and output, to be checked by ``settle``."""
        call = self.calls
        self.calls += 1
        out = self.empty(nbytes * self.size)
        gather(self.floats(self.payload(call, nbytes), stream), out=out, stream=stream)
        self.expect_later(out, [self.payload(call, nbytes, rank) for rank in range(self.size)], f"call {call}")

    def expect_later(self, out: Any, parts: list[Words], what: str) -> None:
        """Have ``settle`` compare ``out`` with these parts."""
        self._pending.append((out, self.expected(parts), what))

    def settle(self, stream: int = 0) -> None:
        """Wait for the stream and compare everything that was queued."""
        pending, self._pending = self._pending, []
        for out, words, what in pending:
            self.compare(self.read(out, words.nbytes, stream), words, what)

    def expect(self, out: Any, parts: list[Words], what: str, stream: int = 0) -> None:
        """Wait for the stream and compare ``out`` with these parts."""
        words = self.expected(parts)
        self.compare(self.read(out, words.nbytes, stream), words, what)

    def compare(self, found: Words, words: Words, what: str) -> None:
        """Record the first word that differs, and how many do."""
        wrong = np.flatnonzero(found != words)
        if len(wrong):
            first = int(wrong[0])
            source, place = divmod(first, len(words) // self.size)
            self.problem(
                f"{what}: {len(wrong)} of {len(words)} words differ; the first is word {place} of rank {source}'s "
                f"part: {int(found[first]):#010x}, expected {int(words[first]):#010x}"
            )

    def require(self, holds: bool, what: str) -> None:
        """Record ``what`` unless it holds."""
        if not holds:
            self.problem(what)

    def refuses(
        self, kind: type[Exception], what: str, action: Callable[..., object], *args: Any, **options: Any
    ) -> None:
        """Record it unless ``action(*args, **options)`` raises ``kind``."""
        try:
            action(*args, **options)
        except kind:
            return
        self.problem(f"{what} was not refused")

    def problem(self, text: str) -> None:
        """Record what is wrong on this rank."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"rank {self.rank}: {text}")
        else:
            self.unlisted += 1


def address_of(array: Any) -> int:
    """The device address of an array."""
    return int(array.__cuda_array_interface__["data"][0])


@dataclass
class Result:
    """What came of a case, the same on every rank: passed if no rank has a problem."""

    name: str
    passed: bool
    seconds: float
    calls: int
    transports: list[str]
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_case(name: str, function: Callable[[World], None], world: World) -> Result:
    """Run a case on all ranks; collective. An exception on a rank is a problem like a wrong word."""
    started = time.monotonic()
    try:
        with world.drv.current(world.device):
            function(world)
    except Exception as error:
        world.problem(f"{type(error).__name__}: {error}")
    if world.unlisted:
        world.problems.append(f"rank {world.rank}: and {world.unlisted} more")
    everybody = world.comm.allgather(world.problems)
    problems = [text for problems in everybody for text in problems]
    seconds = round(time.monotonic() - started, 3)
    return Result(name, not problems, seconds, world.calls, sorted(world.transports), problems)
