"""Gathers on the adversarial fabric: every word compared, and the first wrong one told in full.

`PYTHONPATH=tests:. python -m helpers.attack ranks=3 transport=multicast seed=7` runs one plan from one seed, as a
failing test prints it.
"""

from __future__ import annotations

import ast
import gc
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import numpy as np

from lamport_numba import LamportAllGather, run_ranks
from lamport_numba.bench.rig import Rig, address_of
from lamport_numba.collectives import channel as channels
from lamport_numba.collectives.launch import Block
from lamport_numba.driver import select
from lamport_numba.errors import LamportError

PACK = 16
SENTINEL = 0x80000000


@dataclass(frozen=True)
class Plan:
    """What is run: ``rounds`` times ``calls`` gathers of ``sizes`` packs (drawn from the seed where none are given)."""

    ranks: int = 2
    transport: str = "peer"
    graph: bool = False
    capacity: int = 8  # packs
    sizes: tuple[int, ...] = ()
    calls: int = 12
    rounds: int = 4
    residency: int | None = None
    shared: bool = False  # all ranks on device 0
    foreign: bool = False  # a kernel that never waits between the calls
    pdl: bool = True
    timeout: float = 0.02  # seconds of virtual time
    warm_up: bool = False
    residue: bool = True  # whether the mailbox must be all sentinel in the end


@dataclass
class Outcome:
    """What one rank saw; ``calls`` completed, ``found`` what was wrong first."""

    calls: int = 0
    found: str = ""


def replay(plan: Plan, seed: int | None = None) -> str:
    """The command that runs a plan again, or without a seed what is particular about the plan."""
    particular = [
        f"{one.name}={str(getattr(plan, one.name)).replace(' ', '')}"
        for one in fields(Plan)
        if getattr(plan, one.name) != one.default
    ]
    if seed is None:
        return " ".join(particular) or "2 ranks by peer"
    return " ".join(["PYTHONPATH=tests:. python -m helpers.attack", *particular, f"seed={seed}"])


def payload(turn: int, call: int, rank: int, words: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The words that a rank sends: other ones at every place of every call, a sentinel here and there."""
    count = np.arange(words, dtype=np.uint64) + np.uint64((turn * 4096 + call) * 65536 + rank * 4096)
    mixed = (count * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    found = mixed.astype(np.uint32)
    found[mixed % 31 == 0] = SENTINEL
    return found


def expected(turn: int, call: int, ranks: int, words: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    found = np.concatenate([payload(turn, call, rank, words) for rank in range(ranks)])
    found[found == SENTINEL] = 0
    return found


def attack(
    plan: Plan,
    seed: int,
    mistake: Callable[[], Any] = nullcontext,
    prepare: Callable[[Any], None] = lambda gather: None,
) -> tuple[int, str]:
    """Run a plan from a seed; (calls of all ranks that completed, what was wrong first or "")."""
    drv = select("emulated")
    warm_up = channels.Channel.warm_up if plan.warm_up else lambda self: None
    try:
        with mistake(), mock.patch.object(channels.Channel, "warm_up", warm_up):
            outcomes = run_ranks(
                plan.ranks,
                lambda comm: _Rank(comm, plan, seed, prepare).run(),
                fabric="adversarial",
                seed=seed,
                residency=plan.residency,
                timeout=300,
            )
    except LamportError as error:  # the devices or the set-up gave up
        return 0, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        gc.collect()  # before the memory of what failed can be somebody else's
        for device in range(drv.device_count()):  # a ruined context would be the next run's
            drv.api.cuDevicePrimaryCtxReset(device)
    calls = sum(outcome.calls for outcome in outcomes)
    # A wrong word says more than the error that ended another rank.
    found = sorted((outcome.found for outcome in outcomes if outcome.found), key=lambda text: "Error" in text[:12])
    words = [text for text in found if text.startswith("rank")]
    return calls, (words or found or [""])[0]


class _Rank:
    def __init__(self, comm: Any, plan: Plan, seed: int, prepare: Callable[[Any], None]) -> None:
        self.comm, self.plan, self.prepare = comm, plan, prepare
        draw = random.Random(f"sizes {seed}")
        self.sizes = list(plan.sizes) or [draw.randint(1, plan.capacity) for _ in range(plan.calls)]
        self.extra = [draw.randrange(len(self.sizes)) for _ in range(plan.rounds)]
        self.outcome = Outcome()

    def run(self) -> Outcome:
        plan = self.plan
        gather = rig = None
        try:
            gather = LamportAllGather(
                self.comm,
                plan.capacity * PACK,
                transport=plan.transport,
                timeout=plan.timeout,
                pdl=plan.pdl,
                device=0 if plan.shared else None,
                share_device=plan.shared,
            )
            drv = select().for_rank(gather.rank)
            with drv.current(gather.device):
                self.prepare(gather)
                rig = Rig(drv, gather.device)
                self._rounds(gather, rig)
        except LamportError as error:
            self.outcome.found = self.outcome.found or f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            with suppress(LamportError):  # what failed has been said
                if rig is not None:
                    with rig.drv.current(rig.device):
                        rig.synchronize()
            well = False
            with suppress(LamportError):  # after this nobody's kernels write to a mailbox any more
                well = not any(self.comm.allgather(self.outcome.found))
            if gather is not None:
                try:
                    gather.close() if well else gather.abandon()
                except LamportError as error:
                    self.outcome.found = self.outcome.found or f"{type(error).__name__}: {error}"
            if rig is not None:
                with suppress(LamportError):
                    rig.close()
        return self.outcome

    def _rounds(self, gather: Any, rig: Rig) -> None:
        plan, world, count = self.plan, gather.world_size, len(self.sizes)
        words = plan.capacity * PACK // 4
        inputs, outputs = rig.array(4 * words * count), rig.array(4 * words * count * world)
        calls = [
            gather.prepare(
                inputs[index * words :][: size * 4], outputs[index * words * world :][: size * 4 * world], rig.stream
            )
            for index, size in enumerate(self.sizes)
        ]
        foreign = Block(rig.kernel("stress_foreign"), [], grid=(1, 1), threads=32, stream=rig.stream, pdl=True)

        def work() -> None:
            for index, call in enumerate(calls):
                if index and plan.foreign:
                    foreign.launch()
                call()

        graph = rig.capture(work) if plan.graph else None
        for turn in range(plan.rounds):
            mine = np.zeros((count, words), np.uint32)
            for index, size in enumerate(self.sizes):
                mine[index, : size * 4] = payload(turn, index, gather.rank, size * 4)
            rig.write(address_of(inputs), mine)
            if graph is None:
                work()
            else:  # and an eager call of some other size between the replays
                graph.launch()
                calls[self.extra[turn]]()
            got = rig.read(address_of(outputs), 4 * words * count * world).reshape(count, words * world)
            gather.check()
            self.outcome.calls += count + (graph is not None)
            self._compare(gather, turn, got)
        self.comm.Barrier()
        left = [index for channel in gather._channels.values() for index in channel.residue()]
        if left and plan.residue and not self.outcome.found:
            self.outcome.found = f"rank {gather.rank}: word {left[0]} of the mailbox is left behind, {len(left)} in all"
        self.comm.Barrier()

    def _compare(self, gather: Any, turn: int, got: np.ndarray[Any, Any]) -> None:
        if self.outcome.found:
            return
        for index, size in enumerate(self.sizes):
            want = expected(turn, index, gather.world_size, size * 4)
            wrong = np.flatnonzero(got[index, : len(want)] != want)
            if len(wrong):
                source, word = divmod(int(wrong[0]), size * 4)
                value = int(got[index, wrong[0]])
                self.outcome.found = (
                    f"rank {gather.rank}, call {turn * len(self.sizes) + index} of {size} packs: word {word} of rank "
                    f"{source} is {value:#010x}, {self._whence(turn, value)}, not {int(want[wrong[0]]):#010x}"
                )
                return

    def _whence(self, turn: int, value: int) -> str:
        """Whose word a wrong one is."""
        if value == SENTINEL:
            return "the sentinel"
        for earlier in range(turn + 2, -1, -1):  # a peer may be ahead
            for index, size in enumerate(self.sizes):
                for rank in range(self.plan.ranks):
                    place = np.flatnonzero(payload(earlier, index, rank, size * 4) == value)
                    if len(place):
                        return f"word {int(place[0])} of rank {rank} in call {earlier * len(self.sizes) + index}"
        return "a sentinel of an earlier call, which travels as 0" if value == 0 else "nobody's"


def main(arguments: list[str]) -> int:
    said: dict[str, Any] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        said[name] = value if name == "transport" else ast.literal_eval(value)
    seed = said.pop("seed", 0)
    calls, found = attack(Plan(**said), seed)
    print(f"{calls:,} calls; {found or 'nothing wrong'}")
    return 1 if found else 0


if __name__ == "__main__":
    from helpers import environment

    environment.of_this_process()
    sys.exit(main(sys.argv[1:]))
