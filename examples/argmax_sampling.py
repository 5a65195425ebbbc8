"""Draw tokens from a vocabulary that is sharded over the ranks: all ranks' best candidates meet in one launch.

    mpirun -n 4 python examples/argmax_sampling.py --steps 20

Drawing from softmax(logits) is taking the argmax of logits + Gumbel noise. Each rank scores its shard, finds its best
(value, index) and puts both as raw words, so that no bit of a NaN or of a large index is lost. Every rank polls all
candidates and makes the same choice. As numpy has it, the first NaN wins, then the largest value, then the lowest
index.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from numba import cuda, float32, int32

import lamport_numba
from lamport_numba.mailbox import Mailbox, MailboxLayout, MailboxMemory, float_of, int_of, kernel, preg

THREADS = 128


def make_kernel(world: int, layout: MailboxLayout) -> Any:
    """The kernel for ``world`` ranks: one CTA."""
    inbox_at, stride = layout.offset("candidates"), layout.stride

    @kernel
    def sample(scores, first, chosen, rank, scratch, peers, epoch, control):  # type: ignore[no-untyped-def]
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control)
        thread = cuda.threadIdx.x
        values = cuda.shared.array(THREADS, float32)
        indices = cuda.shared.array(THREADS, int32)

        # 1. The best of this shard. A value is better if it is the first NaN, or greater; of equals, the lower index.
        best, at = scores[thread], int32(first + thread)
        for i in range(thread + THREADS, scores.size, THREADS):
            value = scores[i]
            if best == best and (value != value or value > best):
                best, at = value, int32(first + i)
        values[thread], indices[thread] = best, at
        cuda.syncthreads()
        half = THREADS // 2
        while half > 0:
            if thread < half:
                a, b = values[thread], values[thread + half]
                i, j = indices[thread], indices[thread + half]
                if (b != b and (a == a or j < i)) or (a == a and (b > a or (b == a and j < i))):
                    values[thread], indices[thread] = b, j
            cuda.syncthreads()
            half //= 2

        if thread == 0:
            # 2. To every rank: value and index, two pairs in one store.
            for peer in range(world):
                inbox = preg(peers[peer], inbox_at + parity * stride, "candidates")
                mailbox.put_words(inbox, 2 * rank, (int_of(values[0]), indices[0]))

            # 3. From every rank, in one poll; ranks hold their indices in order, so an equal later one never wins.
            found = mailbox.poll_each(preg(peers[rank], inbox_at + parity * stride, "candidates"), 0, 2, world, 2)
            word, token = found[0][0], found[0][1]
            for r in range(1, world):
                a, b = float_of(word), float_of(found[r][0])
                if a == a and (b != b or b > a):
                    word, token = found[r][0], found[r][1]
            chosen[0], chosen[1] = token, word

    return sample


def run(
    comm: Any,
    *,
    vocabulary: int = 50_000,
    steps: int = 5,
    nan_step: int | None = 3,
    timeout: float = 60.0,
    share_device: bool | None = None,
) -> list[int]:
    """Draw ``steps`` tokens; in ``nan_step`` two scores are NaNs with a payload. Returns the tokens.

    Raises AssertionError if a token, or the bits of its score, are not those that numpy finds in the whole vector.
    """
    rank, world = comm.Get_rank(), comm.Get_size()
    low, high = (vocabulary * r // world for r in (rank, rank + 1))
    if high - low < THREADS:
        raise ValueError(f"a shard has {high - low} scores; at least {THREADS} are needed")
    layout = MailboxLayout(peer={"candidates": 2 * world})
    sample = make_kernel(world, layout)
    tokens = []
    with MailboxMemory(comm, layout, timeout=timeout, share_device=share_device) as memory:
        for step in range(steps):
            draw = np.random.default_rng(step)
            scores = (draw.normal(0, 3, vocabulary) + draw.gumbel(size=vocabulary)).astype(np.float32)
            if step == nan_step:
                bits = scores.view(np.uint32)
                bits[vocabulary - 7], bits[vocabulary // 2] = 0x7FC01234, 0xFFA00001
            chosen = lamport_numba.to_device(np.zeros(2, np.uint32))
            memory.epoch.advance()
            shard = lamport_numba.to_device(scores[low:high])
            sample[1, THREADS](shard, np.int32(low), chosen, np.int32(rank), *memory.arguments)
            token, word = chosen.copy_to_host()
            memory.check()
            best = int(np.argmax(scores))
            assert token == best, f"step {step}: rank {rank} chose {token}, numpy {best}"
            assert word == scores.view(np.uint32)[best], f"step {step}: rank {rank} has the bits {word:#010x}"
            tokens.append(int(token))
    return tokens


def main(arguments: list[str] | None = None) -> int:
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=50_000, help="scores in all (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="tokens to draw (default %(default)s)")
    parser.add_argument("--share-device", action="store_true", help="let ranks share a GPU")
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    least = THREADS * comm.Get_size()
    if options.steps < 1 or options.vocabulary < least:
        parser.error(f"--steps is at least 1, --vocabulary at least {THREADS} a rank, {least} in all")
    tokens = run(comm, vocabulary=options.vocabulary, steps=options.steps, share_device=options.share_device or None)
    agreed = len(set(map(tuple, comm.allgather(tokens)))) == 1
    if comm.Get_rank() == 0:
        ranks = f"{comm.Get_size()} rank{'s'[: comm.Get_size() > 1]}"
        print(f"{ranks} drew {tokens}: {'all agree with numpy' if agreed else 'ranks DIFFER'}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
