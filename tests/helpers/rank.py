"""One rank of a run of ``helpers.mpirun``: calls the function and leaves its result, or its error, as JSON.

A rank that failed waits a while for the reports of the others and then ends the job, so that a failed assertion on one
rank neither hangs the others nor hides what they had to say.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

GRACE = 10.0  # seconds that a failed rank leaves the others to report
_PLAIN = (bool, int, float, str, type(None))


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    # Before the harness kills the run, show where this rank stands.
    faulthandler.dump_traceback_later(max(job["timeout"] * 0.9 - 1.0, 1.0), exit=False)

    from .mpirun import resolve

    try:
        report(folder, rank, {"value": resolve(job["function"])(comm, **job["arguments"])})
    except BaseException as error:
        report(folder, rank, {"error": describe(error)})
        sys.stderr.flush()
        wait_for_reports(folder, comm.Get_size(), min(GRACE, job["timeout"] / 4))
        comm.Abort(1)
    faulthandler.cancel_dump_traceback_later()


def report(folder: Path, rank: int, result: dict[str, Any]) -> None:
    """Leave ``result`` where the harness looks for it, whole or not at all."""
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{rank}.json")


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: its type's name, message, traceback, and the attributes that are plain values."""
    attributes = {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN)}
    attributes |= {k: list(v) for k, v in vars(error).items() if isinstance(v, tuple)}
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "attributes": json.loads(json.dumps(attributes, default=repr)),
    }


def wait_for_reports(folder: Path, ranks: int, seconds: float) -> None:
    """Until every rank has reported, at most ``seconds``. Looks at files: MPI may be stuck."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all((folder / f"{rank}.json").exists() for rank in range(ranks)):
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
