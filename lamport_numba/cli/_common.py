"""What the commands share: --device and --transport, the start of MPI, and the choice of the device by all ranks."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceFallbackWarning
from ..launcher import Launched, launched

_HEARD = 0.3  # seconds: an abort may overtake words that the launcher has not read yet, and they are lost then


class CannotStart(Exception):
    """The command cannot start; the message says what to do, or is empty where another rank says it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command takes."""
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "emulated"),
        help="cuda: NVIDIA GPUs; emulated: the same PTX on the CPU; auto: cuda where it is usable, else emulated "
        "(default: LAMPORT_NUMBA_DEVICE, else auto)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "peer", "multicast", "measure"),
        help="how words reach the other ranks (default: LAMPORT_NUMBA_TRANSPORT, else auto)",
    )


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def asked_device(options: argparse.Namespace) -> str:
    """The device that was asked for, by option or by variable."""
    from .. import settings

    if options.device:
        os.environ["LAMPORT_NUMBA_DEVICE"] = options.device
    return str(settings.get("DEVICE"))


def asked_transport(options: argparse.Namespace) -> str:
    """The transport that was asked for, by option or by variable."""
    from .. import settings

    return options.transport or str(settings.get("TRANSPORT"))


def world() -> Any:
    """Start MPI and return COMM_WORLD.

    Raises CannotStart if the launcher and the MPI library do not belong together.
    """
    from mpi4py import MPI

    from ..collectives.reports import MAX_WORLD

    said, size = launched(), MPI.COMM_WORLD.Get_size()
    complaint = mismatch(said, size, MPI.Get_library_version())
    if complaint is None and size > MAX_WORLD:
        complaint = f"{size} ranks were started; expected at most {MAX_WORLD}"
    if complaint is not None:
        raise CannotStart(complaint if said.rank in (0, None) and MPI.COMM_WORLD.Get_rank() == 0 else "")
    return MPI.COMM_WORLD


def mismatch(said: Launched, size: int, library: str) -> str | None:
    """What is wrong if the launcher started several ranks and the MPI library sees only one; None if nothing is."""
    if said.size is None or said.size == size or size != 1:
        return None
    name = library_name(library)
    starter = "srun" if said.name == "Slurm" else f"the launcher of {said.name}"
    return (
        f"{starter} started {said.size} ranks, but the MPI library that mpi4py loads ({name}) sees a world of 1: the "
        "launcher does not belong to the library. Use that library's own mpirun (the extra `mpich` puts MPICH's beside "
        "python), or choose the library with MPI4PY_LIBMPI; with srun try --mpi=pmi2 or --mpi=pmix"
    )


def library_name(text: str) -> str:
    """The MPI library's name and version from what MPI_Get_library_version says."""
    return " ".join(text.split(",")[0].split("\n")[0].strip("\0 ").replace("Version:", "").split())


def rank() -> int:
    """This process's rank, 0 where MPI was not started."""
    mpi = _started()
    return int(mpi.COMM_WORLD.Get_rank()) if mpi is not None else 0


def check_file(comm: Any, name: str, file: str | os.PathLike[str] | None) -> None:
    """Find out before the work, and on all ranks, whether rank 0 can write ``file``, given as the option ``name``."""
    wrong = None
    if file is not None and comm.Get_rank() == 0:
        try:
            with open(file, "a"):
                pass
        except OSError as error:
            wrong = f"{name} {file}: cannot be written: {error.strerror}"
    wrong, mine = comm.bcast(wrong), wrong
    if wrong is not None:
        raise CannotStart(mine or "")


def end_all_ranks(status: int) -> None:
    """End the whole job if MPI runs with several ranks; the others may wait for this one."""
    mpi = _started()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_HEARD)
        mpi.COMM_WORLD.Abort(status)


def _started() -> Any:
    """mpi4py's module if MPI is running in this process, else None; never starts it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


@dataclass(frozen=True)
class Chosen:
    """The device that all ranks use, why it is not the other one (None: it was asked for), and the hosts."""

    kind: str
    because: str | None
    hosts: int

    def __str__(self) -> str:
        where = "NVIDIA GPUs" if self.kind == "cuda" else "the same PTX on the CPU"
        return f"{self.kind} ({where}{f', because {self.because}' if self.because else ''})"


def choose_device(comm: Any, options: argparse.Namespace, *, fall_back_if_few: bool) -> Chosen:
    """Choose the device for all ranks alike, and make it this process's.

    ``auto`` is cuda if every rank can use it; with ``fall_back_if_few`` there must also be a GPU for each rank of a
    host, unless sharing is allowed.
    """
    from mpi4py import MPI

    from .. import driver, settings

    asked = asked_device(options)
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks_here, first_here = local.Get_size(), local.Get_rank() == 0
    local.Free()
    reason = None
    if asked == "auto":
        reason = driver.why_not_cuda()
        if reason is None and fall_back_if_few and not settings.get("SHARE_DEVICE"):
            gpus = driver.select("cuda").device_count()
            if gpus < ranks_here:
                reason = f"there are {ranks_here} ranks here and {gpus} GPU{'s' * (gpus != 1)}"
    said = comm.allgather((reason, first_here))
    reasons = [found for found, _ in said if found is not None]
    kind = "emulated" if asked == "emulated" or reasons else "cuda"
    os.environ["LAMPORT_NUMBA_DEVICE"] = kind
    warnings.simplefilter("ignore", DeviceFallbackWarning)  # the command says it itself
    return Chosen(kind, reasons[0] if reasons else None, sum(first for _, first in said))
