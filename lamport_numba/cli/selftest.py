"""Run the library's own cases on this machine: sizes, dtypes, special bits, graphs, streams, refusals, reset.

    mpirun -n 4 python -m lamport_numba selftest --transport multicast --device cuda --json report.json

Every output is compared bit by bit, and after every sequence all mailboxes must be empty. This is what to run first on
a new machine. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from . import _common, info

SUMMARY = "run the library's own cases on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--list", action="store_true", help="list the cases and run none")
    parser.add_argument(
        "--timeout", type=_common.above_zero, default=30.0, help="seconds that a call waits for its peers (30)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the cases on all ranks; 1 if one fails."""
    from ..selftest import CASES

    if options.list:
        for name, function in CASES.items():
            print(f"{name:34} {str(function.__doc__).splitlines()[0]}")
        return 0
    unknown = sorted(set(options.case or ()) - set(CASES))
    if unknown:
        raise _common.CannotStart(f"no case {', '.join(unknown)}; --list shows what there is")
    comm = _common.world()
    chosen = _common.choose_device(comm, options, fall_back_if_few=False)
    asked = {"transport": _common.asked_transport(options), "timeout": options.timeout}
    _common.check_file(comm, "--json", options.json)
    file = options.json if comm.Get_rank() == 0 else None
    return int(run_all(comm, options.case or list(CASES), asked, str(chosen), file)["failed"] > 0)


def run_all(comm: Any, names: list[str], asked: dict[str, Any], device: str, file: Path | None) -> dict[str, Any]:
    """Run these cases, tell rank 0's reader about each, and return the report; ``file`` has it as far as it goes."""
    from ..selftest import CASES, World, run_case

    first = comm.Get_rank() == 0
    world = World(comm)
    hosts_and_devices = comm.allgather((platform.node(), world.drv.device_name(world.device), world.device))
    report = {
        **info.versions(),
        "device": world.drv.kind,
        "devices": [f"{name}, device {index} of {host}" for host, name, index in hosts_and_devices],
        "world": comm.Get_size(),
        **asked,
        "cases": [],
        "passed": 0,
        "failed": 0,
    }
    if first:
        what = f"device {device}, {report['world']} ranks, transport {asked['transport']}"
        print(f"lamport-numba {report['version']}, {what}", flush=True)
    for name in names:
        result = run_case(name, CASES[name], World(comm, options=asked))
        report["cases"].append(result.as_dict())
        report["passed" if result.passed else "failed"] += 1
        if file is not None:
            file.write_text(json.dumps(report, indent=2) + "\n")
        if first:
            used = ", ".join(result.transports)
            print(
                f"{'ok' if result.passed else 'FAILED':7}{name:34}{result.calls:5} calls{result.seconds:8.2f} s  {used}"
            )
            for problem in result.problems:
                print(f"       {problem}", flush=True)
    if first:
        print(f"{report['passed']} passed, {report['failed']} failed", flush=True)
    return report
