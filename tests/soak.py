"""Ten minutes of random calls, resets, graph replays and fresh instances, every word compared; nothing may grow.

    mpirun -n 4 python tests/soak.py [--seconds 600] [--seed 1]

Ends with an error on all ranks at the first wrong word, at any report, or if memory, descriptors or mappings grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from helpers import environment  # noqa: E402
from helpers.ranks import graph, new_stream, synchronise  # noqa: E402

environment.of_this_process()  # without multicast on a GPU

from lamport_numba import LamportAllGather, TaggedAllGather, device_array, to_device  # noqa: E402
from lamport_numba.errors import PeerTimeout  # noqa: E402

CAPACITY = 4096
PAGE = os.sysconf("SC_PAGE_SIZE")


def part(rank: int, packs: int, turn: int) -> Any:
    return (np.arange(4 * packs) + 7.0 * rank + 1000.0 * (turn % 1000)).astype(np.float32)


def whole(world: int, packs: int, turn: int) -> Any:
    return np.concatenate([part(rank, packs, turn) for rank in range(world)])


def usage() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as statm:
        return {
            "resident MiB": int(statm.read().split()[1]) * PAGE >> 20,
            "mappings": sum(1 for _ in maps),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }


class Soak:
    """One instance after the other; every rank draws the same numbers."""

    def __init__(self, comm: Any, seed: int) -> None:
        self.comm = comm
        self.draw = random.Random(seed)
        self.counts = dict.fromkeys(("calls", "replays", "resets", "timeouts", "refusals", "instances"), 0)

    def instance(self) -> None:
        kind = self.draw.choice((LamportAllGather, TaggedAllGather))
        transport = self.draw.choice(("auto", "peer"))
        with kind(self.comm, CAPACITY, transport=transport, timeout=10) as gather, new_stream() as stream:
            self.counts["instances"] += 1
            for _ in range(self.draw.randint(1, 12)):
                getattr(self, self.draw.choice(("call", "call", "call", "replay", "refuse", "reset")))(gather, stream)
        if self.draw.random() < 0.1:
            self.timeout()

    def call(self, gather: Any, stream: int) -> None:
        queued = []
        for _ in range(self.draw.randint(1, 40)):
            packs, turn = self.draw.randint(1, CAPACITY // 16), self.counts["calls"]
            if self.draw.random() < 0.5:
                packs = self.draw.randint(1, 4)
            queued.append((gather(to_device(part(gather.rank, packs, turn)), stream=stream), packs, turn))
            self.counts["calls"] += 1
        synchronise(stream)
        gather.check()
        for out, packs, turn in queued:
            np.testing.assert_array_equal(out.copy_to_host(), whole(gather.world_size, packs, turn))

    def replay(self, gather: Any, stream: int) -> None:
        packs, turn = self.draw.randint(1, 64), self.counts["replays"]
        out = device_array(4 * packs * gather.world_size, np.float32)
        call = gather.prepare(to_device(part(gather.rank, packs, turn)), out, stream)
        repeats = self.draw.randint(1, 3)
        with graph(stream, lambda: [call() for _ in range(repeats)]) as launch:
            for _ in range(self.draw.randint(1, 20)):
                launch()
                self.counts["replays"] += 1
            synchronise(stream)
        gather.check()
        np.testing.assert_array_equal(out.copy_to_host(), whole(gather.world_size, packs, turn))

    def refuse(self, gather: Any, stream: int) -> None:
        try:
            gather(device_array(CAPACITY + 4, np.float32), stream=stream)
        except ValueError:
            self.counts["refusals"] += 1

    def reset(self, gather: Any, stream: int) -> None:
        gather.reset()
        self.counts["resets"] += 1

    def timeout(self) -> None:
        missing = self.draw.randrange(self.comm.size)
        with LamportAllGather(self.comm, 64, timeout=0.3) as gather:
            if self.comm.rank != missing:
                gather(to_device(part(self.comm.rank, 1, 0)))
                synchronise()
            self.comm.Barrier()
            missed = None
            try:
                gather.check()
            except PeerTimeout as error:
                missed = error.rank
            assert missed == (missing if self.comm.size > 1 else None)
            gather.reset()
        self.counts["timeouts"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    soak = Soak(comm, options.seed)
    start = time.monotonic()
    while comm.bcast(time.monotonic() - start < options.seconds / 4):  # what is loaded once, and pools that fill
        soak.instance()
    soak.timeout()
    first = usage()
    told = start
    while comm.bcast(time.monotonic() - start < options.seconds):
        soak.instance()
        if time.monotonic() - told > 30 and comm.rank == 0:
            told = time.monotonic()
            print(f"{told - start:.0f} s: {soak.counts} {usage()}", flush=True)
    last = usage()
    grown = {
        name: (first[name], last[name])
        for name, most in (("resident MiB", 48), ("mappings", 40), ("descriptors", 4))
        if last[name] > first[name] + most
    }
    everybody = comm.allgather(grown)
    if comm.rank == 0:
        print(f"{time.monotonic() - start:.0f} s, {comm.size} ranks: {soak.counts}; first {first}, last {last}")
        for rank, found in enumerate(everybody):
            if found:
                print(f"rank {rank}: grew: {found}")
        print("NOT WELL: something grew" if any(everybody) else "well: no wrong word, and nothing grew too far")
    return int(any(everybody))


if __name__ == "__main__":
    sys.exit(main())
