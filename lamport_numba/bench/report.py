"""Results as people read them: on the terminal, and as tables of the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

from .._version import __version__
from . import sizes

__all__ = ["circumstances", "emulator_table", "header", "markdown", "renew", "stress_table", "table"]

_PACKAGES = (
    "cuda-bindings",
    "numpy",
    "mpi4py",
    "nccl4py",
    "nvidia-nccl-cu13",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu13",
)
_HOW = {
    "graph": "us a call in a graph of {calls} calls",
    "eager": "us a call, {eager_calls} calls queued one by one from Python",
    "latency": "us from one call to the end of its stream, by the host's clock",
}


def circumstances() -> dict[str, Any]:
    """When, with what versions and by which command: what every result carries."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    program = Path(sys.argv[0]).name
    ours = "-m lamport_numba" if program == "__main__.py" else f"benchmarks/{program}"
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": " ".join(["python", ours, *_arguments(sys.argv[1:])]),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": found,
    }


def _arguments(words: list[str]) -> list[str]:
    """The command's arguments without the files that it writes."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith(("--json=", "--plot=")):
            skip = False
        elif word in ("--json", "--plot"):
            skip = True
        else:
            kept.append(word)
    return kept


def header(result: dict[str, Any]) -> str:
    """What was measured and how, in comment lines."""
    lines = [
        f"lamport-numba {__version__}: {_where(result)}, {result['options']['dtype']}",
        f"medians and 99th percentiles of {result['options']['samples']} samples; the slowest rank counts",
        "every output was checked after its timing",
        f"floor: {result['floor']['words']}",
        "size: bytes of one rank; algbw: bytes of all ranks / time; x floor, x lamport: ratios of times",
    ]
    if "host" in result:
        lines.append("host us a call: " + ", ".join(f"{name} {time:.2f}" for name, time in result["host"].items()))
    lines += [f"{name} is left out: {reason}" for name, reason in result["missing"].items()]
    if result["kind"] == "emulated":
        lines.append("emulated device: these figures say nothing about hardware")
    return "\n".join(f"# {line}" for line in lines)


def table(result: dict[str, Any], mode: str, *, title: bool = True, start: int = 0) -> str:
    """The rows of a mode from the ``start``-th size on, as aligned text."""
    names = _columns(result, mode)
    widths = [max(len(name), 9) for name in names]
    lines = [[line.get(name, "-") for name in names] for line in _lines(result, mode)[start:]]
    if title:
        lines.insert(0, names)
    text = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines]
    return "\n".join([f"# {mode}: {_how(result, mode)}"] * title + text)


def markdown(result: dict[str, Any], mode: str) -> str:
    """The rows of a mode as a table of the documentation, with what is needed to make it again."""
    names = _columns(result, mode)
    lines = ["| " + " | ".join(names) + " |", "|" + "---:|" * len(names)]
    lines += ["| " + " | ".join(line.get(name, "-") for name in names) + " |" for line in _lines(result, mode)]
    versions = {"lamport-numba": result["version"], "Python": result["python"], **result["packages"]}
    notes = [
        f"{mode}: {_how(result, mode)}; medians of {result['options']['samples']} samples.",
        f"Floor: {result['floor']['words']}.",
        f"{_where(result)}, driver for CUDA {result['driver']}, {result['date']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        f"Command: `mpirun -n {result['world']} {result['command']}`.",
    ]
    if mode == "eager" and "host" in result:
        times = ", ".join(f"`{name}` {time:.2f} us" for name, time in result["host"].items())
        notes.append(f"Host time a call: {times}.")
    notes += [f"{name} is left out: {reason}." for name, reason in result["missing"].items()]
    return "\n".join([*lines, "", *notes])


def _how(result: dict[str, Any], mode: str) -> str:
    return _HOW[mode].format(**result["options"])


def _where(result: dict[str, Any]) -> str:
    world, devices = result["world"], result["devices"]
    return (
        f"{world} rank{'s' * (world != 1)} on {devices} device{'s' * (devices != 1)} ({result['device']}), "
        f"transport {result['transport']}"
    )


def _columns(result: dict[str, Any], mode: str) -> list[str]:
    eager = mode == "eager"
    found = ["size", "time us", "p99 us", "algbw GB/s", "floor us", "x floor", *["host us"] * eager]
    for name in result["contenders"]:
        if name != "lamport":
            found += [f"{name} us", f"{name} x lamport", *[f"{name} host us"] * eager]
    return found


def _lines(result: dict[str, Any], mode: str) -> list[dict[str, str]]:
    """One dictionary a size: column -> text."""
    by_size: dict[int, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["mode"] == mode:
            by_size.setdefault(row["bytes"], {})[row["contender"]] = row
    found = []
    for nbytes, rows in by_size.items():
        ours = rows["lamport"]
        line = {
            "size": sizes.text(nbytes),
            "time us": f"{ours['median_us']:.2f}",
            "p99 us": f"{ours['p99_us']:.2f}",
            "algbw GB/s": f"{nbytes * result['world'] / ours['median_us'] * 1e-3:.2f}",
            "floor us": f"{ours['floor_us']:.2f}",
            "x floor": f"{ours['median_us'] / ours['floor_us']:.2f}",
        }
        if "host_us" in ours:
            line["host us"] = f"{ours['host_us']:.2f}"
        for name, row in rows.items():
            line[f"{name} us"] = f"{row['median_us']:.2f}"
            line[f"{name} x lamport"] = f"{row['median_us'] / ours['median_us']:.2f}"
            if "host_us" in row:
                line[f"{name} host us"] = f"{row['host_us']:.2f}"
        found.append(line)
    return found


def stress_table(results: list[dict[str, Any]]) -> str:
    """Stress runs as a table of the documentation, one a row."""
    names = ["ranks", "calls", "sizes", "how", "wrong words", "calls a second", "device", "date", "command"]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for result in results:
        plan = result["plan"]
        low, high = min(span["low"] for span in plan["spans"]), max(span["high"] for span in plan["spans"])
        checked = min(result["checked"])
        wrong = f"{sum(result['bad_words']):,}" + (" **and an error**" if any(result["errors"]) else "")
        cells = [
            str(result["world"]),
            f"{checked:,}",
            f"{sizes.text(low)} to {sizes.text(high)}",
            f"{result['transport']}, " + (f"graphs of {plan['chunk']}" if plan["graph"] else "eager"),
            wrong,
            f"{checked / result['seconds']:,.0f}",
            result["device"],
            result["date"],
            f"`mpirun -n {result['world']} {result['command']}`",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def emulator_table(results: list[dict[str, Any]]) -> str:
    """Gathers a second of the emulated device, a column for each result, as a table of the documentation; one more for
    a result that knows what there was before."""
    found = sorted({row["bytes"] for result in results for row in result["rows"]})
    columns = [
        (f"{result['fabric']}, {result['transport']}{', before' * (key == 'before')}", result, key)
        for result in results
        for key in ("before", "gathers_a_second")
        if any(row.get(key) is not None for row in result["rows"])
    ]
    titles = [title for title, _, _ in columns]
    lines = ["| bytes a rank | " + " | ".join(titles) + " |", "|" + "---:|" * (1 + len(titles))]
    for nbytes in found:
        rates = [{row["bytes"]: row.get(key) for row in result["rows"]}.get(nbytes) for _, result, key in columns]
        cells = [sizes.text(nbytes), *("-" if rate is None else f"{rate:,}" for rate in rates)]
        lines.append("| " + " | ".join(cells) + " |")
    first = results[0]
    lines += [
        "",
        f"{first['world']} ranks on {first['cores']} cores, Python {first['python']}, {first['date']}; commands:",
    ]
    lines += [f"`mpirun -n {result['world']} {result['command']}`" for result in results]
    return "\n".join(lines)


_BLOCK = re.compile(r"(<!-- table (\w+) ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def renew(page: str, data: Path) -> str:
    """``page`` with its tables made anew from the JSON files in the folder ``data``.

    ``<!-- table KIND FILES -->`` ... ``<!-- end -->`` takes what is between: KIND is a mode of bench, "stress" or
    "emulator"; FILES are names or patterns. Where no file is there, it says so.
    """

    def fresh(found: re.Match[str]) -> str:
        kind = found[2]
        files = [file for pattern in found[3].split() for file in sorted(data.glob(pattern))]
        results = [json.loads(file.read_text()) for file in files]
        if not results:
            text = "Not measured yet."
        elif kind in _HOW:
            text = "\n\n".join(markdown(result, kind) for result in results)
        else:
            text = {"stress": stress_table, "emulator": emulator_table}[kind](results)
        return f"{found[1]}\n{text}\n\n{found[4]}"

    return _BLOCK.sub(fresh, page)
