"""The examples: the same answer for 1, 2 and 4 ranks, and the same bits as by MPI's own Allgather."""

import functools
import hashlib
import json

import pytest
from helpers import mpirun

from lamport_numba.cli import demo

RANKS = (1, 2, 4)


def decode(comm, transport):
    outcome = demo.load("vocab_parallel_decode").decode(comm, steps=60, transport=transport)
    return {"text": outcome.text(), "different": outcome.different, "transport": outcome.transport}


def pagerank(comm, transport):
    outcome = demo.load("pagerank").pagerank(comm, transport=transport)
    top = sorted(range(len(outcome.names)), key=lambda i: -outcome.ranks[i])[:10]
    return {
        "top": [outcome.names[i] for i in top],
        "bits": hashlib.sha256(outcome.ranks.tobytes()).hexdigest(),
        "sum": float(outcome.ranks.sum(dtype="float64")),
        "change": outcome.change,
        "different": outcome.different,
        "transport": outcome.transport,
    }


@functools.cache
def outcomes(function, ranks, transport):
    return mpirun.run(function, ranks, transport=transport, multicast=transport == "multicast")


@pytest.mark.parametrize("transport", ["peer", "multicast"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", [decode, pagerank])
def test_same_answer_on_every_rank_and_for_every_world(function, ranks, transport):
    alone = outcomes(function, 1, "peer")[0]
    for outcome in outcomes(function, ranks, transport):
        assert outcome["different"] == 0
        assert outcome["transport"] == transport
        assert {**outcome, "transport": "peer"} == alone


def test_pagerank_converges_to_a_distribution():
    outcome = outcomes(pagerank, 1, "peer")[0]
    assert outcome["sum"] == pytest.approx(1, abs=1e-4)
    assert outcome["change"] < 1e-6
    assert "sys" in outcome["top"]


def test_the_text_is_made_of_words():
    text = outcomes(decode, 1, "peer")[0]["text"]
    assert text.startswith("The value of")
    assert len(text.split()) > 40


def test_demo_says_what_it_ran_on():
    done = mpirun.command(["-m", "lamport_numba", "demo", "--device", "emulated"], 4)
    lines = done.stdout.splitlines()
    assert any(line.split() == ["device", "emulated", "(the", "same", "PTX", "on", "the", "CPU)"] for line in lines)
    assert any(line.split() == ["world", "4", "ranks", "on", "1", "host"] for line in lines)
    assert any(line.split()[:1] == ["transport"] for line in lines)
    assert "the same bits as by MPI's Allgather" in done.stdout


def test_demo_fails_on_a_difference():
    """The control: MPI's answer is spoilt in one bit on one rank, and all ranks exit with 1."""
    code = """
import sys
from mpi4py import MPI
from lamport_numba.cli import _common, main
class Spoilt(MPI.Intracomm):
    def Allgather(self, mine, whole):
        super().Allgather(mine, whole)
        if self.Get_rank() == 1:
            whole.view('u4')[3] ^= 1
start = _common.world
_common.world = lambda: Spoilt(start())
sys.exit(main(["demo"]))
"""
    done = mpirun.command(["-c", code], 2, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_selftest_writes_what_it_did(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--transport", "multicast", "--device", "emulated", "--json", str(report)]
    done = mpirun.command(["-m", "lamport_numba", "selftest", *arguments], 4, multicast=True, timeout=120)
    found = json.loads(report.read_text())
    assert done.stdout.splitlines()[-1] == f"{len(found['cases'])} passed, 0 failed"
    assert found["device"] == "emulated"
    assert found["world"] == 4
    assert all(case["passed"] for case in found["cases"])
    assert {name for case in found["cases"] for name in case["transports"]} == {"multicast", "peer"}
    assert found["packages"]["numpy"]


def test_selftest_refuses_an_unknown_case():
    done = mpirun.command(["-m", "lamport_numba", "selftest", "--case", "nothing"], None, check=False)
    assert done.returncode == 2
    assert "no case nothing" in done.stderr


def test_the_driver_of_the_gpu_suite_runs(tmp_path):
    """On the emulated device, with ranks that share it as they would share a GPU."""
    summary = tmp_path / "summary.json"
    script = str(mpirun.TESTS / "gpu" / "run.py")
    arguments = [script, "--device", "emulated", "--ranks", "2", "--case", "streams", "--json", str(summary)]
    done = mpirun.command(arguments, None, env={"LAMPORT_NUMBA_EMULATED_DEVICES": "1"}, timeout=120)
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed"
    found = json.loads(summary.read_text())
    assert [(run["what"], run["ranks"], run["shared"]) for run in found["runs"]] == [("selftest", 2, True)]
