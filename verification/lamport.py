"""The Lamport all-gather as a machine of small steps: mailboxes, words in flight, kernels, lanes.

A kernel is a program: a tuple of step names that each of its threads goes through, as the PTX does. A mistake is
another program, or one field of `Lamport` set otherwise, so a negative control reads like a patch.

What the adversary may do here (docs/verification.md argues each point):
- a word sent to another rank, or through the multicast address, lands at any later time, in any order, even after the
  kernel that sent it has ended; words of different kernels to one address may overtake each other;
- a reset (an ordinary store to own memory) is done at any time up to the end of its grid;
- ranks, warps and lanes run in any order; a dependent grid starts as soon as its predecessor has triggered.

Steps that nobody else can observe are taken at once: a launch, a dispatch without a limit of residency, a wait that may
pass, a generation word that only this warp writes, a store that is only put in flight (landing is what others see, and
stays a choice). They commute with every step of everybody else and nothing disables them, so no order of the observable
steps is lost. `choices` names steps to interleave freely all the same: all of them in the smallest instances, which
must agree, and always in the controls, whose mistakes break this premise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from verification.search import Broken

# The shipped kernels, step by step. In ptx/lamport_peer.ptx and lamport_multicast.ptx "wait" ends part 1, "read" and
# "publish" are part 2, "trigger" is part 3, "reread" and "collect" (which resets too) are part 4, the rest is part 5.
SHIPPED = ("dispatch", "wait", "read", "publish", "trigger", "reread", "collect", "barrier", "advance")
# A kernel of somebody else, launched with the PDL attribute, that never waits.
FOREIGN_KERNEL = ("dispatch", "trigger")

EVERY_STEP = ("launch", *SHIPPED)

FOREIGN, REFUSED, RESET_HERE = -1, 0, -2  # entries of a sequence of calls that are not a size
HEADER, ERROR = -1, -2  # pack numbers that are not payload


class Word(NamedTuple):
    """The content of a word is its identity, so that a wrong one is always seen."""

    source: int
    call: int
    pack: int
    part: int


Cell = Word | str | None  # None is the sentinel
CLEARING = "clearing"  # a reset that may or may not be done yet; done at the latest when the grid completes
GARBAGE = "garbage"  # memory before its first fill


class Thread(NamedTuple):
    """One thread of a grid: it receives `packs` of `source`, and sends its own."""

    source: int
    packs: tuple[int, ...]
    warp: int
    keys: tuple[int, ...]  # the generation word of each pack
    advances: tuple[int, ...]  # the generation words that this lane moves on for its warp


class Lane(NamedTuple):
    """Where a thread is."""

    at: int = 0  # position in the program
    stages: tuple[int, ...] = ()  # the generation of each pack, once read
    taken: int = 0  # packs collected


class Grid(NamedTuple):
    launch: int
    lanes: tuple[Lane, ...]


class State(NamedTuple):
    mail: tuple[tuple[Cell, ...], ...]
    flight: tuple[tuple[int, int, Word], ...]  # (to rank, slot, word), sorted: a set
    words: tuple[tuple[int, ...], ...]  # generation words
    grids: tuple[tuple[Grid, ...], ...]  # running, oldest first
    queue: tuple[int, ...]  # the next launch; -1 before the first fill
    done: tuple[int, ...]  # calls completed
    error: tuple[str, ...]
    tainted: tuple[str, ...]  # wrong data read by a call whose headers are not all compared yet


def put(sequence: tuple, index: int, value: object) -> tuple:
    return (*sequence[:index], value, *sequence[index + 1 :])


@dataclass(frozen=True)
class Lamport:
    """One instance to search; the defaults are the shipped design."""

    calls: tuple[tuple[int, ...], ...]  # the sizes, in packs, of the calls of each rank
    transport: str | tuple[str, ...] = "peer"  # or "multicast"; a tuple names one for each call
    lanes: int | None = 1  # packs a warp has a generation word for; None: one word for the whole call
    columns: int = 0  # threads a source at most; more packs loop; 0: one thread a pack
    parts: int = 1  # words a pack
    header: bool = False
    program: tuple[str, ...] = SHIPPED
    asserts: tuple[str, ...] = ("I1", "I2")  # besides I3, I4 and I10
    choices: tuple[str, ...] = ()  # steps to interleave though nobody can observe them
    residency: int = 0  # warps a device holds at once; 0: no limit
    shared: bool = False  # all ranks on one device
    deadlines: bool = False  # a rank that polls may give up at any time
    must_raise: bool = False  # every rank ends with an error
    pdl: bool = True  # of our launches
    # What a design may do otherwise, rightly or wrongly:
    generations: int = 3
    modulus: int = 0  # of the generation counter; 0: the number of generations
    start: int = 0
    baked: int = 0  # calls in a captured graph that carries the host's generation; 0: the device counts
    tested: int = 0  # words of a pack that a poll tests; 0: all
    own_from_registers: bool = False
    only_neighbour: bool = False  # collects from one rank only
    resets: bool = True  # each slot by the thread that read it
    reset_offset: int = 0
    cleans: str = ""  # "recorded" or "current": the step "clean" cleans the previous stage by that size
    packed: bool = False  # slots laid out by the size of the call
    peer_advances_own: bool = False  # the words of a column that sends nothing by `peer`
    barrier_after_fill: bool = True
    counts_refusals: bool = True
    tells_peers: bool = True
    fresh_memory: bool = True  # after a reset
    _threads: dict = field(default_factory=dict, compare=False, repr=False)

    # -- the shape of things -------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        return len(self.calls)

    @cached_property
    def capacity(self) -> int:
        return max(max(calls) for calls in self.calls)

    @property
    def agreed(self) -> bool:
        return len(set(self.calls)) == 1

    def way(self, launch: int) -> str:
        return self.transport if isinstance(self.transport, str) else self.transport[launch]

    def slot(self, stage: int, source: int, pack: int, size: int) -> int:
        """mailbox[generation][source][pack], the header pack last."""
        place = (self.capacity if pack == HEADER else pack) + source * (size if self.packed else self.capacity + 1)
        return (stage * self.world * (self.capacity + 1) + place) * self.parts

    def key(self, source: int, pack: int) -> int:
        """The index of the generation word for a pack: (source, warp of packs), the header's last."""
        if self.lanes is None:
            return 0
        warps = -(-self.capacity // self.lanes)
        return source * (warps + 1) + (warps if pack == HEADER else pack // self.lanes)

    def threads(self, rank: int, launch: int) -> tuple[Thread, ...]:
        """The threads of a launch: a column for each source, a warp for each `lanes` of it."""
        if (rank, launch) not in self._threads:
            size = self.calls[rank][launch]
            columns: list[tuple[int, tuple[int, ...], object]] = []  # source, packs, warp
            if size == FOREIGN:
                columns = [(rank, (), 0)]
            else:
                for source in range(self.world):
                    if source == rank and self.way(launch) == "peer" and not self.peer_advances_own:
                        continue
                    width = min(size, self.columns or size)
                    for column in range(width):
                        warp = 0 if self.lanes is None else (source, column // self.lanes)
                        columns.append((source, tuple(range(column, size, width)), warp))
                    if self.header:
                        columns.append((source, (HEADER,), 0 if self.lanes is None else (source, HEADER)))
            warps = list(dict.fromkeys(warp for _, _, warp in columns))
            moves = {w: sorted({self.key(s, p) for s, packs, v in columns if v == w for p in packs}) for w in warps}
            threads = [
                Thread(source, packs, warps.index(warp), tuple(self.key(source, p) for p in packs),
                       tuple(moves.pop(warp, ())))
                for source, packs, warp in columns
            ]  # fmt: skip
            self._threads[rank, launch] = tuple(threads)
        return self._threads[rank, launch]

    def code(self, rank: int, launch: int) -> tuple[int, int]:
        """What the header of a call says: its number and its size."""
        before = self.calls[rank][:launch]
        number = sum(size > 0 or (size == REFUSED and self.counts_refusals) for size in before)
        return number, self.calls[rank][launch]

    def program_of(self, rank: int, launch: int) -> tuple[str, ...]:
        return FOREIGN_KERNEL if self.calls[rank][launch] == FOREIGN else self.program

    # -- the search's view ---------------------------------------------------------------------------------------------

    def initial(self, notes: list[str] | None = None) -> State:
        world, slots = self.world, self.generations * self.world * (self.capacity + 1) * self.parts
        keys = self.key(self.world - 1, HEADER) + 1
        return State(
            mail=((GARBAGE,) * slots,) * world,
            flight=(),
            words=((self.start,) * keys,) * world,
            grids=((),) * world,
            queue=(-1,) * world,
            done=(0,) * world,
            error=("",) * world,
            tainted=("",) * world,
        )

    def steps(self, state: State, notes: list[str] | None = None) -> Iterator[tuple[str, State | Broken]]:
        notes = [] if notes is None else notes
        for rank in range(self.world):
            if state.queue[rank] == -1:
                yield f"rank {rank} fills its mailbox with the sentinel", self.fill(state, rank, notes)
        for message in state.flight:
            yield from self.land(state, message, notes)
        for rank in range(self.world):
            for what, after in self.moves(state, rank):
                yield what, self.settle(after, rank, notes)
            if self.deadlines and self.polls(state, rank):
                yield f"rank {rank}'s deadline passes", self.fail(state, rank, f"deadline of rank {rank}")
        if all(self.ready_to_reset(state, rank) for rank in range(self.world)):
            yield "all ranks reset together", self.reset(state, notes)

    def ended(self, state: State) -> Broken | None:
        for rank in range(self.world):
            if self.must_raise and not state.error[rank]:
                return Broken("I4", f"rank {rank} ends without an error: {self.position(state, rank)}")
            if state.error[rank] or (state.queue[rank] == len(self.calls[rank]) and not state.grids[rank]):
                continue
            if self.agreed:
                return Broken("I10", f"rank {rank} waits for ever: {self.position(state, rank)}")
        if self.agreed and not any(state.error) and "I1" in self.asserts:
            for rank in range(self.world):
                for slot, cell in enumerate(state.mail[rank]):
                    if cell is not None:
                        return Broken("I1", f"at the end rank {rank}'s {self.place(slot)} holds {self.name(cell)}")
            for values in zip(*state.words, strict=True):
                used = {value for value in values if value != self.start} if not self.peer_advances_own else set(values)
                if len(used) > 1:
                    return Broken("I1", f"at the end the generation words differ: {state.words}")
        return None

    # -- words in flight -----------------------------------------------------------------------------------------------

    def land(self, state: State, message: tuple[int, int, Word], notes: list[str]) -> Iterator[tuple[str, State]]:
        rank, slot, word = message
        state = state._replace(flight=tuple(other for other in state.flight if other != message))
        if word.pack == ERROR:
            what = f"rank {word.source}'s error reaches rank {rank}"
            yield what, state if state.error[rank] else self.stop(state, rank, f"told by rank {word.source}")
            return
        found = state.mail[rank][slot]
        what = f"{self.name(word)} lands in rank {rank}'s {self.place(slot)}"
        if found == CLEARING:  # the reset of this slot may be done before, or after
            yield what + ", and the reset still to be done wipes it", state
        elif found is not None:
            what += f" over {self.name(found)}"
        yield what, state._replace(mail=put(state.mail, rank, put(state.mail[rank], slot, word)))

    # -- kernels -------------------------------------------------------------------------------------------------------

    def silent(self, rank: int, launch: int, own: Thread, step: str) -> bool:
        """True for a step that is taken at once, since nobody else can observe when."""
        if step == "publish" and (own.source == rank) == (self.way(launch) == "peer"):
            return True  # nothing to send
        if step in self.choices:
            return False
        return not self.collects(rank, launch, own) if step == "collect" else step != "dispatch" or not self.residency

    def collects(self, rank: int, launch: int, own: Thread) -> bool:
        """True if the thread has packs to wait for: not if its own part never leaves the rank."""
        if own.source == rank and (self.way(launch) == "peer" or self.own_from_registers):
            return False
        return bool(own.packs) and not (self.only_neighbour and own.source != (rank - 1) % self.world)

    def moves(self, state: State, rank: int) -> Iterator[tuple[str, State | Broken]]:
        """The steps of a rank that are a choice."""
        if "launch" in self.choices and self.may_launch(state, rank):
            yield f"rank {rank} starts {self.title(rank, state.queue[rank])}", self.launch(state, rank)
        for index, grid in enumerate(state.grids[rank]):
            program = self.program_of(rank, grid.launch)
            threads = self.threads(rank, grid.launch)
            for thread, lane in enumerate(grid.lanes):
                if lane.at < len(program) and not self.silent(rank, grid.launch, threads[thread], program[lane.at]):
                    after = self.step(state, rank, index, thread)
                    if after is not None:
                        yield self.tell(state, rank, index, thread), after

    def settle(self, state: State | Broken, rank: int, notes: list[str]) -> State | Broken:
        """Take every silent step of a rank, retire its grids and launch the next ones, until nothing is left."""
        going = True
        while going and isinstance(state, State):
            going = False
            if "launch" not in self.choices and self.may_launch(state, rank):
                notes.append(f"    rank {rank} starts {self.title(rank, state.queue[rank])}")
                state, going = self.launch(state, rank), True
                continue
            for index, grid in enumerate(state.grids[rank]):
                program = self.program_of(rank, grid.launch)
                if all(lane.at == len(program) for lane in grid.lanes):
                    notes.append(f"    rank {rank} completes {self.title(rank, grid.launch)}")
                    state, going = self.complete(state, rank, index), True
                    break
                threads = self.threads(rank, grid.launch)
                for thread, lane in enumerate(grid.lanes):
                    if lane.at < len(program) and self.silent(rank, grid.launch, threads[thread], program[lane.at]):
                        after = self.step(state, rank, index, thread)
                        if after is not None:
                            if program[lane.at] == "publish" and notes is not None:
                                notes.append("    " + self.tell(state, rank, index, thread))
                            state, going = after, True
                            break
                if going:
                    break
        return state

    def may_launch(self, state: State, rank: int) -> bool:
        queue, grids = state.queue[rank], state.grids[rank]
        if state.error[rank] or queue == -1 or queue >= len(self.calls[rank]):
            return False
        if self.calls[rank][queue] == RESET_HERE or (self.barrier_after_fill and -1 in state.queue):
            return False
        if not grids or self.calls[rank][queue] == REFUSED:
            return True
        if not self.pdl and self.calls[rank][queue] != FOREIGN:
            return False
        last = grids[-1]  # older ones had triggered before it could start
        trigger = self.program_of(rank, last.launch).index("trigger")
        return last.launch != self.launched_before(rank, queue) or all(lane.at > trigger for lane in last.lanes)

    def launched_before(self, rank: int, launch: int) -> int:
        """The direct predecessor on the stream."""
        return max((at for at in range(launch) if self.calls[rank][at] != REFUSED), default=-1)

    def launch(self, state: State, rank: int) -> State:
        launch = state.queue[rank]
        state = state._replace(queue=put(state.queue, rank, launch + 1))
        if self.calls[rank][launch] == REFUSED:
            return state
        grid = Grid(launch, (Lane(),) * len(self.threads(rank, launch)))
        return state._replace(grids=put(state.grids, rank, (*state.grids[rank], grid)))

    def step(self, state: State, rank: int, index: int, thread: int) -> State | Broken | None:
        """The next step of one thread; None while it cannot be taken."""
        grid = state.grids[rank][index]
        threads, lanes = self.threads(rank, grid.launch), grid.lanes
        own, lane = threads[thread], lanes[thread]
        name = self.program_of(rank, grid.launch)[lane.at]
        lane = lane._replace(at=lane.at + 1)
        if name == "dispatch":  # a warp at a time, where there is room
            if self.residency and self.resident(state, rank) >= self.residency:
                return None
            moved = tuple(lane if t.warp == own.warp else o for t, o in zip(threads, lanes, strict=True))
            return self.with_grid(state, rank, index, grid._replace(lanes=moved))
        if name == "wait":  # for the direct predecessor only
            if any(other.launch == self.launched_before(rank, grid.launch) for other in state.grids[rank]):
                return None
        elif name in ("read", "reread"):
            if self.baked:
                lane = lane._replace(stages=(grid.launch % self.baked % self.generations,) * len(own.keys))
            else:
                lane = lane._replace(stages=tuple(state.words[rank][key] % self.generations for key in own.keys))
        elif name == "publish":
            sent = self.messages(rank, grid.launch, own, lane.stages)
            if sent:
                state = state._replace(flight=tuple(sorted({*state.flight, *sent})))
        elif name == "collect":
            if self.collects(rank, grid.launch, own):
                return self.collect(state, rank, index, thread)
        elif name == "clean":
            state = self.clean(state, rank, grid.launch, thread, lane.stages[0])
        elif name == "barrier":
            if any(t.warp == own.warp and o.at < lane.at - 1 for t, o in zip(threads, lanes, strict=True)):
                return None
        elif name == "advance":
            words = list(state.words[rank])
            for key in own.advances:
                words[key] = (words[key] + 1) % (self.modulus or self.generations)
            state = state._replace(words=put(state.words, rank, tuple(words)))
        return self.with_grid(state, rank, index, grid._replace(lanes=put(lanes, thread, lane)))

    def messages(self, rank: int, launch: int, own: Thread, stages: tuple[int, ...]) -> list[tuple[int, int, Word]]:
        """What a thread publishes: its packs, to its peer, or through the multicast address to everybody."""
        size = self.calls[rank][launch]
        if self.way(launch) == "peer":
            to = () if own.source == rank else (own.source,)
        else:
            to = range(self.world) if own.source == rank else ()
        return [
            (other, self.slot(stage, rank, pack, size) + part, Word(rank, launch, pack, part))
            for other in to
            for pack, stage in zip(own.packs, stages, strict=True)
            for part in range(self.parts)
        ]

    def collect(self, state: State, rank: int, index: int, thread: int) -> State | Broken | None:
        """One pack: read once no tested word is the sentinel, compared, reset."""
        grid = state.grids[rank][index]
        own, lane = self.threads(rank, grid.launch)[thread], grid.lanes[thread]
        size, pack, stage = self.calls[rank][grid.launch], own.packs[lane.taken], lane.stages[lane.taken]
        slot = self.slot(stage, own.source, pack, size)
        mail = state.mail[rank]
        cells = mail[slot : slot + self.parts]
        if any(cell in (None, CLEARING) for cell in cells[: self.tested or self.parts]):
            return None
        for part, cell in enumerate(cells):
            if cell == Word(own.source, grid.launch, pack, part) and pack != HEADER:
                continue
            if pack == HEADER and isinstance(cell, Word):  # compared by what it says, not by where it comes from
                theirs, ours = self.code(cell.source, cell.call), self.code(rank, grid.launch)
                if theirs != ours:
                    return self.fail(state, rank, f"call and size {ours} here, {theirs} on rank {cell.source}")
                continue
            text = (
                f"rank {rank} takes {self.name(cell)}, found in its {self.place(slot + part)},"
                f" for {self.name(Word(own.source, grid.launch, pack, part))}"
            )
            if not self.header:
                return Broken("I3", text)
            state = state._replace(tainted=put(state.tainted, rank, state.tainted[rank] or text))
        if self.resets:
            at = self.slot((stage + self.reset_offset) % self.generations, own.source, pack, size)
            mail = (*mail[:at], *((CLEARING,) * self.parts), *mail[at + self.parts :])
            state = state._replace(mail=put(state.mail, rank, mail))
        finished = lane.taken + 1 == len(own.packs)
        lane = lane._replace(taken=lane.taken + 1, at=lane.at + finished)
        return self.with_grid(state, rank, index, grid._replace(lanes=put(grid.lanes, thread, lane)))

    def clean(self, state: State, rank: int, launch: int, thread: int, stage: int) -> State:
        """The other design: threads share the cleaning of the previous stage, by a size."""
        before = [size for size in self.calls[rank][:launch] if size > 0]
        size = self.calls[rank][launch] if self.cleans == "current" else before[-1] if before else 0
        mail = list(state.mail[rank])
        slots = [self.slot((stage - 1) % self.generations, s, p, size) for s in range(self.world) for p in range(size)]
        for slot in slots[thread :: len(self.threads(rank, launch))]:
            mail[slot : slot + self.parts] = [CLEARING] * self.parts
        return state._replace(mail=put(state.mail, rank, tuple(mail)))

    def complete(self, state: State, rank: int, index: int) -> State | Broken:
        """The end of a grid: its resets are done; what a completed call promises is checked."""
        launch = state.grids[rank][index].launch
        grids = state.grids[rank][:index] + state.grids[rank][index + 1 :]
        mail = tuple(None if cell == CLEARING else cell for cell in state.mail[rank])
        state = state._replace(grids=put(state.grids, rank, grids), mail=put(state.mail, rank, mail))
        if self.calls[rank][launch] == FOREIGN:
            return state
        if state.tainted[rank]:
            return Broken("I4", f"{state.tainted[rank]}, and the call ends as good")
        done = put(state.done, rank, state.done[rank] + 1)
        if self.agreed and "I1" in self.asserts:
            following = next((at for at, size in enumerate(self.calls[rank]) if at > launch and size > 0), None)
            for slot, cell in enumerate(mail):
                if isinstance(cell, Word) and cell.call != following:
                    text = f"rank {rank} ends call {launch}; its {self.place(slot)} holds {self.name(cell)}"
                    return Broken("I1", text)
        if self.agreed and "I2" in self.asserts and done[rank] > min(done) + 1:
            return Broken("I2", f"rank {rank} has ended {done[rank]} calls, rank {done.index(min(done))} {min(done)}")
        return state._replace(done=done)

    def with_grid(self, state: State, rank: int, index: int, grid: Grid) -> State:
        return state._replace(grids=put(state.grids, rank, put(state.grids[rank], index, grid)))

    def resident(self, state: State, rank: int) -> int:
        """The warps that the device of a rank holds now."""
        held = 0
        for other in range(self.world) if self.shared else (rank,):
            for grid in state.grids[other]:
                end = len(self.program_of(other, grid.launch))
                threads = self.threads(other, grid.launch)
                held += len({t.warp for t, lane in zip(threads, grid.lanes, strict=True) if 0 < lane.at < end})
        return held

    # -- the host ------------------------------------------------------------------------------------------------------

    def fill(self, state: State, rank: int, notes: list[str]) -> State | Broken:
        mail = (None,) * len(state.mail[rank])
        return self.settle_all(state._replace(mail=put(state.mail, rank, mail), queue=put(state.queue, rank, 0)), notes)

    def settle_all(self, state: State | Broken, notes: list[str]) -> State | Broken:
        for rank in range(self.world):
            state = self.settle(state, rank, notes)
        return state

    def fail(self, state: State, rank: int, why: str) -> State:
        """A rank raises its error word, leaves, and tells the others where it may."""
        if self.tells_peers:
            call = state.grids[rank][0].launch
            told = {(other, 0, Word(rank, call, ERROR, 0)) for other in range(self.world) if other != rank}
            state = state._replace(flight=tuple(sorted({*state.flight, *told})))
        return self.stop(state, rank, why)

    def stop(self, state: State, rank: int, why: str) -> State:
        if self.fresh_memory:  # nobody looks into this mailbox again
            state = state._replace(
                mail=put(state.mail, rank, (None,) * len(state.mail[rank])),
                flight=tuple(message for message in state.flight if message[0] != rank),
            )
        return state._replace(
            error=put(state.error, rank, why), grids=put(state.grids, rank, ()), tainted=put(state.tainted, rank, "")
        )

    def polls(self, state: State, rank: int) -> bool:
        """True if some thread of the rank is polling."""
        return any(
            lane.at < len(program) and program[lane.at] == "collect"
            for grid in state.grids[rank]
            for program in [self.program_of(rank, grid.launch)]
            for lane in grid.lanes
        )

    def ready_to_reset(self, state: State, rank: int) -> bool:
        """A reset is collective, after a synchronise: a rank is there when its kernels have ended."""
        marks = [at for at, size in enumerate(self.calls[rank]) if size == RESET_HERE and at >= state.queue[rank] >= 0]
        return bool(marks) and not state.grids[rank] and (bool(state.error[rank]) or marks[0] == state.queue[rank])

    def reset(self, state: State, notes: list[str]) -> State | Broken:
        """Fresh memory, so that what is still in flight lands where nobody looks."""
        after = [calls.index(RESET_HERE) + 1 for calls in self.calls]
        new = self.initial()._replace(
            mail=tuple((None,) * len(mail) for mail in state.mail),
            queue=tuple(after),
            done=(max(state.done),) * self.world,
            flight=() if self.fresh_memory else state.flight,
        )
        return self.settle_all(new, notes)

    # -- telling it ----------------------------------------------------------------------------------------------------

    def title(self, rank: int, launch: int) -> str:
        size = self.calls[rank][launch]
        return {FOREIGN: "a foreign kernel", REFUSED: f"call {launch}, refused"}.get(size, f"call {launch} of {size}")

    def name(self, cell: Cell) -> str:
        if not isinstance(cell, Word):
            return "the sentinel" if cell in (None, CLEARING) else f"{cell}"
        part = f" word {cell.part}" if self.parts > 1 else ""
        what = "header" if cell.pack == HEADER else f"pack {cell.pack}{part}"
        return f"rank {cell.source}'s {what} of call {cell.call}"

    def place(self, slot: int) -> str:
        stage, rest = divmod(slot // self.parts, self.world * (self.capacity + 1))
        if self.packed:
            return f"generation {stage}, place {rest}"
        source, pack = divmod(rest, self.capacity + 1)
        part = f" word {slot % self.parts}" if self.parts > 1 else ""
        what = "header" if pack == self.capacity else f"pack {pack}{part}"
        return f"generation {stage}, slot of rank {source}'s {what}"

    def tell(self, state: State, rank: int, index: int, thread: int) -> str:
        grid = state.grids[rank][index]
        own, lane = self.threads(rank, grid.launch)[thread], grid.lanes[thread]
        name = self.program_of(rank, grid.launch)[lane.at]
        packs = ", ".join("header" if pack == HEADER else str(pack) for pack in own.packs)
        who = f"rank {rank}, call {grid.launch}, thread of rank {own.source}'s pack {packs}"
        if name == "dispatch":
            return f"{who}: its warp becomes resident"
        if name in ("read", "reread"):
            return f"{who}: {name}s its generation"
        if name == "publish":
            sent = self.messages(rank, grid.launch, own, lane.stages)
            to = ", ".join(f"rank {other}'s {self.place(slot)}" for other, slot, _ in sent)
            return f"{who}: sends to {to}" if sent else f"{who}: has nothing to send"
        if name == "collect":
            return f"{who}: finds its slot full, reads it" + (" and resets it" if self.resets else "")
        if name == "advance":
            return f"{who}: " + ("moves the generation on" if own.advances else "leaves the generation to lane 0")
        return f"{who}: passes {name}"

    def position(self, state: State, rank: int) -> str:
        for grid in state.grids[rank]:
            program = self.program_of(rank, grid.launch)
            for thread, lane in zip(self.threads(rank, grid.launch), grid.lanes, strict=True):
                if lane.at < len(program) and program[lane.at] == "collect":
                    pack, stage = thread.packs[lane.taken], lane.stages[lane.taken]
                    slot = self.slot(stage, thread.source, pack, self.calls[rank][grid.launch])
                    return f"call {grid.launch} polls {self.place(slot)}, and nothing is on its way"
            for lane in grid.lanes:
                if lane.at < len(program):
                    return f"call {grid.launch} cannot pass its {program[lane.at]}"
        if state.queue[rank] == len(self.calls[rank]):
            return "all its calls are done"
        return f"launch {state.queue[rank]} cannot start"
