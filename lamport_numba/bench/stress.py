"""The long run: gathers of alternating sizes back to back, every word of every output checked on the device.

Calls come in bursts of one to ``burst``: the payloads of a burst are made, its gathers follow each other with nothing
between, its outputs are checked. So both happen all the time: gathers right behind each other, and ranks that drift
apart. Sizes and bursts are drawn from the seed, alike on all ranks; now and then a rank is late, by a draw of its own.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..collectives import LamportAllGather, PreparedCall
from ..collectives.launch import Block
from ..driver import select
from ..errors import LamportError
from ..graphs import Graph
from . import sizes
from .host import Host
from .payload import Mismatch, Payloads, State
from .rig import Rig, address_of, name_of
from .sizes import Span

__all__ = ["Options", "Outcome", "run"]

_POOL = 64  # different sizes of a run
_GRAPHS = 8  # different graphs of a run
_AHEAD = 4  # chunks that may be queued
_TICK = 1.0  # seconds between looks at the device's alarm

Chunk = list[list[int]]  # bursts of sizes


@dataclass(frozen=True)
class Options:
    """What to run. ``chunk``: the calls of a graph, or between two looks; sizes in bytes of one rank."""

    calls: int
    spans: list[Span]
    seed: int = 0
    graph: bool = False
    chunk: int = 100
    burst: int = 8
    transport: str = "auto"
    timeout: float = 30.0
    pdl: bool = True
    foreign: bool = False
    late: bool = True
    device: int | None = None


@dataclass
class Outcome:
    """What came of it, the same on all ranks; lists have an entry a rank."""

    world: int
    transport: str
    device: str
    calls: int = 0
    seconds: float = 0.0
    bad_words: list[int] = field(default_factory=list)
    bad_calls: list[int] = field(default_factory=list)
    first: list[dict[str, int] | None] = field(default_factory=list)
    residue: list[int] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether every call was made and checked, and nothing was wrong."""
        wrong = any(self.bad_words) or any(self.residue) or any(self.errors)
        return not wrong and all(count == self.calls for count in self.checked)

    def first_mismatch(self) -> tuple[int, Mismatch] | None:
        """(the rank that saw it, the mismatch): that of the earliest call."""
        found = [(Mismatch(**one), rank) for rank, one in enumerate(self.first) if one is not None]
        if not found:
            return None
        mismatch, rank = min(found, key=lambda pair: pair[0].call)
        return rank, mismatch


def run(comm: Any, options: Options, *, progress: Callable[[int, float], None] | None = None) -> Outcome:
    """Run it; collective. ``progress`` is called now and then with the calls done and the seconds since the start.

    An error that the device reports ends the run and is part of the outcome. Raises what the construction raises.
    """
    host = Host(comm)
    capacity = max(span.high for span in options.spans)
    gather = LamportAllGather(
        comm, capacity, transport=options.transport, timeout=options.timeout, pdl=options.pdl, device=options.device
    )
    drv = select().for_rank(gather.rank)
    try:
        with drv.current(gather.device):
            rig = Rig(drv, gather.device)
            outcome = _Run(host, gather, rig, options, progress).outcome()
            if any(outcome.errors):
                gather.abandon()
            else:
                gather.close()
                host.free()
            rig.close()
    except BaseException:
        gather.abandon()
        raise
    return outcome


class _Run:
    def __init__(
        self,
        host: Host,
        gather: LamportAllGather,
        rig: Rig,
        options: Options,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.host, self.gather, self.rig, self.options, self.progress = host, gather, rig, options, progress
        self.rng = random.Random(options.seed)
        self.own = random.Random(f"{options.seed} {gather.rank}")
        capacity, world = gather.rank_capacity_bytes, gather.world_size
        self.pool = [sizes.draw(options.spans, self.rng) for _ in range(_POOL)]
        self.inputs = [rig.array(capacity) for _ in range(options.burst)]
        self.outputs = [rig.array(capacity * world) for _ in range(options.burst)]
        self.prepared: dict[tuple[int, int], tuple[int, int, PreparedCall]] = {}
        self.payloads = Payloads(rig, gather.rank, world, pdl=options.pdl)
        self.foreign = self._foreign_kernel() if options.foreign else None

    def outcome(self) -> Outcome:
        gather, host = self.gather, self.host
        found = Outcome(gather.world_size, name_of(gather.transport), self.rig.drv.device_name(gather.device))
        found.calls = self.options.calls
        error: str | None = None
        host.barrier("start the stress run")
        start = time.perf_counter()
        try:
            self._calls()
            self.rig.synchronize()
            gather.check()
        except LamportError as failure:
            error = f"{type(failure).__name__}: {failure}"
        found.seconds = time.perf_counter() - start
        try:
            state = self.payloads.read()
            host.barrier("end the stress run")
            residue = 0 if error else self._residue()
        except LamportError as failure:  # the context itself may be lost
            error = error or f"{type(failure).__name__}: {failure}"
            state, residue = State(0, 0, 0, None), 0
        mine = {
            "bad_words": state.bad_words,
            "bad_calls": state.bad_calls,
            "first": None if state.first is None else asdict(state.first),
            "residue": residue,
            "errors": error,
            "checked": state.calls,
        }
        said = host.share(mine, "compare the stress run's results")
        for name in mine:
            setattr(found, name, [one[name] for one in said])
        found.seconds = max(host.share(found.seconds, "compare the stress run's times"))
        return found

    def _residue(self) -> int:
        """Words of this rank's mailboxes that are not as they must be between calls (I1)."""
        return sum(len(channel.residue()) for channel in self.gather._channels.values() if hasattr(channel, "residue"))

    # The calls

    def _calls(self) -> None:
        options = self.options
        events = [self.rig.event() for _ in range(_AHEAD)]
        queued: deque[tuple[Any, int]] = deque()
        graphs: list[tuple[Graph, int]] = []
        done, start = 0, time.perf_counter()
        looked = start
        left = options.calls
        try:
            if options.graph:
                graphs = self._graphs(min(_GRAPHS, max(options.calls // options.chunk, 1)))
            while left or queued:
                if not left or len(queued) == _AHEAD:
                    event, calls = queued.popleft()
                    self.rig.wait(event)
                    events.append(event)
                    done += calls
                    now = time.perf_counter()
                    if self.progress is not None:
                        self.progress(done, now - start)
                    if now - looked > _TICK:
                        looked = now
                        self.gather.check()
                if left:
                    self._be_late()
                    calls = self._next(graphs, left)
                    left -= calls
                    event = events.pop()
                    self.rig.record(event)
                    queued.append((event, calls))
        finally:
            if graphs:
                self.rig.synchronize()
                for graph, _ in graphs:
                    graph.close()

    def _next(self, graphs: list[tuple[Graph, int]], left: int) -> int:
        """Queue the next graph, or the next calls one by one; return how many they are."""
        options = self.options
        if graphs and self.rng.random() < 0.9:
            graph, calls = graphs[self.rng.randrange(len(graphs))]
            if calls <= left:
                graph.launch()
                return calls
        return self._queue(self._draw(min(left, options.chunk // 10 or 1 if graphs else options.chunk)))

    def _graphs(self, number: int) -> list[tuple[Graph, int]]:
        found = []
        for _ in range(number):
            chunk = self._draw(self.options.chunk)
            for burst in chunk:  # packing a call may allocate, which a capture need not see
                for slot, nbytes in enumerate(burst):
                    self._call(nbytes, slot)
            found.append((self.rig.capture(partial(self._queue, chunk)), self.options.chunk))
        return found

    def _draw(self, calls: int) -> Chunk:
        """Bursts of sizes, ``calls`` in all."""
        chunk: Chunk = []
        while calls:
            burst = min(self.rng.randint(1, self.options.burst), calls)
            chunk.append([self.rng.choice(self.pool) for _ in range(burst)])
            calls -= burst
        return chunk

    def _queue(self, chunk: Chunk) -> int:
        offset = 0
        for burst in chunk:
            calls = [self._call(nbytes, slot) for slot, nbytes in enumerate(burst)]
            for index, (source, _, _) in enumerate(calls):
                self.payloads.fill(source, burst[index], offset + index)
            for index, (_, _, call) in enumerate(calls):
                if self.foreign is not None and index:
                    self.foreign.launch()
                call()
            for index, (_, target, _) in enumerate(calls):
                self.payloads.check(target, burst[index], offset + index)
            offset += len(burst)
        self.payloads.advance(offset)
        return offset

    def _call(self, nbytes: int, slot: int) -> tuple[int, int, PreparedCall]:
        """(input address, output address, call) of a size in a slot."""
        found = self.prepared.get((nbytes, slot))
        if found is None:
            source = self.inputs[slot][: nbytes // 4]
            target = self.outputs[slot][: nbytes // 4 * self.gather.world_size]
            call = self.gather.prepare(source, target, self.rig.stream)
            found = self.prepared[nbytes, slot] = (address_of(source), address_of(target), call)
        return found

    def _foreign_kernel(self) -> Block:
        kernel = self.rig.kernel("stress_foreign")
        return Block(kernel, [], grid=(1, 1), threads=32, stream=self.rig.stream, pdl=True)

    def _be_late(self) -> None:
        """Now and then a rank stops for a moment, so that the others get ahead as far as they can."""
        if self.options.late and self.own.random() < 0.02:
            time.sleep(self.own.uniform(0.0, 2e-3))


class Bar:
    """A progress bar on stderr, for a person who waits; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = 0.0
        self._on = sys.stderr.isatty()

    def __call__(self, done: int, seconds: float) -> None:
        if not self._on or (seconds - self._shown < 0.2 and done < self._total):
            return
        self._shown = seconds
        share = done / self._total
        filled = "#" * int(share * 40)
        rate = done / seconds if seconds else 0.0
        print(
            f"\r[{filled:<40}] {share:4.0%}  {done:,} calls, {rate:,.0f} a second ", end="", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        """Leave the line."""
        if self._on:
            print(file=sys.stderr)
