"""The stress run: right kernels pass it, a kernel with a mistake does not, and what is wrong is told in full."""

import json
import re
from dataclasses import replace

import pytest
from helpers import mpirun

from lamport_numba import ptx, run_ranks
from lamport_numba.bench import payload, sizes, stress
from lamport_numba.bench.stress import Options
from lamport_numba.cli import stress as command
from lamport_numba.collectives import LamportAllGather
from lamport_numba.collectives.channel import LamportChannel

OPTIONS = Options(calls=230, spans=sizes.parse("16-1K"), chunk=40, burst=4, late=False, timeout=20.0)


def run(ranks, options):
    """The outcome, which must be the same on all ranks."""
    first, *others = run_ranks(ranks, lambda comm: stress.run(comm, options), timeout=120)
    assert all(replace(other, device="") == replace(first, device="") for other in others)
    return first


@pytest.fixture
def mistake(monkeypatch):
    """Load a kernel with a change of its text: a pattern that is there once, and what stands in its place."""
    shipped = ptx.read

    def make(file, pattern, new):
        def read(name):
            text = shipped(name)
            if name == file:
                text, found = re.subn(pattern, new, text, flags=re.DOTALL)
                assert found == 1
            return text

        monkeypatch.setattr(ptx, "read", read)

    return make


@pytest.mark.parametrize("transport", ["peer", "multicast"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_shipped_kernels_pass(ranks, graph, transport):
    outcome = run(ranks, replace(OPTIONS, graph=graph, transport=transport))
    assert outcome.well
    assert outcome.transport == transport
    assert outcome.checked == [OPTIONS.calls] * ranks
    assert outcome.first_mismatch() is None


def test_calls_may_be_fewer_than_a_graph_has_and_need_not_fill_graphs():
    for calls in (1, 39, 41):
        assert run(2, replace(OPTIONS, calls=calls, graph=True)).checked == [calls, calls]


def test_without_pdl_and_without_bursts():
    assert run(2, replace(OPTIONS, pdl=False, burst=1, graph=True)).well


def test_a_word_in_the_wrong_place_is_found_and_told_in_full(mistake):
    """What a peer sent is written with two words exchanged."""
    mistake("lamport_peer.ptx", r"(ARRIVED:.*?\[%to\], \{%w0, %w1, )%w2, %w3", r"\g<1>%w3, %w2")
    outcome = run(2, replace(OPTIONS, transport="peer"))
    assert not outcome.well
    assert outcome.errors == [None, None]
    assert outcome.bad_calls == [OPTIONS.calls] * 2
    assert outcome.first[0]["rank"] == 1
    assert outcome.first[1]["rank"] == 0
    rank, first = outcome.first_mismatch()
    assert first.call == 0
    assert first.word % 4 in (2, 3)
    other = first.word ^ 1
    assert first.got == payload.words(0, first.rank, 1024)[other]
    said = command.summary(outcome, OPTIONS, "emulated")
    assert f"on rank {rank}: call 0, source rank {first.rank}, word {first.word}" in said
    assert f"word {other} of rank {first.rank} in the same call" in said
    assert said.endswith("FAILED")


def test_a_payload_of_a_call_before_is_named(mistake):
    """Every other call makes the payload of the call before."""
    add = r"(    add\.u32 %call, %call, %offset;\n)"
    mistake("stress_fill.ptx", add, r"\g<1>    and.b32 %call, %call, 0xfffffffe;\n")
    outcome = run(2, replace(OPTIONS, transport="peer"))
    assert outcome.bad_calls == [OPTIONS.calls // 2] * 2
    _, first = outcome.first_mismatch()
    assert first.call == 1
    assert f"word {first.word} of rank {first.rank} in call 0, 1 calls earlier" in first.story(2, 1024)


def test_a_word_left_in_the_mailbox_is_found(monkeypatch):
    class Dirty(LamportChannel):
        """One word of the mailbox is not reset before it is looked at."""

        def residue(self):
            self.drv.call("cuMemsetD32", self.memory.local + self.memory.nbytes // 2 // 16 * 16, 1, 1)
            return super().residue()

    monkeypatch.setattr(LamportAllGather, "_channel", Dirty)
    outcome = run(2, replace(OPTIONS, transport="peer", calls=20, spans=sizes.parse("256K")))
    assert not outcome.well
    assert outcome.errors == [None, None]
    assert outcome.bad_words == [0, 0]
    assert outcome.residue == [1, 1]
    assert "left behind [1, 1] words" in command.summary(outcome, OPTIONS, "emulated")


def test_ranks_that_disagree_end_with_an_error_on_all():
    def different(comm):
        return stress.run(comm, replace(OPTIONS, seed=comm.Get_rank(), timeout=2.0))

    for outcome in run_ranks(2, different, timeout=120):
        assert not outcome.well
        assert all("CallMismatch" in error or "PeerTimeout" in error for error in outcome.errors)


def test_the_command_reports_and_writes_json(tmp_path):
    file = tmp_path / "result.json"
    words = ["-m", "lamport_numba", "stress", "--calls", "200", "--sizes", "16-256", "--graph", "--chunk", "20"]
    done = mpirun.command([*words, "--transport", "peer", "--json", str(file)], 2, timeout=120)
    assert "mismatches  0 words on all ranks, in 0 calls of one" in done.stdout
    assert done.stdout.rstrip().endswith("PASSED")
    found = json.loads(file.read_text())
    assert found["well"]
    assert found["checked"] == [200, 200]
    assert found["command"].endswith("--transport peer")


def test_the_command_fails_if_a_word_is_wrong(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        "from lamport_numba import cli, ptx\n"
        "shipped = ptx.read\n"
        "store = 'st.global.v4.b32 [%to], {%w0, %w1, %w2, %w3};'\n"
        "ptx.read = lambda name: shipped(name).replace(store, store.replace('%w3', '%w2'))\n"
        "sys.exit(cli.main(['stress', '--calls', '20', '--sizes', '64', '--transport', 'peer']))\n"
    )
    done = mpirun.command([str(script)], 2, timeout=120, check=False)
    assert done.returncode == 1
    assert "first       on rank" in done.stdout
    assert "FAILED" in done.stdout


@pytest.mark.parametrize("words", [["--calls", "0"], ["--calls", "1.5M"], ["--sizes", "17"], ["--burst", "0"]])
def test_what_cannot_be_run_is_refused(words):
    done = mpirun.command(["-m", "lamport_numba", "stress", *words], 1, timeout=60, check=False)
    assert done.returncode == 2
    assert words[0] in done.stderr
