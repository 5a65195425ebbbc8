"""NVIDIA's Multi-Process Service, for ranks that share a GPU: started with folders of its own, and ended again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def service() -> Iterator[dict[str, str] | None]:
    """Run the daemon; gives the variables that its clients need, or None (with a line that says why) without it.

    The folders are temporary, so that no other daemon on the machine is met or disturbed.
    """
    if shutil.which(CONTROL) is None:
        print(f"no {CONTROL}: the ranks share the GPU by time slices, which is slow", flush=True)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            os.mkdir(path, 0o700)
        env = {**os.environ, **variables}
        if not _start(env):
            yield None
            return
        try:
            yield variables
        finally:
            _quit(env, Path(variables["CUDA_MPS_PIPE_DIRECTORY"]))
            for log in sorted(Path(variables["CUDA_MPS_LOG_DIRECTORY"]).glob("*.log")):
                print(f"--- {log.name}, its end\n{log.read_text(errors='replace')[-1500:]}", flush=True)


def _start(env: dict[str, str]) -> bool:
    try:
        said = subprocess.run(
            [CONTROL, "-d"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{CONTROL} did not start ({error}): the ranks share the GPU by time slices", flush=True)
        return False
    if said.returncode:
        print(f"{CONTROL} did not start: {said.stdout}{said.stderr}", flush=True)
        return False
    time.sleep(1)
    return True


def _quit(env: dict[str, str], pipe: Path) -> None:
    """Ask the daemon to end; if it does not, end it by its number."""
    number = None
    with contextlib.suppress(OSError, ValueError):
        number = int((pipe / f"{CONTROL}.pid").read_text())
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([CONTROL], env=env, input="quit -t 5\n", text=True, capture_output=True, timeout=30, check=False)
    for _ in range(50):
        if number is None or not Path(f"/proc/{number}").exists():
            return
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
