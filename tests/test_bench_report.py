"""What bench prints, and the tables of the documentation made from the same JSON."""

import json

import pytest

from lamport_numba.bench import report, timing


def _row(nbytes, name, median, p99, floor):
    times = {"median_us": median, "p99_us": p99, "floor_us": floor}
    return {"mode": "graph", "bytes": nbytes, "contender": name, "samples": 20, **times}


RESULT = {
    "bench": 1,
    "kind": "cuda",
    "device": "Some GPU",
    "driver": "13.0",
    "devices": 2,
    "world": 2,
    "transport": "peer",
    "version": "0.1",
    "date": "2026-01-02",
    "command": "python -m lamport_numba bench --sizes 16,1K",
    "python": "3.12.3",
    "platform": "Linux x86_64",
    "packages": {"numpy": "2.4.6"},
    "options": {"dtype": "float32", "samples": 20, "calls": 100, "eager_calls": 1000, "sizes": [16, 1024]},
    "contenders": ["lamport", "nccl"],
    "missing": {"nvshmem": "not installed"},
    "floor": {"words": "0.40 us empty kernel + 0.73 us one way + bytes / 450 GB/s (NVLink 4, one way)"},
    "host": {"cuLaunchKernelEx": 4.25, "prepared call": 5.0},
    "rows": [
        _row(16, "lamport", 1.4, 1.5, 1.12),
        _row(16, "nccl", 4.2, 5.0, 1.12),
        _row(1024, "lamport", 2.0, 2.5, 1.0),
    ],
}


def test_a_row_has_time_bandwidth_and_ratios():
    title, names, first, second = report.table(RESULT, "graph").splitlines()
    assert title == "# graph: us a call in a graph of 100 calls"
    assert names.split() == [
        "size",
        "time",
        "us",
        "p99",
        "us",
        "algbw",
        "GB/s",
        "floor",
        "us",
        "x",
        "floor",
        "nccl",
        "us",
        "nccl",
        "x",
        "lamport",
    ]
    assert first.split() == ["16", "1.40", "1.50", "0.02", "1.12", "1.25", "4.20", "3.00"]
    assert second.split() == ["1K", "2.00", "2.50", "1.02", "1.00", "2.00", "-", "-"]


def test_rows_can_be_printed_as_they_come():
    whole = report.table(RESULT, "graph").splitlines()
    assert report.table(RESULT, "graph", title=False, start=1).splitlines() == whole[3:]


def test_the_header_says_what_is_missing_and_what_the_floor_is():
    said = report.header(RESULT)
    assert "2 ranks on 2 devices (Some GPU), transport peer, float32" in said
    assert "floor: 0.40 us empty kernel" in said
    assert "nvshmem is left out: not installed" in said
    assert "hardware" not in said
    assert "say nothing about hardware" in report.header({**RESULT, "kind": "emulated"})


def test_a_page_is_made_anew_from_the_data(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(RESULT))
    page = "before\n<!-- table graph one.json -->\nold\n<!-- end -->\nafter\n"
    fresh = report.renew(page, tmp_path)
    assert fresh.startswith("before\n<!-- table graph one.json -->\n")
    assert fresh.endswith("<!-- end -->\nafter\n")
    assert "| 16 | 1.40 | 1.50 | 0.02 | 1.12 | 1.25 | 4.20 | 3.00 |" in fresh
    assert "`mpirun -n 2 python -m lamport_numba bench --sizes 16,1K`" in fresh
    assert "old" not in fresh
    assert report.renew(fresh, tmp_path) == fresh


STRESS = {
    "world": 4,
    "transport": "peer",
    "device": "Some GPU",
    "date": "2026-01-02",
    "command": "python -m lamport_numba stress --calls 2M --graph",
    "seconds": 20.0,
    "bad_words": [0, 3, 0, 0],
    "errors": [None, None, None, None],
    "checked": [2_000_000] * 4,
    "plan": {"spans": [{"low": 16, "high": 262144}], "graph": True, "chunk": 100},
}
EMULATOR = {
    "world": 4,
    "fabric": "immediate",
    "transport": "peer",
    "date": "2026-01-02",
    "command": "python benchmarks/emulator_speed.py",
    "cores": 2,
    "python": "3.11.7",
    "rows": [{"bytes": 64, "gathers_a_second": 12345}],
}


def test_stress_runs_and_emulator_speeds_are_tables_too(tmp_path):
    (tmp_path / "s1.json").write_text(json.dumps(STRESS))
    (tmp_path / "s2.json").write_text(json.dumps({**STRESS, "errors": ["PeerTimeout", None, None, None]}))
    (tmp_path / "e.json").write_text(json.dumps(EMULATOR))
    blocks = ["stress s*.json", "emulator e.json", "graph no.json"]
    fresh = report.renew("".join(f"<!-- table {block} -->\n<!-- end -->\n" for block in blocks), tmp_path)
    assert "| 4 | 2,000,000 | 16 to 256K | peer, graphs of 100 | 3 | 100,000 | Some GPU | 2026-01-02 |" in fresh
    assert "| 3 **and an error** |" in fresh
    assert "| 64 | 12,345 |" in fresh
    (tmp_path / "e.json").write_text(json.dumps({**EMULATOR, "rows": [{**EMULATOR["rows"][0], "before": 6789}]}))
    fresh = report.renew(fresh, tmp_path)
    assert "| bytes a rank | immediate, peer, before | immediate, peer |" in fresh
    assert "| 64 | 6,789 | 12,345 |" in fresh
    assert fresh.count("Not measured yet.") == 1


def test_arguments_without_the_files_that_are_written(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/__main__.py", "bench", "--json", "a.json", "--sizes", "16", "--plot=b.pdf"])
    assert report.circumstances()["command"] == "python -m lamport_numba bench --sizes 16"


def test_medians_and_percentiles():
    assert timing.median([3.0, 1.0, 2.0]) == 2.0
    assert timing.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert timing.percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert timing.percentile([1.0, 2.0], 0.99) == 2.0


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from lamport_numba.bench import plot

    plot.plot(RESULT, tmp_path / "plot.svg")
    assert "microseconds" in (tmp_path / "plot.svg").read_text()
