#!/usr/bin/env python3
"""The tables of docs/performance.md from the JSON in docs/data.

python3 benchmarks/tables.py                             make the tables anew
python3 benchmarks/tables.py --take SESSION.json PREFIX  first take a session's results as docs/data/PREFIX-<step>.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lamport_numba.bench import report  # noqa: E402

PAGES = [ROOT / "docs" / "performance.md"]
DATA = ROOT / "docs" / "data"


def take(session: Path, prefix: str) -> list[Path]:
    """Write each step's result to a file of its own, and return the files."""
    found = []
    for name, step in json.loads(session.read_text()).items():
        if "result" in step:
            file = DATA / f"{prefix}-{name}.json"
            file.write_text(json.dumps(step["result"], indent=1) + "\n")
            found.append(file)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs=2, metavar=("SESSION", "PREFIX"))
    options = parser.parse_args()
    if options.take:
        for file in take(Path(options.take[0]), options.take[1]):
            print(file.relative_to(ROOT))
    for page in PAGES:
        page.write_text(report.renew(page.read_text(), DATA))
    return 0


if __name__ == "__main__":
    sys.exit(main())
