"""Run ranks of which some die: a launcher that would end the others is kept out of it.

Each rank's process is a child, in a session of its own, of a keeper that stays the launcher's child and outlives it;
so the launcher sees nobody die. The ranks report as in ``helpers.mpirun`` and leave by ``os._exit``, for MPI_Finalize
would wait for the dead. The launcher is ended once all reports are there that can come.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from . import environment, mpirun, rank

_OPTIONS = {"mpich": ("-disable-auto-cleanup",), "openmpi": ("--enable-recovery",)}


def run(
    function: Callable[..., Any],
    ranks: int,
    *,
    lost: Collection[int],
    timeout: float = 60.0,
    multicast: bool = False,
    **arguments: Any,
) -> list[dict[str, Any] | None]:
    """Call ``function(comm, **arguments)`` on every rank; each rank's report, None for those in ``lost``.

    Raises RanksFailed if a rank that is not in ``lost`` does not report within ``timeout`` seconds.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    launcher = mpirun.launcher()
    with tempfile.TemporaryDirectory(prefix="lamport-survivors-") as folder:
        job = {"function": name, "arguments": arguments, "timeout": timeout}
        Path(folder, "job.json").write_text(json.dumps(job))
        mark = uuid.uuid4().hex
        env = {**environment.of_ranks(multicast=multicast), mpirun._JOB: mark}
        if launcher.library:
            env.setdefault("MPI4PY_LIBMPI", str(launcher.library))
        argv = [launcher.path, *launcher.options, *_OPTIONS[launcher.family], "-n", str(ranks)]
        argv += [sys.executable, "-m", "helpers.survivors", folder]
        started = time.monotonic()
        with open(Path(folder, "launcher.log"), "w") as log:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True
            )
            try:
                awaited = [Path(folder, f"{r}.json") for r in range(ranks) if r not in lost]
                while time.monotonic() < started + timeout and not all(path.exists() for path in awaited):
                    time.sleep(0.02)
            finally:
                mpirun._end(process, mark)
        results = [mpirun._load(Path(folder, f"{r}.json")) for r in range(ranks)]
        if any(results[r] is None for r in range(ranks) if r not in lost):
            logs = [mpirun._text(Path(folder, f"{r}.log")) for r in range(ranks)]
            said = mpirun._text(Path(folder, "launcher.log"))
            done = mpirun.Completed(124, said, "", time.monotonic() - started, True)
            raise mpirun.RanksFailed(mpirun._story(name, ranks, done, results, logs), results)
        return results


def keep(folder: Path) -> None:
    """The launcher's child: start the rank where the launcher's signals do not reach it, and stay."""
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # the launcher's descriptors go along: the rank speaks to it through them
    argv = [sys.executable, "-m", "helpers.survivors", str(folder), "rank"]
    subprocess.Popen(argv, start_new_session=True, close_fds=False)
    while True:
        time.sleep(3600)


def be_rank(folder: Path) -> None:
    """One rank."""
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    job = json.loads((folder / "job.json").read_text())
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    me = comm.Get_rank()
    log = os.open(folder / f"{me}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        rank.report(folder, me, {"value": mpirun.resolve(job["function"])(comm, **job["arguments"])})
    except BaseException as error:
        rank.report(folder, me, {"error": rank.describe(error)})
    sys.stderr.flush()
    time.sleep(job["timeout"])  # a rank that left would itself be missed
    os._exit(0)


if __name__ == "__main__":
    (be_rank if len(sys.argv) > 2 else keep)(Path(sys.argv[1]))
