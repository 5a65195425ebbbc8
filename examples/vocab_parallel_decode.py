"""Write text with a language model whose vocabulary is sharded over the ranks, as large models are decoded.

    mpirun -n 4 python examples/vocab_parallel_decode.py --steps 120

The model is counted from real text that every CPython carries: the language reference in ``pydoc_data.topics``. In each
step every rank scores its own shard of the vocabulary in float32, all ranks gather all logits, and all draw the same
next word from them. The text is the same for every number of ranks, and the logits are, bit for bit, what MPI's own
Allgather gives.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import numpy as np

import lamport_numba

PROMPT = ("The", "value", "of")
ORDER = 3  # words of context that the model looks back on, at most
WEIGHTS = (1.0, 2.0, 3.5, 5.0)  # of no context, one word, two, three
REPEATED = 2.0  # what a word loses that was said a moment ago
SENTINEL = np.uint32(0x80000000)  # -0.0, which the mailbox carries as 0.0


class Model:
    """Counts of what followed what, for the words with indices low <= index < high."""

    def __init__(self, rank: int, world: int) -> None:
        words = _words()
        counts = Counter(words)
        self.vocabulary = sorted(counts)
        lanes = 4 * world  # each shard is a whole number of 16-byte packs
        self.padded = -(-len(self.vocabulary) // lanes) * lanes
        self.low, self.high = (self.padded * r // world for r in (rank, rank + 1))
        self.index = {word: i for i, word in enumerate(self.vocabulary)}
        log = [np.float32(math.log1p(n)) for n in range(max(counts.values()) + 1)]
        shard = self.vocabulary[self.low : self.high]
        self.base = np.full(self.high - self.low, -np.inf, np.float32)  # padding is never drawn
        self.base[: len(shard)] = [np.float32(WEIGHTS[0]) * log[counts[word]] for word in shard]
        follows: defaultdict[tuple[str, ...], Counter[int]] = defaultdict(Counter)
        for at, word in enumerate(words):
            index = self.index[word]
            if self.low <= index < self.high:
                for length in range(1, min(ORDER, at) + 1):
                    follows[tuple(words[at - length : at])][index - self.low] += 1
        self.follows = {
            context: (np.array(list(found)), np.array([log[n] for n in found.values()], np.float32))
            for context, found in follows.items()
        }

    def logits(self, text: list[str]) -> np.ndarray[Any, Any]:
        """Score this rank's shard as the next word of ``text``: float32, one for each word of the shard."""
        scores = self.base.copy()
        for length in range(1, ORDER + 1):
            found = self.follows.get(tuple(text[-length:]))
            if found is not None:
                where, logs = found
                scores[where] += np.float32(WEIGHTS[length]) * logs
        for word in {word for word in text[-12:] if word.isalpha()}:
            if self.low <= self.index[word] < self.high:
                scores[self.index[word] - self.low] -= np.float32(REPEATED)
        return scores


@dataclass
class Outcome:
    """What a run gave: the words, and how many steps' logits differed from MPI's in any bit."""

    words: list[str]
    vocabulary: int
    bytes_a_rank: int
    steps: int
    different: int
    transport: Any

    def text(self) -> str:
        """The words as prose."""
        prose = re.sub(r" ([.,;:)])", r"\1", " ".join(self.words)).replace("( ", "(")
        return re.sub(r"(^|[.] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), prose)


def decode(comm: Any, *, steps: int = 120, seed: int = 2, transport: str = "auto") -> Outcome:
    """Draw ``steps`` words, all ranks together; every step's logits are compared with ``comm.Allgather``."""
    rank, world = comm.Get_rank(), comm.Get_size()
    model = Model(rank, world)
    shard_bytes = 4 * (model.high - model.low)
    text, draw, different = list(PROMPT), random.Random(seed), 0
    by_mpi = np.empty(model.padded, np.float32)
    with lamport_numba.LamportAllGather(comm, shard_bytes, transport=transport) as gather:
        for _ in range(steps):
            mine = model.logits(text)
            logits = gather(lamport_numba.to_device(mine)).copy_to_host()
            comm.Allgather(mine, by_mpi)
            different += not np.array_equal(logits.view(np.uint32), _sanitised(by_mpi))
            text.append(model.vocabulary[_drawn(logits, draw)])
        gather.check()
        used = gather.transport
    return Outcome(text, len(model.vocabulary), shard_bytes, steps, different, used)


def _words() -> list[str]:
    """The prose of the language reference, word by word; grammar and code are indented and left out."""
    prose = [
        paragraph
        for name in sorted(topics.topics)
        for paragraph in re.split(r"\n\s*\n", topics.topics[name])
        if re.match(r"[A-Z].*[.:)]\s*\Z", paragraph, re.DOTALL) and "\n  " not in paragraph
    ]
    return re.findall(r"[A-Za-z]+(?:'[a-z]+)?|[.,;:()]", " ".join(prose))


def _drawn(logits: np.ndarray[Any, Any], draw: random.Random) -> int:
    """One index, drawn from the best twenty; all ranks have the same logits and draws, so all draw the same."""
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:20]
    weights = [math.exp(0.6 * float(logits[i] - logits[best[0]])) for i in best]
    return draw.choices(best, weights)[0]


def _sanitised(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits as the mailbox delivers them: -0.0 arrives as 0.0."""
    words = values.view(np.uint32)
    return np.where(words == SENTINEL, np.uint32(0), words)


def show(outcome: Outcome, world: int) -> None:
    """Print the text and what was compared."""
    print()
    print(textwrap.fill(outcome.text(), 78, initial_indent="    ", subsequent_indent="    "))
    print()
    print(
        f"{outcome.steps} steps, a vocabulary of {outcome.vocabulary} words over {world} rank{'s' * (world > 1)},\n"
        f"{outcome.bytes_a_rank} bytes a rank and step, transport {outcome.transport}"
    )
    if outcome.different:
        print(f"WRONG: the logits of {outcome.different} steps differ from MPI's Allgather")
    else:
        print("every logit of every step has the same bits as by MPI's Allgather")


def main() -> int:
    """Run under mpirun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="words to write (120)")
    parser.add_argument("--seed", type=int, default=2, help="of the draws (2)")
    parser.add_argument("--transport", default="auto", choices=["auto", "peer", "multicast", "measure"])
    parser.add_argument(
        "--device", choices=["auto", "cuda", "emulated"], help="default: LAMPORT_NUMBA_DEVICE, else auto"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is at least 1")
    if options.device:
        os.environ["LAMPORT_NUMBA_DEVICE"] = options.device
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    outcome = decode(comm, steps=options.steps, seed=options.seed, transport=options.transport)
    if comm.Get_rank() == 0:
        show(outcome, comm.Get_size())
    return int(outcome.different > 0)


if __name__ == "__main__":
    sys.exit(main())
