"""The model of the protocol: the smallest searches, and that the search itself can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verification.__main__ import BEGIN, END, PAGE, met_expectation, tables, with_tables
from verification.cases import BROKEN, SAFE, Case, alike
from verification.lamport import EVERY_STEP, Lamport
from verification.search import TooLarge, search

QUICK = [case for case in SAFE + BROKEN if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=[f"{case.name} ({case.instance})" for case in QUICK])
def test_search(case: Case) -> None:
    result = search(case.model)
    assert met_expectation(case, result), result


def test_known_fault_is_told_as_a_story() -> None:
    result = search(BROKEN[0].model)
    assert result.broken is not None
    assert "rank 1 takes rank 1's pack 0 of call 0" in result.broken.text
    assert "for rank 0's pack 1 of call 3" in result.broken.text
    late = [number for number, event in enumerate(result.story) if "rank 1's pack 0 of call 0 lands in rank 1" in event]
    ended = [number for number, event in enumerate(result.story) if "rank 1 completes call 0" in event]
    assert late > ended  # the own copy landed after the call that should have awaited it


@pytest.mark.parametrize("transport", ["peer", "multicast"])
def test_silent_steps_hide_nothing(transport: str) -> None:
    # The steps that are taken at once, interleaved freely instead: the same verdict, for a safe and a broken design.
    safe = Lamport(alike(2, 1, 1) if transport == "peer" else alike(2, 1), transport, choices=EVERY_STEP)
    assert search(safe).broken is None
    broken = search(replace(safe, calls=alike(2, 1, 1), generations=1, asserts=()))
    assert broken.broken is not None


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
    for case in QUICK:
        row = tables([(case, search(case.model))]).splitlines()
        assert next(line for line in row if line.startswith(f"| {case.name} |")) in shown
    assert with_tables(PAGE.read_text(), shown.strip()) == PAGE.read_text()
