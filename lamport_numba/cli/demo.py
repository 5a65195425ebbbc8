"""Gather real data on every rank through the PTX kernels, and compare every bit with MPI's own Allgather.

    mpirun -n 4 python -m lamport_numba demo

Exits with 1 on any difference. With fewer GPUs than ranks the emulated device is used instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from types import ModuleType

from .. import shipped
from .._version import __version__
from . import _common

SUMMARY = "gather real data on every rank and compare with MPI"

EXAMPLES = {
    "decode": "vocab_parallel_decode",
    "pagerank": "pagerank",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own options."""
    parser.add_argument("--example", choices=sorted(EXAMPLES), default="decode", help="which one to run (decode)")


def run(options: argparse.Namespace) -> int:
    """Run an example on all ranks; 1 if any bit differs from MPI's answer."""
    comm = _common.world()
    rank, world = comm.Get_rank(), comm.Get_size()
    chosen = _common.choose_device(comm, options, fall_back_if_few=True)
    if rank == 0:
        print(f"lamport-numba {__version__}")
        print(f"device     {chosen}")
        print(
            f"world      {world} rank{'s' * (world != 1)} on {chosen.hosts} host{'s' * (chosen.hosts != 1)}", flush=True
        )
    example = load(EXAMPLES[options.example])
    work = example.decode if options.example == "decode" else example.pagerank
    outcome = work(comm, transport=_common.asked_transport(options))
    if rank == 0:
        print(f"transport  {outcome.transport}")
        example.show(outcome, world)
        sys.stdout.flush()
    return int(any(comm.allgather(outcome.different > 0)))


def load(name: str) -> ModuleType:
    """Import an example by its file's name, without the suffix."""
    spec = importlib.util.spec_from_file_location(name, shipped.folder("examples") / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
