"""Gather back to back, in alternating sizes, and check every word of every output on the device.

    mpirun -n 4 python -m lamport_numba stress --calls 1M --graph

Payloads encode (call, rank, word) and are made on the device, so that nothing is copied to the host and a graph that is
replayed has fresh ones. Exits with 1 if any word was wrong or any call failed; the first wrong word is shown in full.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _common

if TYPE_CHECKING:
    from ..bench.stress import Options, Outcome

SUMMARY = "gather back to back and check every word on the device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own options."""
    parser.add_argument("--calls", type=count, default=100_000, metavar="K", help="how many, as 5000, 10K, 2M (100K)")
    parser.add_argument(
        "--sizes",
        metavar="LIST",
        help="bytes a rank, as 16,4K,64K-256K; ranges are drawn from (16-256K; emulated: 16-4K)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="what sizes, bursts and an adversarial fabric are drawn from (0)"
    )
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs, with a few calls between them")
    parser.add_argument("--chunk", type=count, default=100, metavar="N", help="calls in a graph (100)")
    parser.add_argument(
        "--burst",
        type=_common.positive,
        default=8,
        metavar="N",
        help="at most so many calls without a check between (8)",
    )
    parser.add_argument(
        "--fabric", choices=("immediate", "adversarial"), help="how stores travel on the emulated device"
    )
    parser.add_argument(
        "--timeout", type=_common.above_zero, default=30.0, metavar="S", help="seconds a call waits for a rank (30)"
    )
    parser.add_argument("--no-pdl", action="store_true", help="launch without the programmatic attribute")
    parser.add_argument(
        "--foreign",
        action="store_true",
        help="put a kernel that never waits between the calls: an experiment, not a use",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")


def count(text: str) -> int:
    """A number of calls: 5000, 10K, 2M; K and M are powers of 1,000."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count, as 5000, 10K or 2M")
    return int(found[1]) * {"": 1, "K": 1_000, "M": 1_000_000}[found[2]]


def run(options: argparse.Namespace) -> int:
    """Run the calls on all ranks; 1 if anything was wrong."""
    comm = _common.world()
    if options.fabric:
        os.environ["LAMPORT_NUMBA_FABRIC"] = options.fabric
        os.environ["LAMPORT_NUMBA_SEED"] = str(options.seed)
    chosen = _common.choose_device(comm, options, fall_back_if_few=False)
    from ..bench import stress

    plan = _plan(options, chosen.kind)
    _common.check_file(comm, "--json", options.json)
    first = comm.Get_rank() == 0
    bar = stress.Bar(plan.calls) if first else None
    outcome = stress.run(comm, plan, progress=bar)
    if bar is not None:
        bar.end()
    if first:
        print(summary(outcome, plan, str(chosen)))
        sys.stdout.flush()
        if options.json:
            Path(options.json).write_text(json.dumps(record(outcome, plan, chosen.kind), indent=1) + "\n")
    return 0 if outcome.well else 1


def _plan(options: argparse.Namespace, kind: str) -> Options:
    from ..bench import sizes, stress

    try:
        spans = sizes.parse(options.sizes or ("16-256K" if kind == "cuda" else "16-4K"))
    except ValueError as error:
        raise _common.CannotStart(f"--sizes: {error}") from None
    return stress.Options(
        calls=options.calls,
        spans=spans,
        seed=options.seed,
        graph=options.graph,
        chunk=options.chunk,
        burst=options.burst,
        transport=_common.asked_transport(options),
        timeout=options.timeout,
        pdl=not options.no_pdl,
        foreign=options.foreign,
    )


def record(outcome: Outcome, plan: Options, kind: str) -> dict[str, Any]:
    """The result as JSON has it."""
    from ..bench.report import circumstances

    return {"stress": 1, **circumstances(), "kind": kind, "well": outcome.well, **asdict(outcome), "plan": asdict(plan)}


def summary(outcome: Outcome, plan: Options, device: str) -> str:
    """The result for people."""
    from ..bench import sizes

    low, high = min(span.low for span in plan.spans), max(span.high for span in plan.spans)
    how = f"graphs of {plan.chunk} calls" if plan.graph else "eager"
    rate = min(outcome.checked) / outcome.seconds if outcome.seconds else 0.0
    lines = [
        f"device      {device}: {outcome.device}",
        f"world       {outcome.world} rank{'s' * (outcome.world != 1)}, transport {outcome.transport}, {how}",
        f"calls       {min(outcome.checked):,} of {plan.calls:,}, {sizes.text(low)} to {sizes.text(high)} a rank, "
        f"seed {plan.seed}, {outcome.seconds:.1f} s, {rate:,.0f} a second",
        f"mismatches  {sum(outcome.bad_words):,} words on all ranks, in {max(outcome.bad_calls):,} calls of one",
    ]
    found = outcome.first_mismatch()
    if found is not None:
        rank, mismatch = found
        lines.append(f"first       on rank {rank}: {mismatch.story(outcome.world, high)}")
    if any(outcome.residue):
        lines.append(f"left behind {outcome.residue} words of the mailboxes, by rank")
    lines += [f"rank {rank:<7}{error}" for rank, error in enumerate(outcome.errors) if error]
    lines.append("PASSED" if outcome.well else "FAILED")
    return "\n".join(lines)
