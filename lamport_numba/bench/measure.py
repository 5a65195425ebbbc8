"""The measurement of `bench`: contenders in turn, sample by sample, size by size, with the floor of the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import settings
from ..driver import select
from ..errors import LamportError, SentinelWarning
from . import floor, timing
from .contenders import Bound, Contender, Setting, build, variant
from .floor import Floor
from .host import Host
from .rig import Rig, name_of

__all__ = ["MODES", "Options", "run"]

MODES = ("graph", "eager", "latency")


@dataclass(frozen=True)
class Options:
    """What to measure. ``sizes`` in bytes of one rank; ``calls`` of a graph; ``eager_calls`` queued one by one.

    ``variants`` are other texts of the kernel by name: they take turns with ours.
    """

    sizes: list[int]
    modes: list[str]
    against: list[str]
    dtype: str = "float32"
    transport: str = "auto"
    samples: int = 20
    calls: int = 100
    eager_calls: int = 1000
    rounds: int = 1000
    rate: float | None = None
    timeout: float = 30.0
    pdl: bool = True
    device: int | None = None
    variants: dict[str, str] = field(default_factory=dict)


def run(comm: Any, options: Options, *, show: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Measure; collective. The result is the same on all ranks, in the shape of the JSON in docs/data.

    ``show`` is given the result as far as it is, after the set-up and after each size. Raises LamportError if any
    output is wrong after the timing, and what the construction of our own raises.
    """
    host = Host(comm)
    drv = select().for_rank(host.rank)
    device = drv.default_device() if options.device is None else options.device
    uuids = host.share(drv.device_uuid(device).hex(), "compare devices")
    shared = len(set(uuids)) < len(uuids)
    if shared and not settings.get("SHARE_DEVICE"):
        shared = False  # our own construction refuses, and says why
    with drv.current(device), warnings.catch_warnings(), ExitStack() as on_error:
        warnings.simplefilter("ignore", SentinelWarning)
        rig = Rig(drv, device)
        setting = Setting(
            comm=comm,
            host=host,
            rig=rig,
            capacity=max(options.sizes),
            dtype=np.dtype(options.dtype),
            transport=options.transport,
            timeout=options.timeout,
            pdl=options.pdl,
            shared=shared,
        )
        contenders, missing = build(setting, options.against)
        contenders += [variant(setting, name, text) for name, text in options.variants.items()]
        for contender in contenders:
            on_error.callback(contender.abandon)
        base = floor.measure(
            host,
            rig,
            pdl=options.pdl,
            shared=shared,
            calls=options.calls,
            samples=options.samples,
            rate=options.rate,
            rounds=options.rounds,
        )
        result: dict[str, Any] = {
            "bench": 1,
            "kind": drv.kind,
            "device": drv.device_name(device),
            "driver": _version(int(drv.call("cuDriverGetVersion"))),
            "devices": len(set(uuids)),
            "world": host.size,
            "transport": name_of(contenders[0].gather.transport),  # type: ignore[attr-defined]
            "options": {**asdict(options), "variants": list(options.variants)},
            "contenders": [contender.name for contender in contenders],
            "missing": missing,
            "floor": {**asdict(base), "words": base.words()},
            "rows": [],
        }
        if "eager" in options.modes:
            result["host"] = _host_times(host, rig, contenders[0], options)
        if show is not None:
            show(result)
        for nbytes in options.sizes:
            result["rows"] += _one_size(host, rig, contenders, base, nbytes, options, result.get("host"))
            if show is not None:
                show(result)
        on_error.pop_all()
        for contender in reversed(contenders):
            contender.close()
        rig.close()
    host.free()
    return result


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _host_times(host: Host, rig: Rig, ours: Contender, options: Options) -> dict[str, float]:
    """Host microseconds a call: the launch alone, and our call on top of it. The slowest rank counts."""
    empty = floor.empty_launch(rig, pdl=options.pdl)
    bound = ours.bind(options.sizes[0])
    calls: dict[str, Callable[[], object]] = {
        "cuLaunchKernelEx": partial(rig.drv.api.cuLaunchKernelEx, *empty.arguments),
        "prepared call": bound.queue,
        "gather(x, out=y, stream=s)": bound.call,
    }
    found = {}
    for name, call in calls.items():
        call()
        host.barrier("before the host's times")
        found[name] = timing.host_microseconds(rig, call, options.eager_calls)
    said = host.share(found, "compare the host's times")
    return {name: max(one[name] for one in said) for name in found}


def _one_size(
    host: Host,
    rig: Rig,
    contenders: list[Contender],
    base: Floor,
    nbytes: int,
    options: Options,
    launch: dict[str, float] | None,
) -> list[dict[str, Any]]:
    bounds = [contender.bind(nbytes) for contender in contenders]
    rows = []
    for mode in options.modes:
        for contender, bound in zip(contenders, bounds, strict=True):
            contender.fill(bound, nbytes, nbytes)
            host.barrier("before the first call")  # others may write straight into this rank's output
            bound.call()  # whatever a first call sets up
            rig.synchronize()
        taken = _SAMPLERS[mode](host, rig, contenders, bounds, options)
        wrong = [
            contender.wrong_words(bound, nbytes, nbytes) for contender, bound in zip(contenders, bounds, strict=True)
        ]
        counted = [sum(each) for each in zip(*host.share(wrong, "compare the outputs"), strict=True)]
        for contender, words in zip(contenders, counted, strict=True):
            if words:
                raise LamportError(
                    f"{contender.name}: {words} wrong words in the outputs of {nbytes} bytes a rank ({mode})"
                )
        lowest = base.graph(nbytes) if mode == "graph" else base.latency(nbytes)
        if mode == "eager" and launch is not None:
            lowest = max(base.graph(nbytes), launch["cuLaunchKernelEx"])
        for contender in contenders:
            samples = timing.slowest(host, taken[contender.name])
            row = {
                "mode": mode,
                "bytes": nbytes,
                "contender": contender.name,
                "median_us": round(timing.median(samples), 4),
                "p99_us": round(timing.percentile(samples, 0.99), 4),
                "samples": len(samples),
                "floor_us": round(lowest, 4),
            }
            if mode == "eager":
                queueing = timing.slowest(host, taken[f"{contender.name} host"])
                row["host_us"] = round(timing.median(queueing), 4)
            rows.append(row)
    for bound in bounds:
        if bound.close is not None:
            bound.close()
    return rows


def _graph_mode(
    host: Host, rig: Rig, contenders: list[Contender], bounds: list[Bound], options: Options
) -> dict[str, list[float]]:
    graphs = {}
    for contender, bound in zip(contenders, bounds, strict=True):
        if contender.graphs:
            graphs[contender.name] = rig.repeated(bound.queue, options.calls)
    start, end = rig.event(), rig.event()
    taken: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for graph in graphs.values():
        timing.one_graph_sample(host, rig, graph, start, end)
    for _ in range(options.samples):
        for contender, bound in zip(contenders, bounds, strict=True):  # in turn, so that all see the same machine
            if contender.name in graphs:
                time = timing.one_graph_sample(host, rig, graphs[contender.name], start, end) / options.calls
            else:
                time = timing.latency_samples(host, rig, bound.queue, 1)[0]
            taken[contender.name].append(time)
    for graph in graphs.values():
        graph.close()
    return taken


def _eager_mode(
    host: Host, rig: Rig, contenders: list[Contender], bounds: list[Bound], options: Options
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}
    for _ in range(options.samples):
        for contender, bound in zip(contenders, bounds, strict=True):
            calls = options.eager_calls if contender.graphs else min(options.eager_calls, 20)
            device, queueing = timing.eager_samples(host, rig, bound.call, calls, 1)
            taken.setdefault(contender.name, []).extend(device)
            taken.setdefault(f"{contender.name} host", []).extend(queueing)
    return taken


def _latency_mode(
    host: Host, rig: Rig, contenders: list[Contender], bounds: list[Bound], options: Options
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}
    for _ in range(options.samples):
        for contender, bound in zip(contenders, bounds, strict=True):
            taken.setdefault(contender.name, []).extend(timing.latency_samples(host, rig, bound.queue, 1))
    return taken


_SAMPLERS = {"graph": _graph_mode, "eager": _eager_mode, "latency": _latency_mode}
