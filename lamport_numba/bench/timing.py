"""How times are taken: events around graphs, the host's clock around calls; ranks in step, the slowest one counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..graphs import Graph
from .host import Host
from .rig import Rig

__all__ = ["eager_samples", "graph_samples", "host_microseconds", "latency_samples", "median", "percentile", "slowest"]


def graph_samples(host: Host, rig: Rig, graph: Graph, samples: int) -> list[float]:
    """Microseconds of a launch of ``graph``, ``samples`` times; collective.

    A barrier comes before each. The graph is launched twice and the second launch is timed: the first brings the ranks
    in step on the device, closer than any barrier of the host can, and hides the launch of the second.
    """
    start, end = rig.event(), rig.event()
    graph.launch()
    rig.synchronize()
    return [one_graph_sample(host, rig, graph, start, end) for _ in range(samples)]


def one_graph_sample(host: Host, rig: Rig, graph: Graph, start: object, end: object) -> float:
    """Microseconds of one launch of ``graph``; see ``graph_samples``."""
    host.barrier("before a sample")
    graph.launch()
    rig.record(start)
    graph.launch()
    rig.record(end)
    rig.wait(end)
    return rig.microseconds(start, end)


def latency_samples(host: Host, rig: Rig, call: Callable[[], object], samples: int) -> list[float]:
    """Microseconds from before ``call`` until its stream is done, by the host's clock; a barrier before each."""
    found = []
    for _ in range(samples + 1):
        host.barrier("before a sample")
        start = time.perf_counter()
        call()
        rig.synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return found[1:]


def eager_samples(
    host: Host, rig: Rig, call: Callable[[], object], calls: int, samples: int
) -> tuple[list[float], list[float]]:
    """``calls`` calls queued one by one: (microseconds a call on the device, microseconds a call of host time)."""
    start, end = rig.event(), rig.event()
    device, queueing = [], []
    for _ in range(samples + 1):
        host.barrier("before a sample")
        rig.record(start)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        queueing.append((time.perf_counter() - begun) / calls * 1e6)
        rig.record(end)
        rig.wait(end)
        device.append(rig.microseconds(start, end) / calls)
    return device[1:], queueing[1:]


def host_microseconds(rig: Rig, call: Callable[[], object], calls: int, repeats: int = 7) -> float:
    """Host microseconds to queue one ``call``: the mean over ``calls`` of them, the median of some repeats."""
    found = []
    for _ in range(repeats):
        rig.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begun) / calls * 1e6)
    rig.synchronize()
    return median(found)


def slowest(host: Host, samples: list[float]) -> list[float]:
    """Sample by sample, the time of the slowest rank; collective."""
    said = host.share(samples, "compare the samples")
    return [max(each) for each in zip(*said, strict=True)]


def median(samples: list[float]) -> float:
    """The middle one."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
