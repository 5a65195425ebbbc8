"""Scale a sharded vector by the root mean square of the whole: one numba kernel, one launch, no other synchronisation.

    mpirun -n 4 python examples/fused_norm.py --steps 10

The vector lies in pieces on all ranks, and each rank's kernel has several CTAs. Every CTA sums the squares of its
part and hands the sum to CTA 0 through a scratch region; CTA 0 hands the rank's sum to every rank through a peer
region; every CTA of every rank waits for all ranks' sums, adds them in the same order, and scales its part. Two round
trips, and the same factor everywhere, bit for bit.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import numpy as np
from numba import cuda, float32

import lamport_numba
from lamport_numba.mailbox import Mailbox, MailboxLayout, MailboxMemory, float_of, kernel, preg, sreg

CTAS = 4  # of a rank; all must be resident at once, for they wait for each other
THREADS = 128
EPSILON = np.float32(1e-6)


def make_kernel(world: int, layout: MailboxLayout) -> Any:
    """The kernel for ``world`` ranks. Sizes and offsets are constants of it, so that they are checked when it is
    compiled.
    """
    partials_at, inbox_at, stride = layout.offset("partials"), layout.offset("inbox"), layout.stride

    @kernel
    def fused_norm(x, out, factor, count, rank, scratch, peers, epoch, control):  # type: ignore[no-untyped-def]
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control)
        partials = sreg(scratch, partials_at, "partials")
        thread, cta = cuda.threadIdx.x, cuda.blockIdx.x
        shared = cuda.shared.array(THREADS, float32)

        # 1. The squares of this CTA's part.
        total = float32(0)
        for i in range(cta * THREADS + thread, x.size, CTAS * THREADS):
            total += x[i] * x[i]
        shared[thread] = total
        cuda.syncthreads()
        half = THREADS // 2
        while half > 0:
            if thread < half:
                shared[thread] += shared[thread + half]
            cuda.syncthreads()
            half //= 2

        if thread == 0:
            # 2. From every CTA to CTA 0, on this GPU.
            mailbox.put(partials, cta, shared[0])
            if cta == 0:
                sums = mailbox.poll_each(partials, 0, 1, CTAS, 1)
                mine = float32(0)
                for k in range(CTAS):
                    mine += float_of(sums[k][0])
                # 3. From CTA 0 to every rank, into the buffer of this launch.
                for peer in range(world):
                    mailbox.put(preg(peers[peer], inbox_at + parity * stride, "inbox"), rank, mine)
            # 4. Every CTA waits for every rank, and adds in rank order.
            inbox = preg(peers[rank], inbox_at + parity * stride, "inbox")
            sums_of_ranks = mailbox.poll_each(inbox, 0, 1, world, 1)
            whole = float32(0)
            for r in range(world):
                whole += float_of(sums_of_ranks[r][0])
            shared[0] = float32(1) / math.sqrt(whole / count + EPSILON)
            if cta == 0:
                factor[0] = shared[0]
        cuda.syncthreads()

        # 5. Scale.
        scale = shared[0]
        for i in range(cta * THREADS + thread, x.size, CTAS * THREADS):
            out[i] = x[i] * scale

    return fused_norm


def run(
    comm: Any, *, length: int = 10_000, steps: int = 5, timeout: float = 60.0, share_device: bool | None = None
) -> float:
    """Normalise ``steps`` random vectors of ``length`` floats a rank; returns the largest relative error against numpy.

    Raises AssertionError if the ranks' factors differ in any bit.
    """
    rank, world = comm.Get_rank(), comm.Get_size()
    layout = MailboxLayout(scratch={"partials": CTAS}, peer={"inbox": world})
    fused_norm = make_kernel(world, layout)
    worst = 0.0
    with MailboxMemory(comm, layout, timeout=timeout, share_device=share_device) as memory:
        for step in range(steps):
            draws = [np.random.default_rng([step, r]) for r in range(world)]
            shards = [draw.normal(step, 1 + r, length).astype(np.float32) for r, draw in enumerate(draws)]
            x = lamport_numba.to_device(shards[rank])
            out = lamport_numba.device_array((length,), np.float32)
            factor = lamport_numba.device_array((1,), np.float32)
            memory.epoch.advance()
            fused_norm[CTAS, THREADS](x, out, factor, np.float32(length * world), rank, *memory.arguments)
            scaled = out.copy_to_host()
            memory.check()

            whole = np.concatenate(shards).astype(np.float64)
            expected = shards[rank] / np.sqrt(np.mean(whole * whole) + float(EPSILON))
            worst = max(worst, float(np.max(np.abs(scaled - expected) / np.maximum(np.abs(expected), 1e-6))))
            factors = comm.allgather(factor.copy_to_host().tobytes())
            assert len(set(factors)) == 1, f"rank {rank}: the ranks' factors differ: {factors}"
    return worst


def main(arguments: list[str] | None = None) -> int:
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=10_000, help="floats a rank (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="vectors (default %(default)s)")
    parser.add_argument("--share-device", action="store_true", help="let ranks share a GPU")
    options = parser.parse_args(arguments)
    if min(options.length, options.steps) < 1:
        parser.error("--length and --steps are at least 1")
    comm = MPI.COMM_WORLD
    worst = run(comm, length=options.length, steps=options.steps, share_device=options.share_device or None)
    worst = max(comm.allgather(worst))
    if comm.Get_rank() == 0:
        ranks = f"{comm.Get_size()} rank{'s'[: comm.Get_size() > 1]}"
        print(f"{ranks}, {options.steps} vectors of {options.length} floats a rank: largest relative error {worst:.1e}")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
