#!/usr/bin/env python3
"""Everything that a machine with GPUs is needed for, in one go, each step under a limit of its own.

    python3 benchmarks/gpu_session.py OUT                  one GPU, its ranks under MPS
    python3 benchmarks/gpu_session.py OUT --plan two-gpus  one rank a GPU: the comparison with NCCL and NVSHMEM

OUT gets session.json (each step's result, exit status, seconds and last words) and log.txt; it is written again after
each step, so that what was done is there if the machine goes away. --only takes names of steps, --list prints them.
Multicast stays switched off in every process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
LOCAL_ONLY = {  # the bootstrap of both libraries looks for a network; all ranks are on this host
    "NCCL_SOCKET_IFNAME": "lo",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # Open MPI 4 complains of it in containers
}
MPS_SIZES = "16,1K,4K,16K,64K,256K"
ALL_SIZES = "16,1K,4K,16K,64K,256K,512K,1M"


@dataclass(frozen=True)
class Step:
    """A command of ``ranks`` ranks (0: without mpirun), ended after ``limit`` seconds. ``failing``: it may fail."""

    name: str
    ranks: int
    command: tuple[str, ...]
    limit: float
    failing: bool = False
    recovery: bool = False
    unless: str = ""  # a step that makes this one needless if it went well


def bench(name: str, ranks: int, limit: float, against: str, sizes: str, mode: str, **more: Any) -> Step:
    words = ("-m", "lamport_numba", "bench", "--device", "cuda", "--sizes", sizes, "--mode", mode)
    return Step(name, ranks, (*words, *(("--against", against) if against else ())), limit, **more)


def stress(name: str, ranks: int, limit: float, calls: str, *words: str, failing: bool = False) -> Step:
    command = ("-m", "lamport_numba", "stress", "--device", "cuda", "--calls", calls, "--sizes", "16-256K", *words)
    return Step(name, ranks, command, limit, failing)


def control(name: str, ranks: int, calls: str, *words: str) -> Step:
    command = ("benchmarks/negative_controls.py", name, "--device", "cuda", "--calls", calls, "--sizes", "16-256K")
    return Step(f"control-{name}", ranks, (*command, "--timeout", "5", *words), 90, failing=True)


PLANS: dict[str, list[Step]] = {
    "mps": [
        *(bench(f"bench-graph-{n}", n, 120, "tagged", MPS_SIZES, "graph") for n in (2, 3, 4)),
        bench("bench-eager-2", 2, 120, "tagged,mpi", "16,4K,64K", "eager"),
        stress("stress-graph-4", 4, 240, "2M", "--graph"),
        stress("stress-eager-4", 4, 120, "200K"),
        *(stress(f"stress-graph-{n}", n, 120, "500K", "--graph", "--seed", str(n)) for n in (2, 3)),
        *(bench(f"bench-eager-{n}", n, 120, "tagged,mpi", "16,4K,64K", "eager") for n in (3, 4)),
        bench("bench-latency-2", 2, 60, "tagged,mpi", "16,4K,64K", "latency"),
        stress("control-foreign-4", 4, 120, "500K", "--graph", "--foreign", failing=True),
        stress("control-foreign-eager-4", 4, 120, "100K", "--foreign", failing=True),
    ],
    "two-gpus": [
        Step("test-gpu", 0, ("make", "test-gpu", "VENV=", "RANKS=2"), 300),
        bench("bench-graph", 2, 180, "nccl,nvshmem,tagged,mpi", ALL_SIZES, "graph"),
        bench("bench-graph-nccl", 2, 120, "nccl", ALL_SIZES, "graph", unless="bench-graph"),
        bench("bench-graph-nvshmem", 2, 120, "nvshmem", ALL_SIZES, "graph", unless="bench-graph"),
        bench("bench-graph-alone", 2, 120, "tagged", ALL_SIZES, "graph", unless="bench-graph"),
        stress("stress-graph", 2, 420, "10M", "--graph"),
        bench("bench-eager", 2, 180, "nccl,nvshmem,tagged,mpi", "16,1K,4K,64K", "eager"),
        bench("bench-eager-alone", 2, 120, "tagged,mpi", "16,1K,4K,64K", "eager", unless="bench-eager"),
        stress("stress-eager", 2, 240, "1M"),
        control("one-generation", 2, "1M", "--graph"),
        control("generation-before-wait", 2, "1M", "--graph"),
        control("word-0-only", 2, "1M", "--graph"),
        control("foreign", 2, "1M", "--graph"),
        Step("kill-one", 2, ("benchmarks/kill_one.py",), 60, failing=True, recovery=True),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder of the results")
    parser.add_argument("--plan", choices=sorted(PLANS), default="mps")
    parser.add_argument(
        "--only", default="", help="names of steps, with commas; a name ending in * takes all that begin so"
    )
    parser.add_argument("--budget", type=float, default=570.0, help="seconds in all; later steps are left out (570)")
    parser.add_argument(
        "--no-mps", action="store_true", help="do not start MPS: it runs already, or time-slicing is meant"
    )
    parser.add_argument("--list", action="store_true", help="print the steps")
    options = parser.parse_args()
    wanted = [step for step in PLANS[options.plan] if _asked(step.name, options.only)]
    if options.list or options.out is None:
        print("\n".join(f"{step.name:<24}{step.limit:>6.0f} s  {' '.join(step.command)}" for step in wanted))
        return 0 if options.list else 2
    survey = subprocess.run(
        [sys.executable, "-m", "lamport_numba", "info", "--device", "cuda"],
        env={**os.environ, **NO_MULTICAST},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if survey.returncode:
        print(f"{survey.stdout}{survey.stderr}no usable GPU: nothing was run")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    mps = options.plan == "mps" and not options.no_mps
    with _mps() if mps else contextlib.nullcontext({}) as environment:
        if options.plan == "mps":
            environment = {**environment, "LAMPORT_NUMBA_SHARE_DEVICE": "1"}
        return Session(options.out, options.budget, environment).run(wanted)


def _asked(name: str, only: str) -> bool:
    words = [word.strip() for word in only.split(",") if word.strip()]
    return not words or any(name == word or (word.endswith("*") and name.startswith(word[:-1])) for word in words)


class Session:
    """Runs steps and keeps what came of them."""

    def __init__(self, out: Path, budget: float, environment: dict[str, str]) -> None:
        self.out = out
        self.end = time.monotonic() + budget
        self.environment = {**LOCAL_ONLY, **os.environ, **environment, **NO_MULTICAST}
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.environment["PYTHONUNBUFFERED"] = "1"
        self.results: dict[str, Any] = {}

    def run(self, steps: list[Step]) -> int:
        for step in steps:
            left = self.end - time.monotonic()
            if step.unless and self.results.get(step.unless, {}).get("status") == 0:
                continue
            if left < 15:
                self.results[step.name] = {"status": None, "skipped": "no time left"}
                print(f"{step.name:<24} left out: no time left", flush=True)
            else:
                self._step(step, min(step.limit, left - 5))
            (self.out / "session.json").write_text(json.dumps(self.results, indent=1) + "\n")
        bad = [
            step.name
            for step in steps
            if not step.failing and self.results.get(step.name, {"status": 0})["status"] != 0
        ]
        print(f"not well: {', '.join(bad)}" if bad else "all steps well")
        return 1 if bad else 0

    def _step(self, step: Step, limit: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = list(step.command)
            if step.ranks:
                # a program of ours writes its result; make does not
                command = [*mpirun(step), "-n", str(step.ranks), sys.executable, *command, "--json", str(result)]
            start = time.monotonic()
            status, said = run(command, limit, self.environment)
            found: dict[str, Any] = {"command": " ".join(step.command), "ranks": step.ranks, "status": status}
            found["seconds"] = round(time.monotonic() - start, 1)
            if result.exists() and result.read_text().strip():
                found["result"] = json.loads(result.read_text())
            found["said"] = said[-3000:]
        self.results[step.name] = found
        with (self.out / "log.txt").open("a") as log:
            log.write(f"==== {step.name}: {' '.join(command)}\n{said}\n==== status {status}, {found['seconds']} s\n")
        print(f"{step.name:<24} status {status}, {found['seconds']} s", flush=True)
        print(said[-2500:] if status else _gist(said), flush=True)


def mpirun(step: Step) -> list[str]:
    """The launcher with what Open MPI wants in a container, if it is Open MPI's."""
    found = os.environ.get("MPIRUN") or shutil.which("mpirun") or "mpirun"
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        return [found, *(["-disable-auto-cleanup"] if step.recovery else [])]
    words = [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return words + (["--enable-recovery"] if step.recovery else [])


def run(command: list[str], limit: float, environment: dict[str, str]) -> tuple[int, str]:
    """(exit status, output) of a command, which is ended with all its processes after ``limit`` seconds: status 124."""
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = started.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(5)
        output.seek(0)
        return status, output.read()


def _gist(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return "\n".join(lines[-24:])


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """Start the MPS daemon with folders of its own; end it after."""
    folder = tempfile.mkdtemp(prefix="mps")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in environment.values():
        os.mkdir(path, 0o700)
    program = shutil.which("nvidia-cuda-mps-control") or "nvidia-cuda-mps-control"
    subprocess.run([program, "-d"], env={**os.environ, **environment}, check=True, timeout=30)
    try:
        yield environment
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [program], input="quit\n", text=True, env={**os.environ, **environment}, check=False, timeout=30
            )
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
