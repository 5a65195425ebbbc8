"""Run the library's cases, its examples and the mailbox's tests on real GPUs, and write a summary.

    python tests/gpu/run.py [--ranks 2,3,4] [--json FILE]

Needs no installation: the checkout, numpy, mpi4py, numba-cuda, cuda-python and an mpirun. With fewer GPUs than ranks,
the ranks share a GPU under MPS. Multicast stays off, by the variables that other libraries obey too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import mps  # noqa: E402
from helpers import environment, mpirun  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3,4", help="world sizes (2,3,4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case, and no examples")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that one run may take (240)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"], help="emulated: to try this script")
    options = parser.parse_args()

    summary: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "launcher": mpirun.launcher().version,
        "runs": [],
    }
    print(f"mpirun: {mpirun.launcher().path} ({mpirun.launcher().version})", flush=True)
    survey = python(["-m", "lamport_numba", "info", "--json", "--device", options.device], None, {}, options)
    if survey.returncode:
        print(survey.stdout + survey.stderr)
        print("no usable GPU: nothing was run")
        return 1
    summary["machine"] = json.loads(survey.stdout)
    gpus = len(summary["machine"]["devices"][options.device]["devices"])
    print(
        f"{gpus} GPU{'s' * (gpus != 1)}: {summary['machine']['devices'][options.device]['devices'][0]['name']}",
        flush=True,
    )

    worlds = [int(n) for n in options.ranks.split(",")]
    with mps.service() if gpus < max(worlds) else nullcontext() as variables:
        summary["mps"] = variables is not None
        for ranks in worlds:
            shared = {"LAMPORT_NUMBA_SHARE_DEVICE": "1", **(variables or {})} if gpus < ranks else {}
            summary["runs"] += run(ranks, shared, options)
        if not options.case and options.device == "cuda":
            summary["runs"].append(mailbox(variables or {}, options))
    passed = sum(one["passed"] for one in summary["runs"])
    failed = sum(one["failed"] for one in summary["runs"])
    summary.update(passed=passed, failed=failed)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


def run(ranks: int, env: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases, then the examples, on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = ["-m", "lamport_numba", "selftest", "--transport", "peer", "--json", str(file)]
        done = python([*command, *(word for name in options.case for word in ("--case", name))], ranks, env, options)
        print(f"--- {ranks} ranks, {done.seconds:.0f} s\n{done.stdout}{done.stderr}", flush=True)
        try:
            report = json.loads(file.read_text())
        except (OSError, ValueError):
            report = {"cases": [], "passed": 0, "failed": 1, "output": done.stdout + done.stderr}
    runs = [{"what": "selftest", "ranks": ranks, "shared": bool(env), "seconds": done.seconds, **report}]
    for example in () if options.case else ("decode", "pagerank"):
        command = [
            "-m",
            "lamport_numba",
            "demo",
            "--device",
            options.device,
            "--transport",
            "peer",
            "--example",
            example,
        ]
        done = python(command, ranks, env, options)
        print(f"--- {example}, {ranks} ranks, {done.seconds:.0f} s\n{done.stdout}{done.stderr}", flush=True)
        well = done.returncode == 0
        outcome = {"what": example, "ranks": ranks, "shared": bool(env), "seconds": done.seconds}
        runs.append({**outcome, "passed": int(well), "failed": int(not well), "output": done.stdout[-3000:]})
    return runs


def mailbox(env: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """The tests of the tagged mailbox and its all-gather, which start their ranks themselves."""
    files = sorted(str(file) for name in ("mailbox", "tagged") for file in (ROOT / "tests").glob(f"test_{name}_*.py"))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = python(command, None, env, options)
    print(f"--- mailbox, {done.seconds:.0f} s\n{done.stdout}{done.stderr}", flush=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    failed = counts.get("failed", 0) + counts.get("error", 0) or int(done.returncode != 0)
    return {
        "what": "mailbox",
        "seconds": done.seconds,
        "passed": counts.get("passed", 0),
        "failed": failed,
        "output": done.stdout[-3000:],
    }


def python(
    arguments: list[str], ranks: int | None, env: dict[str, str], options: argparse.Namespace
) -> mpirun.Completed:
    """Run python on the device, without multicast, whatever the environment says."""
    started = time.monotonic()
    changes = {environment.DEVICE: options.device, **environment.OFF, **env}
    try:
        return mpirun.command(arguments, ranks, env=changes, timeout=options.limit, check=False)
    except OSError as error:
        return mpirun.Completed(127, "", str(error), time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
