"""How all ranks come to rest before a close or a reset: nobody waits for a call that cannot complete any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

from ..symmetric.communicator import Communicator

__all__ = ["Standing", "disagreement", "meet"]

_LONGEST: Final = 0.2  # seconds between two looks


@dataclass(frozen=True)
class Standing:
    """Where one rank stands, once it queues no more calls."""

    at_rest: bool  # nothing is queued and nothing runs
    calls: int  # completed, and the refused ones
    waiting: bool  # in call number ``calls``
    refusals: int
    captured: bool  # a graph may hold calls
    alarmed: bool


def meet(
    comm: Communicator, stage: str, look: Callable[[], Standing], timeout: float | None = None
) -> Sequence[Standing]:
    """Every rank's standing, once all are at rest or it is clear that they never will be. Collective.

    Raises SetupError on all ranks if ``look`` fails on one.
    """
    comm.barrier(stage, timeout)  # from here on no rank queues a call
    pause = 0.0
    while True:
        mine, wrong = None, None
        try:
            mine = astuple(look())
        except Exception as error:
            wrong = error
        ranks = [Standing(*said) for said in comm.agree(stage, mine, wrong, timeout)]
        if all(rank.at_rest for rank in ranks) or disagreement(ranks) is not None:
            return ranks
        comm.sleep(pause)
        pause = min(2 * pause + 1e-3, _LONGEST)


def disagreement(ranks: Sequence[Standing]) -> str | None:
    """What shows that ranks made different calls; None while nothing does."""
    if any(rank.alarmed for rank in ranks):
        return None  # there are reports, which say more
    rows = ", ".join(
        f"rank {i}: {rank.calls}" + (f", {rank.refusals} of them refused" if rank.refusals else "")
        for i, rank in enumerate(ranks)
    )
    if len({rank.refusals for rank in ranks}) > 1:
        return f"some ranks refused a call and others did not ({rows})"
    over = [rank.calls for rank in ranks if rank.at_rest]
    stuck = [rank.calls for rank in ranks if rank.waiting and not rank.at_rest]
    if over and any(calls >= min(over) for calls in stuck):
        return f"ranks made different numbers of calls ({rows}, and in another one)"
    if len(over) == len(ranks) and len(set(over)) > 1:
        return f"ranks made different numbers of calls ({rows})"
    return None
