"""Find the largest eigenvalue of a sharded matrix by power iteration, with the gather of each step in a CUDA graph.

    mpirun -n 4 python examples/power_iteration.py --steps 30

Each rank holds some rows. In every step it multiplies them with the whole vector, and all ranks gather the new one. The
gather is prepared and captured once, on a stream of its own, and the graph is launched in every step; a program of
yours would capture its own kernels beside it. All ranks find the same value, bit for bit, and it is numpy's.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from lamport_numba import LamportAllGather, Stream, device_array, to_device


def matrix(size):
    """A symmetric matrix of positive numbers, the same on every rank."""
    half = np.random.default_rng(1).random((size, size))
    return (half + half.T).astype(np.float32)


def run(comm, rows=64, steps=30):
    """The largest eigenvalue of a matrix with so many rows a rank, a multiple of 4."""
    rank, size = comm.Get_rank(), rows * comm.Get_size()
    mine = matrix(size)[rank * rows : (rank + 1) * rows]
    vector, value = np.full(size, size**-0.5, np.float32), 0.0
    with Stream() as stream, LamportAllGather(comm, rows * 4) as gather:
        part, whole = device_array(rows, np.float32), device_array(size, np.float32)
        call = gather.prepare(part, whole, stream)
        with stream.graph(call) as graph:
            for _ in range(steps):
                part.copy_to_device(to_device(mine @ vector))
                graph.launch()
                stream.synchronize()
                vector = whole.copy_to_host()
                value = float(np.linalg.norm(vector))
                vector /= np.float32(value)
        gather.check()
    return value


def main(arguments=None):
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="launches of the graph (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps is at least 1")
    comm = MPI.COMM_WORLD
    values = comm.allgather(run(comm, steps=options.steps))
    exact = np.linalg.eigvalsh(matrix(64 * comm.Get_size()))[-1]
    well = len(set(values)) == 1 and abs(values[0] / exact - 1) < 1e-5
    if comm.Get_rank() == 0:
        ranks = f"{comm.Get_size()} rank{'s'[: comm.Get_size() > 1]}"
        print(f"{ranks}: {values[0]:.5f} by iteration, {exact:.5f} by numpy: {'they agree' if well else 'they DIFFER'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
