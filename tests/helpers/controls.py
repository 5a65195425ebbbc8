"""The negative controls: every known mistake, where it is looked for, and the table of what it looks like.

`PYTHONPATH=tests:. python -m helpers.controls` prints the table; `--write` puts it into docs/verification.md, `--check`
fails unless it stands there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import environment, patches
from helpers.attack import Plan, attack

SEEDS = range(12)
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "verification.md"
BEGIN, END = "<!-- begin: python -m helpers.controls --write -->", "<!-- end of controls -->"


def nothing(gather: Any) -> None:
    """Leave the gather as it was constructed."""


@dataclass(frozen=True)
class Control:
    number: int
    name: str
    plan: Plan
    mistake: Callable[[], Any] = nullcontext
    prepare: Callable[[Any], None] = nothing

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}, {self.plan.transport}"


PEER, MULTICAST = Plan(), Plan(transport="multicast")
SMALLEST = Plan(transport="multicast", sizes=(1, 1, 1, 2) * 6, rounds=60, residue=False)
CLEANING = Plan(transport="multicast", residue=False)
CURRENT_SIZE = "mov.b32 %t, %packs;"

CONTROLS = [
    Control(1, "own part from registers, stage cleaned by its recorded size, packed slots, sizes 1 1 1 2", SMALLEST,
            patches.known_fault),
    Control(1, "the same, any sizes, in graphs",
            Plan(transport="multicast", graph=True, calls=24, rounds=20, residue=False), patches.known_fault),
    Control(2, "the reset goes to stage (g+1) mod 3", PEER, patches.wrong_stage),
    Control(3, "previous stage cleaned by the size of the current call", CLEANING, patches.cleaned_by(CURRENT_SIZE)),
    Control(4, "one generation only", PEER, patches.one_generation),
    Control(4, "one generation only", MULTICAST, patches.one_generation),
    Control(5, "only word 0 of a pack tested", PEER, patches.word_0_only),
    Control(6, "an unbounded 32-bit counter mod 3, 16 calls before its wrap", PEER, patches.unbounded(2**32 - 16)),
    Control(7, "the host's generation in a graph of 7 calls", Plan(graph=True, calls=7), patches.host_generation),
    Control(8, "no barrier after the initial fill", PEER, patches.no_barrier_after_fill),
    Control(9, "no bar.warp.sync before the generation moves", PEER, patches.no_warp_barrier),
    Control(10, "the generation read before griddepcontrol.wait", PEER, patches.read_before_wait),
    Control(11, "dependents triggered before the wait, ranks sharing a device for two grids each",
            Plan(shared=True, residency=4), patches.trigger_before_wait),
    Control(12, "a grid of several CTAs where one is resident",
            Plan(ranks=3, capacity=160, calls=4, rounds=2, residency=1), patches.any_grid),
    Control(13, "peer and multicast kernels on one mailbox", MULTICAST, prepare=patches.share_mailbox),
    Control(14, "a foreign kernel with the PDL attribute that never waits", Plan(foreign=True)),
]  # fmt: skip

# What must survive where the mistakes fall. The foreign kernel is documented: pdl=False is for those who have one.
PLANS = [*dict.fromkeys(c.plan for c in CONTROLS if not c.plan.foreign), Plan(foreign=True, pdl=False)]


def hunt(control: Control) -> tuple[int, str]:
    """(seed, what it shows) of the first seed that shows anything; (-1, "") if none does."""
    for seed in SEEDS:
        _, found = attack(control.plan, seed, control.mistake, control.prepare)
        if found:
            return seed, found
    return -1, ""


def wrong_word(control: Control) -> tuple[int, str]:
    """(seed, the first wrong word) where the ranks do not compare their headers; (-1, "") if the calls only hang."""

    @contextmanager
    def blind() -> Iterator[None]:
        with control.mistake(), patches.headers_not_compared():
            yield

    for seed in SEEDS:
        _, found = attack(control.plan, seed, blind, control.prepare)
        if found.startswith("rank"):
            return seed, found
    return -1, ""


def table() -> str:
    """What each mistake looks like; the same on every machine."""
    lines = ["| mistake | run | seed, what was seen first | seed, first wrong word if headers are not compared |"]
    lines.append("|---|---|---|---|")
    for control in CONTROLS:
        plan = control.plan
        run = f"{plan.ranks} ranks, {plan.transport}" + (", graph" if plan.graph else "")
        both = hunt(control), wrong_word(control)
        cells = [f"{seed}: {found.split('; ')[0]}" if found else "" for seed, found in both]
        lines.append(f"| {control.number} {control.name} | {run} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    found = table()
    print(found)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    current = f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END, 1)[1]}"
    if "--write" in arguments:
        PAGE.write_text(current)
    elif "--check" in arguments and current != page:
        print(f"{PAGE.name} is not current: run `PYTHONPATH=tests:. python -m helpers.controls --write`")
        return 1
    return 0


if __name__ == "__main__":
    environment.of_this_process()
    sys.exit(main(sys.argv[1:]))
