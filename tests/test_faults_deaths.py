"""A rank is killed or stopped, in set-up, between calls, in the middle of a graph: the others say who is missing."""

import os
import signal
import time

import numpy as np
import pytest
from helpers import deaths
from helpers.ranks import graph, new_stream, synchronise

from lamport_numba import LamportAllGather, device_array, to_device
from lamport_numba.errors import LamportError, PeerTimeout, RendezvousTimeout
from lamport_numba.symmetric import Communicator

DEADLINE = 1.5  # seconds, of the kernels and of each stage on the host
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


def die_at_stage(stage, folder, how):
    """Let this rank end when it comes to a stage of the set-up."""
    real = Communicator.all_gather

    def all_gather(self, data, name, timeout=None):
        if name == stage:
            deaths.die(folder, how)
        return real(self, data, name, timeout)

    Communicator.all_gather = all_gather


def survive(comm, folder, how, where, victim):
    dies = comm.rank == victim
    if where == "set-up" and dies:
        die_at_stage("map the peers' memory", folder, how)
    try:
        gather = LamportAllGather(comm, 1024, transport="peer", timeout=DEADLINE)
        x, y = to_device(np.full(4, comm.rank, np.float32)), device_array(4 * comm.size, np.float32)
        gather(x, out=y)
        synchronise()
        if where == "between calls":
            if dies:
                deaths.die(folder, how)
            gather(x, out=y)
            synchronise()
            gather.check()
        else:
            in_a_graph(gather, x, y, folder, how, dies)
    except LamportError as error:
        seconds = deaths.seconds_since(folder)
        try:
            if where != "set-up":
                gather.close()  # was told: for a moment it waits for the others, and does not raise
                gather.close()
        except LamportError as second:
            return {"second": repr(second)}
        return {
            "type": type(error).__name__,
            "text": str(error),
            "rank": error.rank,
            "missing": list(getattr(error, "missing", ())),
            "seconds": seconds,
            "closed": deaths.seconds_since(folder) - seconds,
        }
    return "nothing was raised"


def in_a_graph(gather, x, y, folder, how, dies):
    with new_stream() as stream:
        call = gather.prepare(x, y, stream)
        with graph(stream, lambda: [call() for _ in range(1000)]) as launch:
            launch()
            synchronise(stream)
            launch()
            if dies:
                (channel,) = gather._channels.values()
                while channel.calls() < 1200:
                    time.sleep(0.0005)
                deaths.die(folder, how)
            synchronise(stream)
            gather.check()


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
