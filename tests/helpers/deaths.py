"""Run a function under mpirun where ranks may be killed or stopped, and collect what the survivors report.

MPICH's mpirun ends a job when a rank dies, before the survivors can say anything. So each rank runs in a session of its
own, below a keeper that stays the launcher's child until all ranks have ended, and survivors leave by ``os._exit``,
since MPI's own end would wait for the dead.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import environment, mpirun, rank


def run(
    function: Callable[..., Any],
    ranks: int,
    *,
    victims: tuple[int, ...] = (),
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    multicast: bool = False,
    **arguments: Any,
) -> list[dict[str, Any] | None]:
    """Call ``function(comm, folder=..., **arguments)`` on each rank; each survivor's report, None for ``victims``.

    A report is {"value": ...} or {"error": ...} as in ``mpirun.run``. Raises RanksFailed if a survivor did not report.
    """
    launcher = mpirun.launcher()
    options = ["-disable-auto-cleanup"] if launcher.family == "mpich" else ["--enable-recovery"]
    with tempfile.TemporaryDirectory(prefix="lamport-deaths-") as folder:
        name = f"{function.__module__}:{function.__qualname__}"
        job = {"function": name, "arguments": {"folder": folder, **arguments}, "ranks": ranks}
        job |= {"victims": victims, "timeout": timeout}
        Path(folder, "job.json").write_text(json.dumps(job))
        argv = [*launcher.argv(ranks), *options, sys.executable, "-m", "helpers.deaths", "keep", folder]
        done = mpirun._execute(argv, timeout, environment.of_ranks(env, multicast=multicast))
        results = [mpirun._load(Path(folder, f"{one}.json")) for one in range(ranks)]
        logs = [mpirun._text(Path(folder, f"{one}.log")) for one in range(ranks)]
    if any((result is None) != (one in victims) for one, result in enumerate(results)):
        raise mpirun.RanksFailed(mpirun._story(name, ranks, done, results, logs), results)
    return results


def keep(folder: Path) -> None:
    """Start the rank in a session of its own, and wait until all ranks have ended or been stopped."""
    job = json.loads((folder / "job.json").read_text())
    child = os.fork()
    if child == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-m", "helpers.deaths", "rank", str(folder)])
    me = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    os.waitpid(child, os.WUNTRACED if me in job["victims"] else 0)
    together(folder, "over", job)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # one that is stopped keeps the launcher's pipes open
    together(folder, "gone", job)  # the launcher ends the other keepers when the first one leaves
    os._exit(0)


def together(folder: Path, stage: str, job: Mapping[str, Any]) -> None:
    """Wait until all keepers have come to ``stage``."""
    (folder / f"{stage}-{os.getpid()}").touch()
    end = time.monotonic() + float(job["timeout"])
    while time.monotonic() < end and len(list(folder.glob(f"{stage}-*"))) < job["ranks"]:
        time.sleep(0.05)


def main(folder: Path) -> None:
    """The rank itself."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # MPICH's way to tell the survivors
    job = json.loads((folder / "job.json").read_text())
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    me = comm.Get_rank()
    log = os.open(folder / f"{me}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.dump_traceback_later(max(job["timeout"] * 0.8, 1.0), exit=False)
    try:
        rank.report(folder, me, {"value": mpirun.resolve(job["function"])(comm, **job["arguments"])})
    except BaseException as error:
        rank.report(folder, me, {"error": rank.describe(error)})
    sys.stderr.flush()
    os._exit(0)


def die(folder: str, how: int) -> None:
    """The end of a victim: note when, and send itself ``how``."""
    Path(folder, "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), how)


def seconds_since(folder: str) -> float:
    """Since the victim's end."""
    return time.monotonic() - float(Path(folder, "died").read_text())


if __name__ == "__main__":
    {"keep": keep, "rank": main}[sys.argv[1]](Path(sys.argv[2]))
