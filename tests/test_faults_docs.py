"""docs/faults.md: the tests it names exist, and each test of faults is named there or is a control of one that is."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
REPORTED = 25  # kinds of faults that were reported elsewhere


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| kind"))]


def test_every_test_that_the_page_names_exists():
    named = set(NAMED.findall(PAGE))
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (TESTS / file).is_file() or f"\ndef {name}(" not in (TESTS / file).read_text()
    ]
    assert missing == []


def test_every_row_has_a_test_or_says_why_it_needs_none():
    faults, reported = PAGE.split("## Reported elsewhere")
    assert all(NAMED.search(row) for row in rows(faults))
    assert len(rows(reported)) == REPORTED
    assert [row for row in rows(reported) if not NAMED.search(row)] == [
        "| arrival counter without release | there is no arrival counter, and no barrier of CTAs |"
    ]
