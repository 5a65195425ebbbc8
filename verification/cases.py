"""What is searched: the designs that must be safe, and the mistakes that must be found."""

from __future__ import annotations

from dataclasses import dataclass

from verification.lamport import EVERY_STEP, FOREIGN, REFUSED, RESET_HERE, SHIPPED, Lamport
from verification.search import Model
from verification.tagged import Tagged


@dataclass(frozen=True)
class Case:
    name: str
    instance: str
    model: Model
    breaks: str = ""  # the invariant that must break; empty: must be safe
    quick: bool = True  # searched by `make test` too


def alike(world: int, *calls: int) -> tuple[tuple[int, ...], ...]:
    """The same calls on every rank."""
    return (calls,) * world


def program(*, leave_out: str = "", move: str = "", before: str = "", clean: bool = False) -> tuple[str, ...]:
    """The shipped kernel with a step left out, moved, or (in the other design) one that cleans the previous stage."""
    steps = [step for step in SHIPPED if step not in (leave_out, move)]
    if move:
        steps.insert(steps.index(before), move)
    if clean:
        steps.insert(steps.index("collect"), "clean")
    return tuple(steps)


PEER, MULTICAST = "peer", "multicast"
CLEANING = {"program": program(clean=True), "resets": False, "lanes": None, "asserts": ("I2",)}

SAFE = [
    Case("peer", "2 ranks, 1 1 1 1 1 1", Lamport(alike(2, 1, 1, 1, 1, 1, 1))),
    Case("peer, header packs", "2 ranks, 2 1 2 1", Lamport(alike(2, 2, 1, 2, 1), header=True)),
    Case("peer, header packs", "2 ranks, 2 1 1 2", Lamport(alike(2, 2, 1, 1, 2), header=True)),
    Case("peer, header packs", "2 ranks, 1 3 2 3", Lamport(alike(2, 1, 3, 2, 3), header=True), quick=False),
    Case("peer, warps of two lanes", "2 ranks, 3 1 2 3", Lamport(alike(2, 3, 1, 2, 3), lanes=2), quick=False),
    Case("peer, two words a pack", "2 ranks, 1 2 1", Lamport(alike(2, 1, 2, 1), parts=2)),
    Case("peer", "3 ranks, 1 1 1 1", Lamport(alike(3, 1, 1, 1, 1)), quick=False),
    Case("peer, packs loop over one resident warp", "2 ranks, 2 1 2", Lamport(
        alike(2, 2, 1, 2), columns=1, residency=1)),
    Case("peer, every step a choice", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), choices=EVERY_STEP)),
    Case("multicast", "2 ranks, 1 1 1 1 1 1", Lamport(alike(2, 1, 1, 1, 1, 1, 1), MULTICAST)),
    Case("multicast, publishing a choice", "2 ranks, 1 1 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1, 1, 1), MULTICAST, choices=("publish",))),
    Case("multicast", "2 ranks, 2 1 2 1", Lamport(alike(2, 2, 1, 2, 1), MULTICAST), quick=False),
    Case("multicast", "2 ranks, 1 1 1 2", Lamport(alike(2, 1, 1, 1, 2), MULTICAST), quick=False),
    Case("multicast, warps of two lanes", "2 ranks, 2 1 2", Lamport(
        alike(2, 2, 1, 2), MULTICAST, lanes=2), quick=False),
    Case("multicast, header packs", "2 ranks, 1 1 1", Lamport(alike(2, 1, 1, 1), MULTICAST, header=True), quick=False),
    Case("multicast, one word a call", "2 ranks, 2 1 2 1", Lamport(
        alike(2, 2, 1, 2, 1), MULTICAST, lanes=None), quick=False),
    Case("multicast, two generations", "2 ranks, 2 1 2 1", Lamport(
        alike(2, 2, 1, 2, 1), MULTICAST, generations=2), quick=False),
    Case("multicast", "3 ranks, 1 1 1", Lamport(alike(3, 1, 1, 1), MULTICAST), quick=False),
    Case("multicast, every step a choice", "2 ranks, 1 1", Lamport(
        alike(2, 1, 1), MULTICAST, choices=EVERY_STEP), quick=False),
    Case("the other design done right: own copy awaited, previous stage cleaned by its recorded size",
         "2 ranks, 1 1 1 2", Lamport(alike(2, 1, 1, 1, 2), MULTICAST, cleans="recorded", packed=True, **CLEANING),
         quick=False),
    Case("peer and multicast in turn on one mailbox, both advancing every word", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), (MULTICAST, PEER, PEER, MULTICAST), peer_advances_own=True)),
    Case("a foreign kernel that never waits between ours, launched with pdl=False", "2 ranks, 1 F 1 F 1", Lamport(
        alike(2, 1, FOREIGN, 1, FOREIGN, 1), pdl=False)),
    Case("two ranks share a device that holds 3 grids", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), residency=3, shared=True)),
    Case("two ranks share a device that holds 2 grids, launched with pdl=False", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), residency=2, shared=True, pdl=False)),
    Case("three ranks share a device that holds 5 grids", "3 ranks, 1 1", Lamport(
        alike(3, 1, 1), residency=10, shared=True), quick=False),
    Case("a deadline that passes at any time", "2 ranks, 1 2 1", Lamport(alike(2, 1, 2, 1), deadlines=True)),
    Case("a deadline, then a reset with fresh memory", "2 ranks, 1 1 reset 1 2", Lamport(
        alike(2, 1, 1, RESET_HERE, 1, 2), deadlines=True)),
    Case("a deadline, then a reset with fresh memory, multicast", "2 ranks, 1 reset 1 1", Lamport(
        alike(2, 1, RESET_HERE, 1, 1), MULTICAST, deadlines=True), quick=False),
    Case("header packs: sizes differ, all raise", "1 2 against 2 1", Lamport(
        ((1, 2), (2, 1)), header=True, must_raise=True)),
    Case("header packs: sizes differ, all raise, multicast", "1 1 2 against 1 2 1", Lamport(
        ((1, 1, 2), (1, 2, 1)), MULTICAST, header=True, must_raise=True), quick=False),
    Case("header packs: one refusal, all raise", "1 1 1 against 1 refused 1", Lamport(
        ((1, 1, 1), (1, REFUSED, 1)), header=True, must_raise=True)),
    Case("header packs: one call more waits for its deadline", "1 1 against 1 1 1", Lamport(
        ((1, 1), (1, 1, 1)), header=True)),
    Case("tagged pairs", "2 ranks, 2 1 2 1 2", Tagged(2, (2, 1, 2, 1, 2))),
    Case("tagged pairs", "3 ranks, 1 1 1 1", Tagged(3, (1, 1, 1, 1)), quick=False),
    Case("tagged pairs across the wrap of the tag", "2 ranks, 1 1 1 1 1", Tagged(2, (1,) * 5, first=2**32 - 3)),
]  # fmt: skip

# Each falls; the number is that of the table of negative controls in docs/verification.md.
BROKEN = [
    Case("1 the known fault: own part from registers, previous stage cleaned by its recorded size, packed slots",
         "2 ranks, 1 1 1 2", Lamport(alike(2, 1, 1, 1, 2), MULTICAST, own_from_registers=True, cleans="recorded",
                                     packed=True, **(CLEANING | {"asserts": ()})), "I3"),
    Case("1 own part from registers in the shipped kernel", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), MULTICAST, own_from_registers=True, asserts=("I1",)), "I1"),
    Case("2 resets stage (g+1) mod 3", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), reset_offset=1, asserts=()), "I10"),
    Case("3 previous stage cleaned by the size of the current call", "2 ranks, 2 1 1 2", Lamport(
        alike(2, 2, 1, 1, 2), MULTICAST, cleans="current", **CLEANING), "I3"),
    Case("4 one generation only, peer", "2 ranks, 1 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1, 1), generations=1, asserts=()), "I3"),
    Case("4 one generation only, multicast", "2 ranks, 1 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1, 1), MULTICAST, generations=1, asserts=()), "I3"),
    Case("5 only word 0 tested", "2 ranks, 1", Lamport(alike(2, 1), parts=2, tested=1), "I3"),
    Case("6 an unbounded 32-bit counter mod 3, started two before its wrap", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), MULTICAST, modulus=2**32, start=2**32 - 2, asserts=()), "I3"),
    Case("7 the host's generation in a graph of 1 call, replayed", "2 ranks, 1 1 1", Lamport(
        alike(2, 1, 1, 1), MULTICAST, baked=1, asserts=()), "I3"),
    Case("7 the host's generation in a graph of 4 calls, replayed", "2 ranks, 8 calls of 1", Lamport(
        alike(2, *(1,) * 8), MULTICAST, baked=4, asserts=()), "I3"),
    Case("8 no barrier after the initial fill", "2 ranks, 1", Lamport(alike(2, 1), barrier_after_fill=False), "I10"),
    Case("9 no bar.warp.sync before the generation moves", "2 ranks, 2 2", Lamport(
        alike(2, 2, 2), lanes=2, program=program(leave_out="barrier"), choices=("read", "advance")), "I10"),
    Case("10 the generation read before griddepcontrol.wait", "2 ranks, 1 1", Lamport(
        alike(2, 1, 1), program=program(move="read", before="wait"), choices=("read", "wait", "advance"),
        asserts=()), "I3"),
    Case("11 dependents triggered before the wait: the chain of one rank fills the device", "2 ranks, 1 1 1 1", Lamport(
        alike(2, 1, 1, 1, 1), program=program(move="trigger", before="wait"), residency=3, shared=True), "I10"),
    Case("11 two ranks share a device that holds only 2 grids", "2 ranks, 1 1", Lamport(
        alike(2, 1, 1), residency=2, shared=True), "I10"),
    Case("12 a grid of two columns where one is resident", "2 ranks, 2", Lamport(
        alike(2, 2), residency=1), "I10"),
    Case("13 peer and multicast on one mailbox, peer not advancing its own column's words", "2 ranks, 1 1 1", Lamport(
        alike(2, 1, 1, 1), (PEER, MULTICAST, MULTICAST), asserts=()), "I3"),
    Case("14 a foreign kernel that never waits", "2 ranks, 1 F 1", Lamport(
        alike(2, 1, FOREIGN, 1), choices=("read", "advance"), asserts=()), "I3"),
    Case("15 only the neighbour awaited", "3 ranks, 1 1 1", Lamport(
        alike(3, 1, 1, 1), only_neighbour=True, asserts=("I2",)), "I2"),
    Case("16 sizes differ, no header packs", "1 2 against 2 1", Lamport(((1, 2), (2, 1))), "I3"),
    Case("16 one refusal, no header packs", "1 1 1 against 1 refused 1", Lamport(((1, 1, 1), (1, REFUSED, 1))), "I3"),
    Case("16 one refusal, header packs that do not count it", "1 1 1 against 1 refused 1", Lamport(
        ((1, 1, 1), (1, REFUSED, 1)), header=True, counts_refusals=False), "I4"),
    Case("17 a reset that fills the same memory again", "2 ranks, 1 reset 1 1", Lamport(
        alike(2, 1, RESET_HERE, 1, 1), deadlines=True, fresh_memory=False, asserts=()), "I3"),
    Case("18 tagged pairs, one buffer", "2 ranks, 1 1", Tagged(2, (1, 1), buffers=1), "I10"),
    Case("18 tagged pairs, a ring that polls only its neighbour", "3 ranks, 1 1 1", Tagged(
        3, (1, 1, 1), ring=True), "I10"),
    Case("18 tagged pairs, parity taken from the tag at its wrap", "2 ranks, 1 1 1", Tagged(
        2, (1, 1, 1), first=2**32 - 2, parity_of_tag=True), "I10"),
    Case("18 tagged pairs, tags that come round in a slot written rarely", "2 ranks, 2 1 1 1 1 1 2", Tagged(
        2, (2, 1, 1, 1, 1, 1, 2), tags=3), "I3"),
]  # fmt: skip
