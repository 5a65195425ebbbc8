"""The model of the protocol: the smallest searches, and that the search itself can fail."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from verification.__main__ import BEGIN, END, PAGE, met_expectation, tables, with_tables
from verification.cases import BROKEN, SAFE, alike
from verification.lamport import EVERY_STEP, Lamport
from verification.search import Result, TooLarge, search

QUICK = [case for case in SAFE + BROKEN if case.quick]


@cache
def searched(number: int) -> Result:
    return search(QUICK[number].model)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=[f"{case.name} ({case.instance})" for case in QUICK])
def test_search(number: int) -> None:
    assert met_expectation(QUICK[number], searched(number)), searched(number)


def test_known_fault_is_told_as_a_story() -> None:
    result = search(BROKEN[0].model)
    assert result.broken is not None
    assert "rank 1 takes rank 1's pack 0 of call 0" in result.broken.text
    assert "for rank 0's pack 1 of call 3" in result.broken.text
    late = [number for number, event in enumerate(result.story) if "rank 1's pack 0 of call 0 lands in rank 1" in event]
    ended = [number for number, event in enumerate(result.story) if "rank 1 completes call 0" in event]
    assert late > ended  # the own copy landed after the call that should have awaited it


def test_silent_steps_hide_nothing() -> None:
    # The steps that are taken at once, interleaved freely instead: the same verdict, for safe and broken designs.
    safe = Lamport(alike(2, 1, 1), choices=EVERY_STEP)
    assert search(safe).broken is None
    assert search(Lamport(alike(2, 1), "multicast", choices=EVERY_STEP)).broken is None
    broken = search(replace(safe, generations=1, asserts=())).broken
    assert broken is not None
    assert broken.invariant == "I3"


def test_a_search_that_was_cut_short_is_no_proof() -> None:
    with pytest.raises(TooLarge, match="more than 10 states"):
        search(Lamport(alike(2, 1, 1)), limit=10)


def test_page_has_a_row_for_every_case() -> None:
    page = PAGE.read_text()
    shown = page.split(BEGIN)[1].split(END)[0]
    for case in SAFE + BROKEN:
        assert f"| {case.name} | {case.instance} |" in shown


def test_page_shows_what_the_search_finds() -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    for number, case in enumerate(QUICK):
        row = tables([(case, searched(number))]).splitlines()
        assert next(line for line in row if line.startswith(f"| {case.name} |")) in shown
    assert with_tables(PAGE.read_text(), shown.strip()) == PAGE.read_text()
