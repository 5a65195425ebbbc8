"""Tagged pairs as a machine of small steps: a value and the number of its launch, stored as one whole access.

Every rank sends its pairs to every other rank, into the buffer that this launch's parity names, and polls each pair
until its tag is this launch's. Nothing is ever cleared. A pair lands whole, at any later time, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verification.search import Broken


class Pair(NamedTuple):
    tag: int
    source: int
    launch: int
    index: int


class State(NamedTuple):
    boxes: tuple[tuple[Pair | None, ...], ...]
    flight: tuple[tuple[int, int, Pair], ...]  # (to rank, slot, pair), sorted: a set
    launch: tuple[int, ...]
    seen: tuple[frozenset[tuple[int, int]], ...]  # (source, index) polled by the launch that runs


@dataclass(frozen=True)
class Tagged:
    """One instance to search; the defaults are the shipped design."""

    world: int
    sizes: tuple[int, ...]  # pairs a rank, launch by launch
    buffers: int = 2
    tags: int = 2**32 - 1  # tags 1..tags, then 1 again; 0 is zeroed memory
    first: int = 1  # the tag of launch 0
    parity_of_tag: bool = False  # the buffer is chosen by the tag, not by a count of its own
    ring: bool = False  # each rank sends to its right and polls its left neighbour only

    def tag(self, launch: int) -> int:
        return (self.first - 1 + launch) % self.tags + 1

    def slot(self, launch: int, source: int, index: int) -> int:
        buffer = (self.tag(launch) if self.parity_of_tag else launch) % self.buffers
        return (buffer * self.world + source) * max(self.sizes) + index

    def sources(self, rank: int) -> list[int]:
        return [(rank - 1) % self.world] if self.ring else [other for other in range(self.world) if other != rank]

    def initial(self, notes: list[str] | None = None) -> State:
        slots = self.buffers * self.world * max(self.sizes)
        empty = frozenset[tuple[int, int]]()
        state = State(((None,) * slots,) * self.world, (), (-1,) * self.world, (empty,) * self.world)
        for rank in range(self.world):
            state = self.start(state, rank, [] if notes is None else notes)
        return state

    def start(self, state: State, rank: int, notes: list[str]) -> State:
        """The next launch: everything it sends is in flight."""
        launch = state.launch[rank] + 1
        state = state._replace(
            launch=(*state.launch[:rank], launch, *state.launch[rank + 1 :]),
            seen=(*state.seen[:rank], frozenset(), *state.seen[rank + 1 :]),
        )
        if launch == len(self.sizes):
            return state
        notes.append(f"    rank {rank} starts launch {launch} with tag {self.tag(launch)}")
        sent = {
            (other, self.slot(launch, rank, index), Pair(self.tag(launch), rank, launch, index))
            for other in range(self.world)
            if rank in self.sources(other)
            for index in range(self.sizes[launch])
        }
        return state._replace(flight=tuple(sorted({*state.flight, *sent})))

    def steps(self, state: State, notes: list[str] | None = None) -> Iterator[tuple[str, State | Broken]]:
        notes = [] if notes is None else notes
        for message in state.flight:
            rank, slot, pair = message
            box = state.boxes[rank]
            boxes = (*state.boxes[:rank], (*box[:slot], pair, *box[slot + 1 :]), *state.boxes[rank + 1 :])
            over = f" over {self.name(box[slot])}" if box[slot] else ""
            rest = tuple(other for other in state.flight if other != message)
            yield f"{self.name(pair)} lands at rank {rank}{over}", state._replace(boxes=boxes, flight=rest)
        for rank, launch in enumerate(state.launch):
            if launch == len(self.sizes):
                continue
            wanted = [(source, index) for source in self.sources(rank) for index in range(self.sizes[launch])]
            for source, index in wanted:
                pair = state.boxes[rank][self.slot(launch, source, index)]
                if (source, index) in state.seen[rank] or pair is None or pair.tag != self.tag(launch):
                    continue
                what = f"rank {rank}, launch {launch}: finds {self.name(pair)}"
                if pair[1:] != (source, launch, index):
                    yield what, Broken("I3", f"it takes it for rank {source}'s pair {index} of launch {launch}")
                    continue
                seen = state.seen[rank] | {(source, index)}
                after = state._replace(seen=(*state.seen[:rank], seen, *state.seen[rank + 1 :]))
                if len(seen) == len(wanted):
                    notes.append(f"    rank {rank} completes launch {launch}")
                    after = self.start(after, rank, notes)
                yield what, after

    def ended(self, state: State) -> Broken | None:
        for rank, launch in enumerate(state.launch):
            if launch < len(self.sizes):
                for source in self.sources(rank):
                    for index in range(self.sizes[launch]):
                        if (source, index) not in state.seen[rank]:
                            found = self.name(state.boxes[rank][self.slot(launch, source, index)])
                            text = f"polls rank {source}'s pair {index} and finds {found}"
                            return Broken("I10", f"rank {rank} waits for ever in launch {launch}: {text}")
        return None

    @staticmethod
    def name(pair: Pair | None) -> str:
        if pair is None:
            return "nothing"
        return f"rank {pair.source}'s pair {pair.index} of launch {pair.launch}, tag {pair.tag}"
