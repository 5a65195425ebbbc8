#!/usr/bin/env python3
"""How many gathers a second the emulated device does, by size and fabric.

    mpirun -n 4 python benchmarks/emulator_speed.py [--fabric adversarial] [--json FILE]

Calls are queued in batches and joined; the best of some batches counts, the slowest rank of each. The first
output and the last are compared with what the ranks sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,1K,4K,64K")
    parser.add_argument("--fabric", choices=("immediate", "adversarial"), default="immediate")
    parser.add_argument("--transport", default="peer")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size (2)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--before", metavar="FILE", help="an earlier result, to be shown beside this one")
    options = parser.parse_args()
    os.environ.update(LAMPORT_NUMBA_DEVICE="emulated", LAMPORT_NUMBA_FABRIC=options.fabric)
    from mpi4py import MPI

    from lamport_numba.bench import report, sizes

    comm = MPI.COMM_WORLD
    rows = []
    for nbytes in sizes.doublings(sizes.parse(options.sizes)):
        batch = 100 if options.fabric == "immediate" else 20
        rate = gathers_a_second(comm, nbytes, options.transport, options.seconds, batch)
        rows.append({"bytes": nbytes, "gathers_a_second": round(rate)})
        if comm.Get_rank() == 0:
            print(f"{options.fabric} {sizes.text(nbytes):>6} {rate:10,.0f} gathers a second", flush=True)
    if comm.Get_rank() == 0 and options.json:
        if options.before:
            earlier = {
                row["bytes"]: row["gathers_a_second"] for row in json.loads(Path(options.before).read_text())["rows"]
            }
            for row in rows:
                row["before"] = earlier.get(row["bytes"])
        found = {**report.circumstances(), "emulator": 1, "fabric": options.fabric, "transport": options.transport}
        found["command"] = "python benchmarks/emulator_speed.py" + f" --fabric {options.fabric}" * (
            options.fabric != "immediate"
        )
        Path(options.json).write_text(
            json.dumps({**found, "world": comm.Get_size(), "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )
    return 0


def gathers_a_second(comm: Any, nbytes: int, transport: str, seconds: float, batch: int) -> float:
    """The best batch's rate. Raises RuntimeError if an output is wrong."""
    from lamport_numba import driver
    from lamport_numba.bench import payload
    from lamport_numba.bench.rig import Rig, address_of
    from lamport_numba.collectives import LamportAllGather

    rank, world = comm.Get_rank(), comm.Get_size()
    drv = driver.select().for_rank(rank)
    device = drv.default_device()
    with drv.current(device):
        rig = Rig(drv, device)
        with LamportAllGather(comm, nbytes, transport=transport, timeout=120.0, device=device) as gather:
            source, target = rig.array(nbytes), rig.array(nbytes * world)
            rig.write(address_of(source), payload.words(1, rank, nbytes))
            call = gather.prepare(source, target, rig.stream)
            call()
            wrong = _wrong(rig, address_of(target), world, nbytes)
            best, end = 0.0, time.perf_counter() + seconds
            while all(comm.allgather(time.perf_counter() < end)):  # allreduce would hold Python's lock meanwhile
                comm.Barrier()
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                rig.synchronize()
                best = max(best, batch / max(comm.allgather(time.perf_counter() - start)))
            wrong += _wrong(rig, address_of(target), world, nbytes)
            if wrong:
                raise RuntimeError(f"rank {rank}: {wrong} wrong words at {nbytes} bytes")
        rig.close()
    return best


def _wrong(rig: Any, address: int, world: int, nbytes: int) -> int:
    from lamport_numba.bench import payload

    return int((rig.read(address, nbytes * world) != payload.expected(1, world, nbytes)).sum())


if __name__ == "__main__":
    sys.exit(main())
