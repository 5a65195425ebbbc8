#!/usr/bin/env python3
"""Kill one rank in the middle of a graph of calls: the others must raise within the deadline and a second.

    mpirun -n 2 --enable-recovery python3 benchmarks/kill_one.py --json FILE          (Open MPI)

Each survivor prints what it raised and after how long, and exits with 0 if it was a PeerTimeout, in time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

DEADLINE = 3.0
CALLS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    from mpi4py import MPI

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # how MPICH's mpirun tells the survivors
    from lamport_numba import driver
    from lamport_numba.bench.rig import Rig
    from lamport_numba.collectives import LamportAllGather
    from lamport_numba.errors import LamportError

    comm = MPI.COMM_WORLD
    rank, world = comm.Get_rank(), comm.Get_size()
    gather = LamportAllGather(comm, 4096, timeout=DEADLINE)
    drv = driver.select().for_rank(rank)
    with drv.current(gather.device):
        rig = Rig(drv, gather.device)
        call = gather.prepare(rig.array(4096), rig.array(4096 * world), rig.stream)
        graph = rig.repeated(call, CALLS)
        graph.launch()
        rig.synchronize()
        comm.Barrier()
        if rank == world - 1:
            graph.launch()
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        error = None
        try:
            for _ in range(3):
                graph.launch()
            rig.synchronize()
            gather.check()
        except LamportError as failure:
            error = failure
        seconds = time.monotonic() - start
    found = {"raised": type(error).__name__, "text": str(error), "seconds": round(seconds, 3), "deadline": DEADLINE}
    well = found["raised"] == "PeerTimeout" and seconds < DEADLINE + 1
    print(f"rank {rank}: {found}", flush=True)
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps({"kill_one": 1, "well": well, **found}) + "\n")
    sys.stdout.flush()
    os._exit(0 if well else 1)  # MPI's end would wait for the dead rank


if __name__ == "__main__":
    sys.exit(main())
