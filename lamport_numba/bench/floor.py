"""The floor: what a gather of this size cannot go below here, measured in the same run.

    floor = an empty kernel in the same chain + one way of a two-rank ping-pong + bytes / rate of the link

An empty kernel waits and triggers as ours do. One way is half a round of ptx/bench_ping_pong.ptx: store, link, poll.
Every rank sends its part to each of the others over its own links, or, where ranks share a device, all parts go
through its memory.
"""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import dataclass
from typing import Any

from ..collectives.launch import Block
from ..errors import LamportError
from ..symmetric import SymmetricMemory
from .host import Host
from .rig import Rig

__all__ = ["NVLINK_GB_S", "Floor", "empty_launch", "measure"]

NVLINK_GB_S = 450.0  # one way, NVLink 4 with 18 links, by the vendor's figures
_PATIENCE = 20.0  # seconds without an answer


@dataclass(frozen=True)
class Floor:
    """Microseconds of the parts, and the rate in GB/s (None: one rank, nothing is sent)."""

    empty: float
    empty_latency: float
    one_way: float
    rate: float | None
    rate_from: str
    shared: bool
    world: int

    def graph(self, nbytes: int) -> float:
        """Microseconds a call cannot go below in a chain of calls."""
        return self.empty + self.one_way + self.wire(nbytes)

    def latency(self, nbytes: int) -> float:
        """The same for one call between two waits of the host."""
        return self.empty_latency + self.one_way + self.wire(nbytes)

    def wire(self, nbytes: int) -> float:
        """Microseconds that the bytes alone take."""
        if self.rate is None:
            return 0.0
        sent = nbytes * (self.world - 1) * (self.world if self.shared else 1)
        return sent / self.rate * 1e-3

    def words(self) -> str:
        """The formula with its figures."""
        text = f"{self.empty:.2f} us empty kernel + {self.one_way:.2f} us one way"
        if self.rate is not None:
            many = (self.world - 1) * (self.world if self.shared else 1)
            text += f" + {f'{many} x ' if many > 1 else ''}bytes / {self.rate:.0f} GB/s ({self.rate_from})"
        return text


def empty_launch(rig: Rig, *, pdl: bool) -> Block:
    """A launch of the empty kernel."""
    return Block(rig.kernel("bench_empty"), [], grid=(1, 1), threads=32, stream=rig.stream, pdl=pdl)


def measure(
    host: Host,
    rig: Rig,
    *,
    pdl: bool,
    shared: bool,
    calls: int,
    samples: int,
    rate: float | None,
    rounds: int,
) -> Floor:
    """Measure the parts; collective. ``rate`` in GB/s; None: the vendor's for the link between GPUs, else a copy's."""
    from .timing import graph_samples, latency_samples

    launch = empty_launch(rig, pdl=pdl)
    graph = rig.repeated(launch.launch, calls)
    empty = [time / calls for time in graph_samples(host, rig, graph, samples)]
    graph.close()
    latency = latency_samples(host, rig, launch.launch, samples)
    way = _one_way(host, rig, shared=shared, rounds=rounds, samples=max(samples // 4, 3))
    source = "given"
    if rate is None and host.size > 1:
        if rig.drv.kind == "cuda" and not shared:
            rate, source = NVLINK_GB_S, "NVLink 4, one way"
        else:
            rate, source = _copy_rate(rig, 1 << (26 if rig.drv.kind == "cuda" else 20)), "a copy on the device"
    mine = [statistics.median(empty), statistics.median(latency), way, rate or 0.0]
    said = host.share(mine, "compare the floor")
    return Floor(
        empty=max(one[0] for one in said),
        empty_latency=max(one[1] for one in said),
        one_way=max(one[2] for one in said),
        rate=max(one[3] for one in said) or None,
        rate_from=source,
        shared=shared,
        world=host.size,
    )


def _one_way(host: Host, rig: Rig, *, shared: bool, rounds: int, samples: int) -> float:
    """Microseconds of one way between ranks 0 and 1, as this rank saw it; 0 on the others and in a world of one."""
    if host.size == 1:
        return 0.0
    memory = SymmetricMemory(
        host, rig.drv, rig.device, 4096, multicast=False, share_device=shared, timeout=host.timeout
    )
    try:
        rig.zero(memory.local, 4096)
        rig.synchronize()
        host.barrier("begin the ping-pong")
        times = _ping_pong(rig, memory, host.rank, rounds, samples) if host.rank < 2 else [0.0]
        host.barrier("end the ping-pong")
    except BaseException:
        memory.abandon()
        raise
    memory.close()
    return statistics.median(times)


def _ping_pong(rig: Rig, memory: SymmetricMemory, rank: int, rounds: int, samples: int) -> list[float]:
    """Two lengths in turn; their difference has no launch in it."""
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    mine, theirs, done = memory.local, memory.address(1 - rank), memory.local + 1024
    parameters: list[Any] = [
        u64(mine),
        u64(theirs),
        u32(rank == 0),
        u32(0),
        u32(0),
        u64(int(_PATIENCE * 1e9)),
        u64(done),
    ]
    block = Block(rig.kernel("bench_ping_pong"), parameters, grid=(1, 1), threads=1, stream=rig.stream, pdl=False)
    start, end = rig.event(), rig.event()
    first = 0
    found = []
    for _ in range(samples + 1):
        times = []
        for length in (rounds, 5 * rounds):
            parameters[3].value, parameters[4].value = first, length
            first += length
            rig.record(start)
            block.launch()
            rig.record(end)
            rig.wait(end)
            if int(rig.read(done, 4)[0]) != length:
                raise LamportError(f"rank {rank}: the ping-pong's other rank did not answer for {_PATIENCE:g} s")
            times.append(rig.microseconds(start, end))
        found.append((times[1] - times[0]) / (2 * 4 * rounds))
    return found[1:]  # the first pair found the kernel cold


def _copy_rate(rig: Rig, nbytes: int) -> float:
    """GB/s that a copy within the device moves, counted once."""
    source, target = (rig.array(nbytes) for _ in range(2))
    from .rig import address_of

    start, end = rig.event(), rig.event()
    found = []
    for _ in range(6):
        rig.record(start)
        rig.drv.call("cuMemcpyDtoDAsync", address_of(target), address_of(source), nbytes, rig.stream)
        rig.record(end)
        rig.wait(end)
        found.append(nbytes / max(rig.microseconds(start, end), 1e-3) * 1e-3)
    return statistics.median(found[1:])
