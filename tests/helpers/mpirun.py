"""Run a function or a command under ``mpirun -n N``, within a hard limit of time, and collect a result from every rank.

    values = mpirun.run(function, 4, size=1024)           # function(comm, size=1024) on each rank; its results, by rank
    done = mpirun.command(["-m", "lamport_numba", "demo"], 4)     # done.returncode, done.stdout, done.stderr

Both work with the mpirun of MPICH and of Open MPI. A run that goes wrong, or on for too long, ends every process that
it started and raises RanksFailed, whose text has the error and the output of each rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import environment

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
_JOB = "LAMPORT_TEST_JOB"  # every process of a run carries it, so that none outlives the run


class RanksFailed(AssertionError):
    """A run under mpirun failed. ``results`` has what the ranks reported, by rank; None for one that did not."""

    def __init__(self, message: str, results: list[dict[str, Any] | None]) -> None:
        super().__init__(message)
        self.results = results


@dataclass(frozen=True)
class Completed:
    """A finished command: its exit status, output, and the seconds that it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True)
class Launcher:
    """An mpirun and how it likes to be called."""

    path: str
    family: str  # "mpich" or "openmpi"
    version: str
    options: tuple[str, ...] = field(default=())

    @property
    def library(self) -> str | None:
        """The MPI library beside it, where mpi4py would not look by itself: only below its own prefix."""
        folder = Path(self.path).absolute().parent.parent / "lib"
        found = next((file for file in (folder / "libmpi.so.12", folder / "libmpi.so.40") if file.is_file()), None)
        return None if found is None or folder.parent == Path(sys.prefix) else str(found)

    def argv(self, ranks: int) -> list[str]:
        return [self.path, *self.options, "-n", str(ranks)]


@functools.cache
def launcher(path: str | None = None) -> Launcher:
    """The mpirun to use: ``path``, else $MPIRUN, else that of the mpich wheel, else PATH's.

    The wheel's lies beside this python, or in a folder of PYTHONPATH that was filled with ``pip install --target``.
    """
    places = [Path(sys.executable).parent, *(Path(entry, "bin") for entry in sys.path if entry)]
    wheel = next((str(place / "mpirun") for place in places if (place / "mpirun").is_file()), None)
    found = path or os.environ.get("MPIRUN") or wheel or shutil.which("mpirun")
    if not found:
        raise FileNotFoundError("no mpirun: install the extra `mpich`, or set MPIRUN")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
    text = said.stdout + said.stderr
    if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower():
        return Launcher(found, "openmpi", text.splitlines()[0], ("--allow-run-as-root", "--oversubscribe"))
    version = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "Version:" in line), "unknown")
    return Launcher(found, "mpich", version)


def run(
    function: Callable[..., Any] | str,
    ranks: int,
    *,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    multicast: bool = False,
    options: Sequence[str] = (),
    check: bool = True,
    **arguments: Any,
) -> list[Any]:
    """Call ``function(comm, **arguments)`` on every rank and return the results, by rank.

    ``function`` is one that can be imported (or "module:name"); arguments and results travel as JSON. ``env`` adds to
    the environment (None removes); ``multicast=True`` allows multicast, on the emulated device only. ``options`` go to
    mpirun.
    Without ``check`` nothing is raised for ranks that failed: the list has each rank's report ({"value": ...} or
    {"error": {"type", "message", "traceback", "attributes"}}) or None where there is none.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="lamport-ranks-") as folder:
        job = {"function": name, "arguments": arguments, "timeout": timeout}
        Path(folder, "job.json").write_text(json.dumps(job))
        argv = [*launcher().argv(ranks), *options, sys.executable, "-m", "helpers.rank", folder]
        done = _execute(argv, timeout, environment.of_ranks(env, multicast=multicast))
        results = [_load(Path(folder, f"{rank}.json")) for rank in range(ranks)]
        logs = [_text(Path(folder, f"{rank}.log")) for rank in range(ranks)]
    if not check:
        return results
    if done.returncode or not all(result and "value" in result for result in results):
        raise RanksFailed(_story(name, ranks, done, results, logs), results)
    return [result["value"] for result in results if result]


def command(
    arguments: Sequence[str],
    ranks: int | None,
    *,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    multicast: bool = False,
    options: Sequence[str] = (),
    check: bool = True,
) -> Completed:
    """Run ``python *arguments`` on ``ranks`` ranks (None: without mpirun).

    Raises RanksFailed for an exit status other than 0, unless ``check`` is False.
    """
    start = [] if ranks is None else [*launcher().argv(ranks), *options]
    argv = [*start, sys.executable, *arguments]
    done = _execute(argv, timeout, environment.of_ranks(env, multicast=multicast))
    if check and done.returncode:
        raise RanksFailed(_story(" ".join(arguments), ranks or 1, done, [], []), [])
    return done


def _execute(argv: Sequence[str], timeout: float, env: dict[str, str]) -> Completed:
    job = uuid.uuid4().hex
    env = {**env, _JOB: job}
    if argv[0] == launcher().path and launcher().library:
        env.setdefault("MPI4PY_LIBMPI", str(launcher().library))
    started = time.monotonic()
    # Files and no pipes: a grandchild that lives on would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process, job)
        out.seek(0)
        err.seek(0)
        seconds = time.monotonic() - started
        status = 124 if timed_out else process.returncode
        return Completed(status, out.read(), err.read(), seconds, timed_out)


def _end(process: subprocess.Popen[str], job: str) -> None:
    """Kill the launcher's group and whatever else of this run is left, in whatever session it is."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    mark = f"{_JOB}={job}".encode()
    for _ in range(20):  # a process may start another while we look
        left = [pid for pid in _processes() if mark in _environ_of(pid)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _load(path: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _story(
    name: str, ranks: int, done: Completed, results: Sequence[dict[str, Any] | None], logs: Sequence[str]
) -> str:
    end = f"killed at its limit of time, after {done.seconds:.0f} s" if done.timed_out else f"exit {done.returncode}"
    lines = [f"{name} on {ranks} ranks: {end}"]
    for rank, result in enumerate(results):
        if result is None:
            lines.append(f"--- rank {rank}: no result")
        elif "error" in result:
            lines += [f"--- rank {rank}: {result['error']['type']}", result["error"]["traceback"].rstrip()]
        else:
            lines.append(f"--- rank {rank}: done")
        if rank < len(logs) and logs[rank].strip():
            lines += [f"    output of rank {rank}:", logs[rank].rstrip()]
    for label, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        if text.strip():
            lines += [f"--- launcher's {label}:", text.rstrip()]
    return "\n".join(lines)


def resolve(name: str) -> Callable[..., Any]:
    """The function that "module:name" means."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function
