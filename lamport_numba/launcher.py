"""What the launcher's environment says about this process, before MPI is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (name, rank, size, rank on this host, ranks on this host); the first launcher whose local rank or rank is set wins.
LAUNCHERS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PALS", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Launched:
    """The launcher's name and numbers; a number it does not tell is None, and all are without a launcher."""

    name: str | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """Read the launcher's variables of this process (or of ``environ``)."""
    env = os.environ if environ is None else environ

    def number(name: str) -> int | None:
        text = env.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else None

    for name, *variables in LAUNCHERS:
        rank, size, local_rank, local_size = map(number, variables)
        if name == "Slurm" and "SLURM_STEP_ID" not in env:
            continue  # a batch script itself carries SLURM_PROCID=0 but is no rank of a step
        if name == "Slurm" and local_size is None and env.get("SLURM_STEP_NUM_NODES") == "1":
            local_size = size
        if rank is not None:
            return Launched(name, rank, size, local_rank, local_size)
    return Launched()
