"""Latency against size, log-log, as it can go into a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import sizes

__all__ = ["plot"]

_MARKERS = "os^Dv<>p"


def plot(result: dict[str, Any], file: str | Path, mode: str = "graph") -> None:
    """Draw the medians of ``mode`` into ``file`` (.pdf, .svg or .png). Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["mode"] == mode]
    figure, axes = pyplot.subplots(figsize=(5.0, 3.6), layout="constrained")
    for index, name in enumerate(result["contenders"]):
        mine = [row for row in rows if row["contender"] == name]
        width = 2.0 if name == "lamport" else 1.0
        axes.plot(
            [row["bytes"] for row in mine],
            [row["median_us"] for row in mine],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=width,
            label=name,
        )
    ours = [row for row in rows if row["contender"] == "lamport"]
    ticks = [row["bytes"] for row in ours]
    axes.plot(ticks, [row["floor_us"] for row in ours], color="black", linestyle="--", linewidth=1.0, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [sizes.text(tick) for tick in ticks], rotation=45)
    axes.set_xlabel("bytes a rank")
    axes.set_ylabel("microseconds a call")
    where = "emulated: not hardware" if result["kind"] == "emulated" else result["device"]
    axes.set_title(f"all-gather, {result['world']} ranks, {result['devices']} x {where}, {mode}", fontsize=9)
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file)
    pyplot.close(figure)
