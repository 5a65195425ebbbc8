"""The harness that runs tests under mpirun: results by rank, errors and output of every rank, nothing left behind."""

import os
import subprocess
import sys
import time

import pytest
from helpers import environment, mpirun


def square(comm, scale):
    return {"rank": comm.rank, "square": scale * comm.rank**2, "sum": comm.allreduce(comm.rank)}


def fail_on_one(comm, bad):
    print(f"word from rank {comm.rank}")
    if comm.rank == bad:
        raise ValueError(f"rank {bad} cannot")
    return comm.rank  # and then waits in MPI's finalisation for a rank that never comes


def fail_before_a_barrier(comm):
    assert comm.rank != 0, "never reaches the barrier"
    comm.Barrier()


def leave_without_a_word(comm):
    if comm.rank == 1:
        os._exit(7)
    comm.Barrier()


def sleep_for_ever(comm, mark):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", mark], start_new_session=True)
    print("asleep")
    time.sleep(1000)


def variables(comm, names):
    return [os.environ.get(name) for name in names]


def test_results_come_by_rank():
    assert mpirun.run(square, 3, scale=2) == [{"rank": r, "square": 2 * r * r, "sum": 3} for r in range(3)]


def test_a_failed_rank_is_named_with_everybody_s_output():
    with pytest.raises(mpirun.RanksFailed) as failed:
        mpirun.run(fail_on_one, 3, bad=1, timeout=40)
    text = str(failed.value)
    assert "rank 1: ValueError" in text
    assert "rank 1 cannot" in text
    assert all(f"word from rank {rank}" in text for rank in range(3))
    assert failed.value.results[0] == {"value": 0}


@pytest.mark.parametrize("function", [fail_before_a_barrier, leave_without_a_word])
def test_a_rank_that_misses_a_collective_does_not_hang_the_run(function):
    started = time.monotonic()
    with pytest.raises(mpirun.RanksFailed, match="no result"):
        mpirun.run(function, 2, timeout=16)
    assert time.monotonic() - started < 14, "the run ended by itself, not at its limit"


def test_a_run_past_its_limit_leaves_no_process():
    mark = f"mark-{os.getpid()}"
    with pytest.raises(mpirun.RanksFailed, match="limit of time") as failed:
        mpirun.run(sleep_for_ever, 2, timeout=5, mark=mark)
    assert "asleep" in str(failed.value)
    assert "in sleep_for_ever" in str(failed.value), "the stack of each rank is shown"
    listing = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in listing


def test_multicast_is_off_unless_asked_for():
    names = [*environment.OFF, "LAMPORT_NUMBA_DEVICE"]
    assert mpirun.run(variables, 2, names=names) == [["0", "1", "1", "emulated"]] * 2
    assert mpirun.run(variables, 2, names=names, multicast=True) == [[None, None, None, "emulated"]] * 2


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_multicast_is_never_allowed_on_a_gpu(device):
    with pytest.raises(ValueError, match="emulated only"):
        environment.of_ranks({environment.DEVICE: device}, multicast=True)
    cleared = dict.fromkeys(environment.OFF)
    env = environment.of_ranks({environment.DEVICE: device, **cleared})
    assert {name: env[name] for name in environment.OFF} == environment.OFF


def test_a_command_s_output_and_status():
    done = mpirun.command(["-c", "import sys; print('out'); sys.exit('err')"], 2, check=False)
    assert (done.stdout.count("out"), done.returncode != 0) == (2, True)  # two ranks may share a line
    assert "err" in done.stderr
    with pytest.raises(mpirun.RanksFailed, match="err"):
        mpirun.command(["-c", "import sys; sys.exit('err')"], None)
