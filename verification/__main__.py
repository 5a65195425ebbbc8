"""Search the model of the protocol: `python -m verification [--quick] [--only TEXT] [--story] [--write | --check]`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from verification.cases import BROKEN, SAFE, Case
from verification.search import Result, search

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verification.md"
BEGIN, END = "<!-- begin: python -m verification --write -->", "<!-- end -->"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verification", description=__doc__.split(":")[0] + ".")
    parser.add_argument("--quick", action="store_true", help="the smallest instances only")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose name or instance contains TEXT")
    parser.add_argument("--story", action="store_true", help="print how each mistake goes wrong, event by event")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the tables into docs/verification.md")
    what.add_argument("--check", action="store_true", help="fail unless docs/verification.md shows these very results")
    options = parser.parse_args(arguments)
    if not any(options.only in f"{case.name}, {case.instance}" for case in SAFE + BROKEN):
        parser.error(f"--only {options.only}: no case's name or instance contains it")
    if (options.write or options.check) and (options.quick or options.only):
        parser.error("--write and --check need every case: leave out --quick and --only")

    results: list[tuple[Case, Result]] = []
    wrong = 0
    for case in SAFE + BROKEN:
        if (options.quick and not case.quick) or options.only not in f"{case.name}, {case.instance}":
            continue
        began = time.monotonic()
        result = search(case.model)
        results.append((case, result))
        met = met_expectation(case, result)
        wrong += not met
        said = f"{result.broken.invariant}: {result.broken.text}" if result.broken else "safe"
        took = time.monotonic() - began
        mark = "ok   " if met else "WRONG"
        print(f"{mark} {result.states:>9,} states {took:6.1f} s  {case.name} ({case.instance}): {said}", flush=True)
        if result.broken and (options.story or not met):
            print(f"\n{result}\n")
    print(f"{len(results)} searches, {sum(result.states for _, result in results):,} states, {wrong} not as expected")
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(), tables(results)))
    if options.check and with_tables(PAGE.read_text(), tables(results)) != PAGE.read_text():
        print(f"{PAGE.name} is not current: run `python -m verification --write`")
        wrong += 1
    return 1 if wrong else 0


def met_expectation(case: Case, result: Result) -> bool:
    return (result.broken.invariant if result.broken else "") == case.breaks


def tables(results: list[tuple[Case, Result]]) -> str:
    """The two tables of the page; nothing in them depends on the machine."""
    lines = ["| design | searched | states | orders end in |", "|---|---|---:|---:|"]
    lines += [
        f"| {case.name} | {case.instance} | {result.states:,} | {result.endings:,} |"
        for case, result in results
        if not result.broken
    ]
    lines += ["", "| mistake | searched | states | events | what goes wrong |", "|---|---|---:|---:|---|"]
    lines += [
        f"| {case.name} | {case.instance} | {result.states:,} | {len(result.story)} |"
        f" {result.broken.invariant}: {result.broken.text} |"
        for case, result in results
        if result.broken
    ]
    return "\n".join(lines)


def with_tables(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
