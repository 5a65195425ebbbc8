"""The bench on the emulated device: every mode, who takes part and why not, and outputs that are checked."""

import json
from dataclasses import replace

import pytest
from helpers import mpirun

from lamport_numba import ptx, run_ranks
from lamport_numba.bench import measure
from lamport_numba.bench.floor import Floor
from lamport_numba.errors import LamportError

QUICK = ["--samples", "2", "--calls", "5", "--eager-calls", "10"]


def options(**changes):
    quick = {"samples": 2, "calls": 4, "eager_calls": 5, "rounds": 5, "timeout": 20.0}
    return measure.Options(**{"sizes": [16, 1024], "modes": ["graph"], "against": [], **quick, **changes})


def test_the_command_measures_every_mode_against_mpi(tmp_path):
    file = tmp_path / "result.json"
    words = [
        "-m",
        "lamport_numba",
        "bench",
        "--sizes",
        "16,1K",
        "--mode",
        "graph,eager,latency",
        "--against",
        "mpi,nccl",
    ]
    done = mpirun.command([*words, *QUICK, "--json", str(file)], 2, timeout=120)
    said = done.stdout
    assert "2 ranks on 2 devices" in said
    assert "say nothing about hardware" in said
    assert "nccl is left out: it needs NVIDIA GPUs" in said
    for mode in ("graph", "eager", "latency"):
        assert f"# {mode}: us" in said
    found = json.loads(file.read_text())
    rows = {(row["mode"], row["bytes"], row["contender"]) for row in found["rows"]}
    assert rows == {(m, n, c) for m in ("graph", "eager", "latency") for n in (16, 1024) for c in ("lamport", "mpi")}
    assert all(0 < row["median_us"] <= row["p99_us"] for row in found["rows"])
    assert found["floor"]["one_way"] > 0
    assert set(found["host"]) == {"cuLaunchKernelEx", "prepared call", "gather(x, out=y, stream=s)"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_world_in_one_process_is_measured(ranks):
    shown = []
    results = run_ranks(ranks, lambda comm: measure.run(comm, options(), show=shown.append), timeout=120)
    assert all(result["rows"] == results[0]["rows"] for result in results)
    assert [row["bytes"] for row in results[0]["rows"]] == [16, 1024]
    assert (results[0]["floor"]["one_way"] > 0) == (ranks > 1)
    assert len(shown) == 3 * ranks  # the set-up and each size


def test_mpi_is_left_out_where_there_is_none():
    results = run_ranks(2, lambda comm: measure.run(comm, options(against=["mpi", "nvshmem"], sizes=[64])), timeout=120)
    assert "mpi" in results[0]["missing"] or "mpi" in results[0]["contenders"]
    assert results[0]["missing"]["nvshmem"] == "it needs NVIDIA GPUs"


def test_a_wrong_output_ends_it(monkeypatch):
    shipped = ptx.read
    store = "st.global.v4.b32 [%to], {%w0, %w1, %w2, %w3};"
    monkeypatch.setattr(ptx, "read", lambda name: shipped(name).replace(store, store.replace("%w3", "%w2")))
    with pytest.raises(LamportError, match=r"lamport: [0-9]+ wrong words in the outputs of 64 bytes"):
        run_ranks(2, lambda comm: measure.run(comm, options(sizes=[64], transport="peer")), timeout=120)


def test_another_text_of_the_kernel_takes_turns_with_ours():
    text = ptx.read("lamport_peer.ptx")
    both = options(sizes=[64], transport="peer", variants={"same": text})
    result = run_ranks(2, lambda comm: measure.run(comm, both), timeout=120)[0]
    assert [row["contender"] for row in result["rows"]] == ["lamport", "same"]
    store = "st.global.v4.b32 [%to], {%w0, %w1, %w2, %w3};"
    wrong = replace(both, variants={"wrong": text.replace(store, store.replace("%w3", "%w2"))})
    with pytest.raises(LamportError, match=r"wrong: [0-9]+ wrong words"):
        run_ranks(2, lambda comm: measure.run(comm, wrong), timeout=120)


@pytest.mark.parametrize(
    "words", [["--mode", "fast"], ["--against", "gloo"], ["--sizes", "10"], ["--variant", "x=no.ptx"]]
)
def test_what_is_unknown_is_refused(words):
    done = mpirun.command(["-m", "lamport_numba", "bench", *words], 1, timeout=60, check=False)
    assert done.returncode == 2
    assert words[0] in done.stderr


def test_the_floor_counts_what_the_links_carry():
    parts = {"empty": 0.4, "empty_latency": 5.0, "one_way": 0.73, "rate_from": "given"}
    apart = Floor(**parts, rate=450.0, shared=False, world=2)
    assert apart.graph(16) == pytest.approx(1.13, abs=0.001)
    assert apart.graph(1 << 20) == pytest.approx(3.46, abs=0.01)
    assert apart.latency(16) == pytest.approx(5.73, abs=0.001)
    four = Floor(**parts, rate=450.0, shared=False, world=4)
    assert four.wire(4500) == pytest.approx(0.03)
    assert Floor(**parts, rate=450.0, shared=True, world=4).wire(4500) == pytest.approx(0.12)
    assert "3 x bytes / 450 GB/s" in four.words()
    assert Floor(**parts, rate=None, shared=False, world=1).wire(1 << 20) == 0.0
