"""The scripts in benchmarks/: the mistakes still fit the kernel, and a session keeps what came of each step in time."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import mpirun

from lamport_numba import ptx
from lamport_numba.emulator.ptx import load

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


controls = script("negative_controls")
session = script("gpu_session")


@pytest.mark.parametrize("name", sorted(controls.MISTAKES))
def test_a_mistake_is_one_in_the_shipped_kernel_and_still_a_kernel(name):
    text = ptx.read(controls.FILE)
    wrong = controls.with_mistake(text, name)
    assert (wrong == text) == (name == "foreign")
    load(wrong)


def test_a_mistake_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected 1"):
        controls.with_mistake("nothing", "one-generation")


@pytest.mark.parametrize("name", sorted(controls.MISTAKES))
def test_the_adversary_finds_each_mistake_within_the_deadline(name):
    words = ["--calls", "500", "--graph", "--fabric", "adversarial", "--sizes", "16-1K", "--timeout", "2"]
    done = mpirun.command(["benchmarks/negative_controls.py", name, *words], 2, timeout=60, check=False)
    assert not done.timed_out
    assert done.returncode == 1
    assert re.search("CallMismatch|PeerTimeout|disagree|was missing|mismatches  [1-9]", done.stdout + done.stderr)


def test_the_adversary_finds_nothing_in_the_shipped_kernel():
    words = ["--calls", "500", "--graph", "--fabric", "adversarial", "--sizes", "16-1K"]
    mpirun.command(["-m", "lamport_numba", "stress", *words], 2, timeout=100)


@pytest.mark.parametrize("plan", sorted(session.PLANS))
def test_steps_have_names_of_their_own_and_commands_that_exist(plan):
    steps = session.PLANS[plan]
    assert len({step.name for step in steps}) == len(steps)
    assert all(not step.unless or any(step.unless == other.name for other in steps) for step in steps)
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_session.py", "--plan", plan, "--list"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(steps)


@pytest.mark.parametrize("plan", sorted(session.PLANS))
def test_a_session_without_a_gpu_is_refused_before_anything_is_made(plan, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_session.py", tmp_path / "out", "--plan", plan],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("no usable GPU: nothing was run\n")
    assert not (tmp_path / "out").exists()


def test_a_session_keeps_status_output_and_what_had_no_time(tmp_path):
    steps = [
        session.Step("well", 0, (sys.executable, "-c", "print('said')"), 30),
        session.Step("fails", 0, (sys.executable, "-c", "raise SystemExit(3)"), 30),
        session.Step("hangs", 0, (sys.executable, "-c", "import time; time.sleep(60)"), 1),
        session.Step("needless", 0, (sys.executable, "-c", "raise SystemExit(4)"), 30, unless="well"),
        session.Step("instead", 0, (sys.executable, "-c", "pass"), 30, unless="fails"),
        session.Step("may fail", 0, (sys.executable, "-c", "raise SystemExit(5)"), 30, failing=True),
    ]
    assert session.Session(tmp_path, 100, {}).run(steps) == 1
    found = json.loads((tmp_path / "session.json").read_text())
    assert {name: step["status"] for name, step in found.items()} == {
        "well": 0,
        "fails": 3,
        "hangs": 124,
        "instead": 0,
        "may fail": 5,
    }
    assert found["well"]["said"] == "said\n"
    assert session.Session(tmp_path, 10, {}).run(steps[:1]) == 1
    assert json.loads((tmp_path / "session.json").read_text())["well"]["skipped"] == "no time left"


def test_a_session_forbids_multicast_in_every_step(tmp_path):
    code = "import os; print([os.environ[n] for n in ('NCCL_NVLS_ENABLE', 'NVSHMEM_DISABLE_NVLS')])"
    step = session.Step("look", 0, (sys.executable, "-c", code), 30)
    assert session.Session(tmp_path, 100, {"NCCL_NVLS_ENABLE": "1"}).run([step]) == 0
    assert json.loads((tmp_path / "session.json").read_text())["look"]["said"] == "['0', '1']\n"


def test_results_of_a_session_become_files_of_their_own(tmp_path, monkeypatch):
    tables = script("tables")
    monkeypatch.setattr(tables, "DATA", tmp_path)
    file = tmp_path / "session.json"
    file.write_text(json.dumps({"bench-graph-2": {"status": 0, "result": {"bench": 1}}, "test-gpu": {"status": 0}}))
    assert tables.take(file, "mps") == [tmp_path / "mps-bench-graph-2.json"]
    assert json.loads((tmp_path / "mps-bench-graph-2.json").read_text()) == {"bench": 1}


def test_the_emulator_is_timed_and_its_outputs_are_checked(tmp_path):
    file = tmp_path / "speed.json"
    words = ["benchmarks/emulator_speed.py", "--sizes", "64", "--seconds", "0.1", "--json", str(file)]
    mpirun.command(words, 2, timeout=60)
    found = json.loads(file.read_text())
    assert found["command"].startswith("python benchmarks/emulator_speed.py")
    assert found["rows"][0]["gathers_a_second"] > 0
