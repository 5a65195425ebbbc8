"""A rank is killed or stopped, in set-up, between calls, in the middle of a graph: the others say who is missing."""

import importlib.util
import os
import signal
import sys
import time
from unittest.mock import patch

import numpy as np
import pytest
from helpers import deaths, mpirun
from helpers.faults import DEADLINE, disagree, refuse_in_a_graph, survive, time_out
from helpers.ranks import synchronise

from lamport_numba import LamportAllGather, to_device
from lamport_numba.errors import PeerTimeout, RendezvousTimeout

GPU_SUITE = mpirun.TESTS / "gpu" / "faults.py"
LONGEST = 20.0  # until a survivor has raised: the machine of a test may be busy
MATRIX = [
    (how, where, ranks)
    for how in (signal.SIGKILL, signal.SIGSTOP)
    for where in ("set-up", "between calls", "in a graph")
    for ranks in (2, 4)
]
SOME = {
    (signal.SIGKILL, "set-up", 2),
    (signal.SIGKILL, "in a graph", 4),
    (signal.SIGSTOP, "between calls", 4),
    (signal.SIGSTOP, "in a graph", 2),
}


def check(how, where, ranks, longest):
    victim = ranks - 1
    env = {"LAMPORT_NUMBA_SETUP_TIMEOUT": str(DEADLINE)}
    found = deaths.run(survive, ranks, victims=(victim,), timeout=90, env=env, how=int(how), where=where, victim=victim)
    values = [one["value"] for one in found if one is not None]
    assert len(values) == ranks - 1
    for value in values:
        if where == "set-up":
            assert value["type"] == RendezvousTimeout.__name__, value
            assert value["missing"] == [victim]
        else:
            assert value["type"] == PeerTimeout.__name__, value
            assert value["rank"] == victim
        assert DEADLINE * 0.5 < value["seconds"] < longest, value
    assert len({value["text"] for value in values}) == 1, values


@pytest.mark.parametrize(("how", "where", "ranks"), sorted(SOME))
def test_the_others_name_a_rank_that_died(how, where, ranks):
    check(how, where, ranks, LONGEST)


@pytest.mark.faults_matrix
@pytest.mark.parametrize(("how", "where", "ranks"), [case for case in MATRIX if case not in SOME])
def test_the_others_name_a_rank_that_died_anywhere(how, where, ranks):
    check(how, where, ranks, LONGEST)


# A stopped rank that goes on


def stopped_for_a_while(comm, folder, seconds):
    """Rank 1 stops before the reset, with a call of its own queued, and goes on afterwards."""
    with LamportAllGather(comm, 256, transport="peer", timeout=0.5) as gather:
        x = to_device(np.full(4, comm.rank, np.float32))
        if comm.rank == 0:
            gather(x)
            synchronise()
        comm.Barrier()
        if comm.rank == 1:
            gather(x)  # its mailboxes are given up already
            pid = os.getpid()
            if os.fork() == 0:
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
        else:
            with pytest.raises(PeerTimeout):
                gather.check()
        gather.reset()
        for turn in range(20):
            y = gather(to_device(np.full(4, 10 * turn + comm.rank, np.float32)))
            synchronise()
            gather.check()
            assert y.copy_to_host().tolist() == [10 * turn] * 4 + [10 * turn + 1] * 4
        gather.reset()
        gather(x)
    return True


def test_a_rank_that_was_stopped_before_a_reset_and_goes_on_after_it():
    found = deaths.run(stopped_for_a_while, 2, timeout=60, seconds=1.0)
    assert found == [{"value": True}] * 2


def stopped_for_too_long(comm, folder):
    gather = LamportAllGather(comm, 256, transport="peer", timeout=0.5)
    comm.Barrier()
    if comm.rank == 1:
        gather(to_device(np.zeros(4, np.float32)))
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(4)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
    try:
        gather.reset()
    except RendezvousTimeout as error:
        gather.close()
        time.sleep(5)  # the memory of both is there for the kernels of the other
        return list(error.missing)
    return "no error"


def test_a_rank_that_was_stopped_for_too_long_finds_that_the_others_have_left():
    env = {"LAMPORT_NUMBA_SETUP_TIMEOUT": "1.5"}
    found = deaths.run(stopped_for_too_long, 2, timeout=60, env=env)
    assert found == [{"value": [1]}] * 2


# What the GPU suite runs too


@pytest.mark.parametrize(
    ("function", "kind"),
    [(disagree, "CallMismatch"), (refuse_in_a_graph, "CallMismatch"), (time_out, "PeerTimeout")],
)
def test_the_faults_of_the_gpu_suite(function, kind):
    found = mpirun.run(function, 3)
    assert found == [found[0]] * 3
    assert found[0]["type"] == kind


@pytest.mark.parametrize(
    ("said", "well"),
    [
        ({"type": "PeerTimeout", "rank": 3}, True),
        ({"type": "DriverError", "message": "cuStreamSynchronize failed"}, True),
        ({"type": "PeerTimeout", "rank": 1}, False),
        ({"type": "FileNotFoundError", "message": "nvidia-smi"}, False),
        ("nothing was raised", False),
        (None, False),
    ],
)
def test_what_a_survivor_on_a_gpu_may_say(said, well):
    spec = importlib.util.spec_from_file_location("gpu_faults", GPU_SUITE)
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(module)
    assert module.is_well(said, 3) == well


def test_the_gpu_suite_of_faults_refuses_where_there_is_no_gpu():
    done = mpirun.command([str(GPU_SUITE)], None, env={"CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith("no usable GPU: nothing was run\n")
    assert '"well": true' not in done.stdout
