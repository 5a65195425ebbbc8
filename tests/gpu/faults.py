"""Faults on real GPUs: disagreement, a missing rank, a rank that is killed, and a new job after each.

    python tests/gpu/faults.py [--ranks 2,4] [--json FILE]

Run it last: where ranks share a GPU under MPS, a client that is killed may take the others along. A survivor then
either raises PeerTimeout in time, or the daemon ends it, which shows as an error of the driver. Both are well; a
survivor that says nothing, or a new job that does not work, is not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import mps  # noqa: E402
from helpers import deaths, environment, faults, mpirun  # noqa: E402

ENV = {environment.DEVICE: "cuda", "LAMPORT_NUMBA_SHARE_DEVICE": "1", **environment.OFF}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="world sizes (2,4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--own-gpus", action="store_true", help="one GPU a rank: no MPS")
    options = parser.parse_args()
    survey = mpirun.command(["-m", "lamport_numba", "info", "--device", "cuda"], None, env=ENV, check=False)
    if survey.returncode:
        print(survey.stdout + survey.stderr)
        print("no usable GPU: nothing was run")
        return 1
    found: list[dict[str, Any]] = []
    with nullcontext() if options.own_gpus else mps.service() as variables:
        env = {**ENV, **(variables or {})}
        for ranks in (int(n) for n in options.ranks.split(",")):
            found.append(raises(faults.disagree, "CallMismatch", ranks, env))
            found.append(raises(faults.refuse_in_a_graph, "CallMismatch", ranks, env))
            found.append(raises(faults.time_out, "PeerTimeout", ranks, env))
        for ranks in (int(n) for n in options.ranks.split(",")):
            for where in ("between calls", "in a graph"):
                found.append(killed(where, ranks, env))
                found.append(raises(faults.time_out, "PeerTimeout", ranks, env))  # a new job works
    for one in found:
        print("well" if one["well"] else "NOT WELL", json.dumps(one), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(not all(one["well"] for one in found))


def raises(function: Any, kind: str, ranks: int, env: dict[str, str]) -> dict[str, Any]:
    """All ranks raise ``kind`` with one text, and go on after a reset."""
    what = {"what": function.__name__, "ranks": ranks}
    try:
        said = mpirun.run(function, ranks, timeout=90, env=env)
    except mpirun.RanksFailed as error:
        return {**what, "well": False, "said": str(error)[:4000]}
    return {**what, "well": said == [said[0]] * ranks and said[0]["type"] == kind, "said": said[0]}


def killed(where: str, ranks: int, env: dict[str, str]) -> dict[str, Any]:
    """The last rank is killed; every survivor must have an error to show."""
    what = {"what": f"kill -9 {where}", "ranks": ranks}
    victim = ranks - 1
    arguments: dict[str, Any] = {"how": int(signal.SIGKILL), "where": where, "victim": victim}
    try:
        said = deaths.run(faults.survive, ranks, victims=(victim,), timeout=90, env=env, **arguments)
    except mpirun.RanksFailed as error:
        said = error.results
    survivors = [short(one) for rank, one in enumerate(said) if rank != victim]
    return {**what, "well": all(is_well(one, victim) for one in survivors), "said": survivors}


def is_well(said: Any, victim: int) -> bool:
    """Whether a survivor said what is meant: who was missing, or that the driver has ended it."""
    if not isinstance(said, dict):
        return False
    return said.get("type") == "DriverError" or (said.get("type") == "PeerTimeout" and said.get("rank") == victim)


def short(report: dict[str, Any] | None) -> Any:
    """A report without its traceback."""
    if report is None or "value" in report:
        return report and report["value"]
    return {name: report["error"][name] for name in ("type", "message")}


if __name__ == "__main__":
    sys.exit(main())
