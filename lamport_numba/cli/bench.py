"""Measure the all-gather, size by size, against the floor of the hardware and against others.

    mpirun -n 2 python -m lamport_numba bench --sizes 16,1K,64K --against nccl,nvshmem,tagged,mpi

graph: a CUDA graph of calls, timed by events. eager: calls from Python, one by one, with the host's time. latency: one
call until its stream is done. Contenders take turns; every output is checked after the timing. A contender that is not
installed, or cannot work here, is left out with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _common

if TYPE_CHECKING:
    from ..bench.measure import Options

SUMMARY = "measure against the floor of the hardware, and against others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own options."""
    parser.add_argument(
        "--sizes", metavar="LIST", help="bytes a rank, as 16,1K,4K-1M; ranges double (16-1M; emulated: 16,1K,4K)"
    )
    parser.add_argument("--dtype", default="float32", help="dtype of the arrays (float32)")
    parser.add_argument("--mode", default="graph,eager", metavar="LIST", help="graph, eager, latency (graph,eager)")
    parser.add_argument("--against", default="", metavar="LIST", help="nccl, nvshmem, mpi, tagged")
    parser.add_argument(
        "--samples", type=_common.positive, metavar="N", help="samples of each figure (20; emulated: 5)"
    )
    parser.add_argument("--calls", type=_common.positive, metavar="N", help="calls of a graph (100; emulated: 20)")
    parser.add_argument(
        "--eager-calls", type=_common.positive, metavar="N", help="calls queued one by one (1000; emulated: 100)"
    )
    parser.add_argument(
        "--link-rate",
        type=_common.above_zero,
        metavar="GB/S",
        help="one way, for the floor (450 between GPUs, else a copy's)",
    )
    parser.add_argument(
        "--timeout", type=_common.above_zero, default=30.0, metavar="S", help="seconds a call waits for a rank (30)"
    )
    parser.add_argument("--no-pdl", action="store_true", help="launch without the programmatic attribute")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="also measure our all-gather with FILE as the text of its kernel; may be given several times",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw latency against size, log-log (.pdf, .svg, .png; needs matplotlib)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks and print as it goes."""
    comm = _common.world()
    chosen = _common.choose_device(comm, options, fall_back_if_few=False)
    from ..bench import measure, plot, report

    plan = _plan(options, emulated=chosen.kind == "emulated")
    _common.check_file(comm, "--json", options.json)
    if options.plot and Path(options.plot).suffix not in (".pdf", ".svg", ".png"):
        raise _common.CannotStart(f"--plot {options.plot}: expected a file that ends with .pdf, .svg or .png")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise _common.CannotStart("--plot needs matplotlib: pip install matplotlib, or the extra `plot`")
    _common.check_file(comm, "--plot", options.plot)
    first = comm.Get_rank() == 0
    result = measure.run(comm, plan, show=_Printer(plan.modes) if first else None)
    result = {**report.circumstances(), **result}
    if first and options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    if first and options.plot:
        plot.plot(result, options.plot, plan.modes[0])
    return 0


class _Printer:
    """Prints the header, and the tables' rows as they come; with several modes the tables at the end."""

    def __init__(self, modes: list[str]) -> None:
        self._modes = modes
        self._shown = 0
        self._begun = False

    def __call__(self, result: dict[str, Any]) -> None:
        from ..bench import report

        if not self._begun:
            self._begun = True
            print(report.header(result), flush=True)
            return
        done = len({row["bytes"] for row in result["rows"]})
        if len(self._modes) == 1:
            print(report.table(result, self._modes[0], title=self._shown == 0, start=self._shown))
        elif done == len(result["options"]["sizes"]):
            print("\n".join(report.table(result, mode) for mode in self._modes))
        self._shown = done
        sys.stdout.flush()


def _plan(options: argparse.Namespace, *, emulated: bool) -> Options:
    import numpy as np

    from ..bench import contenders, measure, sizes

    def listed(text: str, known: tuple[str, ...], name: str) -> list[str]:
        found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        wrong = [word for word in found if word not in known]
        if wrong:
            raise _common.CannotStart(f"--{name}: {', '.join(wrong)} is unknown; there are {', '.join(known)}")
        return found

    try:
        np.dtype(options.dtype)
    except TypeError as error:
        raise _common.CannotStart(f"--dtype {options.dtype}: {error}") from None
    try:
        spans = sizes.parse(options.sizes or ("16,1K,4K" if emulated else "16-1M"))
    except ValueError as error:
        raise _common.CannotStart(f"--sizes: {error}") from None
    return measure.Options(
        sizes=sizes.doublings(spans),
        modes=listed(options.mode, measure.MODES, "mode") or ["graph"],
        against=listed(options.against, contenders.KNOWN, "against"),
        dtype=options.dtype,
        transport=_common.asked_transport(options),
        samples=options.samples or (5 if emulated else 20),
        calls=options.calls or (20 if emulated else 100),
        eager_calls=options.eager_calls or (100 if emulated else 1000),
        rounds=50 if emulated else 1000,
        rate=options.link_rate,
        timeout=options.timeout,
        pdl=not options.no_pdl,
        variants=dict(map(_variant, options.variant)),
    )


def _variant(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if not name or not Path(file).is_file():
        raise _common.CannotStart(f"--variant {text}: expected NAME=FILE, with a file of PTX that is there")
    return name, Path(file).read_text(encoding="ascii")
