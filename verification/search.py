"""Breadth-first search of everything a model can do, and the shortest story that breaks it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol


@dataclass(frozen=True)
class Broken:
    """What a step leads to when it breaks an invariant."""

    invariant: str
    text: str


class Model(Protocol):
    """What can be searched. States are values: equal states are the same state."""

    def initial(self, notes: list[str] | None = None) -> Hashable: ...

    def steps(self, state: Any, notes: list[str] | None = None) -> Iterable[tuple[str, Any]]:
        """Every (what happens, state or Broken) that may come next; steps nobody can observe are told in `notes`."""

    def ended(self, state: Any) -> Broken | None:
        """What is wrong with a state from which nothing can happen any more."""


@dataclass(frozen=True)
class Result:
    states: int
    steps: int
    endings: int
    broken: Broken | None
    story: tuple[str, ...]  # the shortest way to what broke, one event a line

    def __str__(self) -> str:
        if self.broken is None:
            return f"safe: {self.states:,} states, {self.steps:,} steps, {self.endings:,} endings"
        lines = [f"{number:3}  {line}" for number, line in enumerate(self.story, 1)]
        lines += [f"  => {self.broken.invariant}: {self.broken.text}", f"     ({self.states:,} states)"]
        return "\n".join(lines)


class TooLarge(RuntimeError):
    """The search met more states than it was given."""


def search(model: Model, limit: int = 5_000_000) -> Result:
    """Visit every reachable state of `model`, or stop at the first broken one, which no shorter story reaches.

    Raises TooLarge beyond `limit` states: a search that was cut short must not be read as a proof.
    """
    start = model.initial()
    parents: dict[Any, Any] = {start: None}
    frontier = [start]
    steps = endings = 0
    while frontier:
        reached = []
        for state in frontier:
            stuck = True
            for _, after in model.steps(state):
                stuck = False
                steps += 1
                if after in parents:
                    continue
                if isinstance(after, Broken):
                    return Result(len(parents), steps, endings, after, _story(model, parents, state, after))
                parents[after] = state
                reached.append(after)
            if stuck:
                endings += 1
                broken = model.ended(state)
                if broken is not None:
                    return Result(len(parents), steps, endings, broken, _story(model, parents, state, None))
        if len(parents) > limit:
            raise TooLarge(f"more than {limit:,} states in {model}; choose a smaller instance or raise the limit")
        frontier = reached
    return Result(len(parents), steps, endings, None, ())


def _story(model: Model, parents: dict[Any, Any], last: Any, broken: Broken | None) -> tuple[str, ...]:
    """The events on the way to `last` and on to `broken`, found by taking the steps again and listening."""
    way = [last]
    while parents[way[-1]] is not None:
        way.append(parents[way[-1]])
    way.reverse()
    if broken is not None:
        way.append(broken)
    story: list[str] = []
    model.initial(story)
    notes: list[str] = []
    for before, after in pairwise(way):
        notes.clear()
        for what, state in model.steps(before, notes):
            if state == after:
                story += [what, *notes]
                break
            notes.clear()
    return tuple(story)
