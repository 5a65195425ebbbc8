"""Rank the modules of Python's standard library by who imports them: PageRank with its rows sharded over the ranks.

    mpirun -n 4 python examples/pagerank.py --top 15

The graph is real: every module of the library is parsed with ``ast``, an edge leads from a module to each one that it
imports. Each rank holds a slice of the rows; in every iteration it computes its slice of the vector in float32 and all
ranks gather the whole vector. The vector is the same, bit for bit, for every number of ranks, and as by MPI's own
Allgather.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lamport_numba

DAMPING = np.float32(0.85)
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
SENTINEL = np.uint32(0x80000000)  # -0.0, which the mailbox carries as 0.0


@dataclass
class Outcome:
    """What a run gave: module names and their ranks (float32), and how many iterations differed from MPI in any bit."""

    names: list[str]
    edges: int
    ranks: np.ndarray[Any, Any]
    iterations: int
    change: float
    bytes_a_rank: int
    different: int
    transport: Any


def import_graph(rank: int = 0, world: int = 1, comm: Any = None) -> tuple[list[str], list[tuple[int, int]]]:
    """Module names, and edges (importer, imported) as pairs of indices; the ranks share the parsing."""
    root = Path(os.__file__).parent
    files = {_module(root, file): file for file in _files(root)}
    names = sorted({*files, *sys.builtin_module_names})
    index = {name: i for i, name in enumerate(names)}
    found = {
        (index[name], index[target])
        for name in sorted(files)[rank::world]
        for target in _imports(name, files[name])
        if target in index and target != name
    }
    parts = [found] if comm is None else comm.allgather(found)
    return names, sorted(set().union(*parts))


def _files(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in SKIPPED and not name.startswith("config-"))
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _module(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, file: Path) -> Iterator[str]:
    """What the module at ``file`` imports, anywhere in its text, relative imports resolved."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            yield target
            yield from (f"{target}.{alias.name}" for alias in node.names)


def pagerank(comm: Any, *, transport: str = "auto", tolerance: float = 1e-6, limit: int = 200) -> Outcome:
    """Iterate until the vector moves by less than ``tolerance``; every gather is compared with ``comm.Allgather``."""
    rank, world = comm.Get_rank(), comm.Get_size()
    names, edges = import_graph(rank, world, comm)
    count = len(names)
    lanes = 4 * world  # each slice is a whole number of 16-byte packs
    padded = -(-count // lanes) * lanes
    low, high = (padded * r // world for r in (rank, rank + 1))

    source, target = np.array(edges).T
    degree = np.bincount(source, minlength=count)
    mine = (target >= low) & (target < high)
    source, row = source[mine], target[mine] - low  # the edges into my rows
    share = (1 / np.maximum(degree, 1)).astype(np.float32)
    dangling = degree == 0
    real = np.arange(low, high) < count  # not padding

    vector = np.zeros(padded, np.float32)
    vector[:count] = 1 / count
    by_mpi = np.empty_like(vector)
    different, change, iteration = 0, 1.0, 0
    with lamport_numba.LamportAllGather(comm, 4 * (high - low), transport=transport) as gather:
        slice_on_device = lamport_numba.device_array((high - low,), np.float32)
        whole_on_device = lamport_numba.device_array((padded,), np.float32)
        while change > tolerance and iteration < limit:
            # bincount adds in the order of the edges, so that a row's sum does not depend on who holds it
            arriving = np.bincount(row, weights=vector[source] * share[source], minlength=high - low)
            lost = vector[:count][dangling].sum(dtype=np.float64) / count
            moved = DAMPING * (arriving + lost).astype(np.float32) + np.float32((1 - DAMPING) / count)
            moved = np.where(real, moved, np.float32(0)).astype(np.float32)
            slice_on_device.copy_to_device(moved)
            gather(slice_on_device, out=whole_on_device)
            new = whole_on_device.copy_to_host()
            comm.Allgather(moved, by_mpi)
            different += not np.array_equal(new.view(np.uint32), _sanitised(by_mpi))
            change = float(np.abs(new - vector).sum(dtype=np.float64))
            vector = new
            iteration += 1
        gather.check()
        used = gather.transport
    return Outcome(names, len(edges), vector[:count], iteration, change, 4 * (high - low), different, used)


def _sanitised(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits as the mailbox delivers them: -0.0 arrives as 0.0."""
    words = values.view(np.uint32)
    return np.where(words == SENTINEL, np.uint32(0), words)


def show(outcome: Outcome, world: int, top: int = 15) -> None:
    """Print the modules that matter most."""
    order = sorted(range(len(outcome.names)), key=lambda i: (-outcome.ranks[i], outcome.names[i]))[:top]
    best = outcome.ranks[order[0]]
    print()
    for place, i in enumerate(order, 1):
        print(f"{place:4}. {outcome.names[i]:24} {outcome.ranks[i]:8.5f}  {'#' * round(40 * outcome.ranks[i] / best)}")
    print()
    print(
        f"{len(outcome.names)} modules, {outcome.edges} imports, {outcome.iterations} iterations (last change "
        f"{outcome.change:.1e}) over {world} rank{'s' * (world > 1)}, {outcome.bytes_a_rank} bytes a rank and "
        f"iteration,\ntransport {outcome.transport}"
    )
    if outcome.different:
        print(f"WRONG: {outcome.different} iterations differ from MPI's Allgather")
    else:
        print("the vector of every iteration has the same bits as by MPI's Allgather")


def main() -> int:
    """Run under mpirun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=15, help="modules to print (15)")
    parser.add_argument("--transport", default="auto", choices=["auto", "peer", "multicast", "measure"])
    parser.add_argument(
        "--device", choices=["auto", "cuda", "emulated"], help="default: LAMPORT_NUMBA_DEVICE, else auto"
    )
    options = parser.parse_args()
    if options.top < 1:
        parser.error("--top is at least 1")
    if options.device:
        os.environ["LAMPORT_NUMBA_DEVICE"] = options.device
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    outcome = pagerank(comm, transport=options.transport)
    if comm.Get_rank() == 0:
        show(outcome, comm.Get_size(), options.top)
    return int(outcome.different > 0)


if __name__ == "__main__":
    sys.exit(main())
