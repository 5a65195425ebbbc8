"""The tables of docs/performance.md are those of the committed JSON."""

import json
import re
from pathlib import Path

import pytest

from lamport_numba.bench import report

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
DATA = ROOT / "docs" / "data"


def test_tables_are_current():
    page = PAGE.read_text()
    assert page == report.renew(page, DATA), "run `make bench-tables`"


def test_a_figure_that_was_changed_by_hand_is_seen(tmp_path):
    row = {"bytes": 64, "gathers_a_second": 1000}
    result = {
        "world": 4,
        "fabric": "immediate",
        "transport": "peer",
        "cores": 2,
        "python": "3",
        "date": "d",
        "command": "c",
    }
    (tmp_path / "emulator-one.json").write_text(json.dumps({**result, "rows": [row]}))
    page = report.renew(PAGE.read_text(), tmp_path)
    assert "| 64 | 1,000 |" in page
    wrong = page.replace("| 64 | 1,000 |", "| 64 | 2,000 |")
    assert report.renew(wrong, tmp_path) == page != wrong


@pytest.mark.parametrize("file", sorted(DATA.glob("*.json")), ids=lambda file: file.stem)
def test_every_file_of_data_is_shown_and_says_how_it_was_made(file):
    patterns = [
        pattern for block in re.findall(r"<!-- table \w+ ([^>]+?) -->", PAGE.read_text()) for pattern in block.split()
    ]
    assert any(file.match(pattern) for pattern in patterns)
    found = json.loads(file.read_text())
    assert {"date", "command", "version", "packages"} <= set(found)


def test_every_target_that_the_page_names_is_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (bench-[\w-]+)", PAGE.read_text())):
        assert f"\n{target}: " in makefile
