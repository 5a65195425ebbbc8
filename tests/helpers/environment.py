"""The environment of tests: which device, and whether multicast may be used at all.

Multicast must never be made on a GPU by a test: the switches that other libraries obey are set in every process that a
test starts, and cleared only together with the emulated device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

DEVICE = "LAMPORT_NUMBA_DEVICE"
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
OURS = "LAMPORT_NUMBA_DISABLE_MULTICAST"

_TESTS = Path(__file__).resolve().parent.parent


def forbid_multicast(env: MutableMapping[str, str]) -> None:
    """Set the switches that forbid multicast."""
    env.update(OFF)


def allow_multicast(env: MutableMapping[str, str]) -> None:
    """Clear every switch that forbids multicast; refused unless ``env`` names the emulated device."""
    if env.get(DEVICE) != "emulated":
        raise ValueError(f"multicast is for {DEVICE}=emulated only in tests, and it is {env.get(DEVICE)!r}")
    for name in (*OFF, OURS):
        env.pop(name, None)


def of_this_process() -> None:
    """Prepare this process (pytest's): the emulated device unless told otherwise, with multicast; a GPU without."""
    os.environ.setdefault(DEVICE, "emulated")
    if os.environ[DEVICE] == "emulated":
        allow_multicast(os.environ)
    else:
        forbid_multicast(os.environ)


def of_ranks(changes: Mapping[str, str | None] | None = None, *, multicast: bool = False) -> dict[str, str]:
    """The environment of processes that a test starts: this one's, with ``changes`` (None removes).

    The emulated device unless the environment names another; without multicast unless asked for.
    """
    env = {name: value for name, value in os.environ.items() if not _of_a_launcher(name)}
    env.setdefault(DEVICE, "emulated")
    paths = [str(_TESTS), str(_TESTS.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["PYTHONUNBUFFERED"] = env["PYTHONFAULTHANDLER"] = "1"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        env.setdefault(name, "1")  # ranks share the cores already
    forbid_multicast(env)
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    if multicast:
        allow_multicast(env)
    elif env.get(DEVICE) != "emulated":
        forbid_multicast(env)  # no list of changes may clear them on a GPU
    return env


def _of_a_launcher(name: str) -> bool:
    """Whether a launcher set this variable for the process we are in, which may itself be a rank."""
    mark = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "HYDRA_", "HYDI_", "PRTE_")
    return name.startswith(mark) and "_MCA_" not in name  # Open MPI's parameters are the machine's, not a launch's
