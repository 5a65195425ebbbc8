"""The adversarial fabric against the shipped kernels, which survive, and against every known mistake, which falls.

A mistake falls to the same sizes, seeds and budget that the shipped kernels survive.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from helpers import controls, environment, patches
from helpers.attack import Plan, attack, replay
from helpers.controls import CONTROLS, PLANS, SEEDS, Control

AT_LEAST = 200_000  # calls: one rank's part in one gather


@pytest.mark.parametrize("control", CONTROLS, ids=[control.title for control in CONTROLS])
def test_a_mistake_falls(control: Control) -> None:
    seed, found = controls.hunt(control)
    assert found, f"no seed of {SEEDS} shows it"
    print(f"\nseed {seed}: {found}")


@pytest.mark.parametrize("plan", PLANS, ids=replay)
def test_the_shipped_kernels_survive_the_same(plan: Plan) -> None:
    for seed in SEEDS:
        calls, found = attack(plan, seed)
        assert not found, f"{replay(plan, seed)}: {found}"
        assert calls


def test_the_known_fault_is_found_as_the_word_that_was_left_behind() -> None:
    seed, found = controls.hunt(CONTROLS[0])
    assert seed >= 0
    assert "in call" in found or "of an earlier call" in found, found


@pytest.mark.parametrize("plan", [controls.CLEANING, controls.SMALLEST], ids=replay)
def test_cleaning_the_previous_stage_is_right_where_it_is_done_right(plan: Plan) -> None:
    # So controls 1 and 3 fall to their mistakes, and not to the patch that makes room for them.
    for seed in SEEDS:
        assert attack(plan, seed, patches.cleaned_by(patches.RECORDED_SIZE))[1] == ""


def test_a_seed_replays_exactly() -> None:
    control = CONTROLS[0]
    seed, found = controls.hunt(control)
    assert attack(control.plan, seed, control.mistake) == attack(control.plan, seed, control.mistake)
    assert attack(control.plan, seed, control.mistake)[1] == found


def test_a_patch_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected 1 times, found 0"), patches.both(("no such text", "", 1))():
        pass


def test_page_has_a_row_for_every_control() -> None:
    shown = controls.PAGE.read_text().split(controls.BEGIN)[1].split(controls.END)[0]
    for control in CONTROLS:
        assert f"| {control.number} {control.name} |" in shown


# -- the long run ----------------------------------------------------------------------------------------------------

# (plan, seeds): sizes over the whole capacity, eager and in graphs with eager calls between, 2 to 5 ranks; a few with
# several warps, and with a residency that makes packs loop.
LONG = Plan(calls=24, timeout=10.0, warm_up=True)


def long(seeds: int, ranks: int, transport: str, graph: bool, rounds: int, **more: int) -> list[tuple[Plan, int]]:
    plan = Plan(**(vars(LONG) | more | {"ranks": ranks, "transport": transport, "graph": graph, "rounds": rounds}))
    return [(plan, seed) for seed in range(1000, 1000 + seeds)]


JOBS = {
    "3 to 5 ranks, and loops": [
        *long(2, 5, "peer", True, 20),
        *long(2, 5, "multicast", True, 16),
        *long(2, 4, "peer", True, 40),
        *long(2, 4, "multicast", False, 25),
        *long(4, 3, "peer", True, 40),
        *long(4, 3, "peer", False, 30),
        *long(4, 3, "multicast", True, 40),
        *long(4, 3, "multicast", False, 30),
        *long(2, 2, "peer", True, 20, capacity=100, residency=2),
        *long(2, 3, "multicast", True, 8, capacity=100, residency=2),
    ],
    "2 ranks, multicast": [*long(8, 2, "multicast", True, 90), *long(4, 2, "multicast", False, 90)],
    "2 ranks, peer": [*long(12, 2, "peer", True, 120), *long(6, 2, "peer", False, 120)],
}


def calls_of(plan: Plan) -> int:
    return plan.ranks * plan.rounds * (plan.calls + plan.graph)


def _survive(job: tuple[Plan, int]) -> tuple[int, str]:
    environment.of_this_process()
    calls, found = attack(*job)
    return calls, found and f"{replay(*job)}: {found}"


@pytest.mark.parametrize("name", JOBS)
def test_the_shipped_kernels_survive_a_long_run(name: str) -> None:
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_survive, JOBS[name]))
    assert not [found for _, found in results if found]
    assert sum(calls for calls, _ in results) == sum(calls_of(plan) for plan, _ in JOBS[name])


def test_the_long_runs_are_long_enough() -> None:
    assert sum(calls_of(plan) for jobs in JOBS.values() for plan, _ in jobs) >= AT_LEAST
