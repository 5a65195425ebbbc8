"""run_ranks and its communicator: what mpi4py's programs expect, errors that name the rank, and replayable draws."""

import threading
import time

import numpy as np
import pytest

from lamport_numba import LamportAllGather, to_device
from lamport_numba.emulator.baton import Baton, HostDeadlock
from lamport_numba.emulator.ranks import RankAborted, RanksTimeout, _run, run_ranks


@pytest.mark.parametrize("n", [1, 2, 5, 72])
def test_results_come_in_rank_order(n):
    assert run_ranks(n, lambda comm: (comm.rank, comm.Get_rank(), comm.size, comm.Get_size())) == [
        (rank, rank, n, n) for rank in range(n)
    ]


def test_no_ranks_is_a_value_error():
    with pytest.raises(ValueError, match="n is 0"):
        run_ranks(0, lambda comm: None)


@pytest.mark.parametrize("n", [2.5, "4", True, None])
def test_a_number_of_ranks_that_is_no_integer_is_a_type_error(n):
    with pytest.raises(TypeError, match=r"n is .*; expected the number of ranks"):
        run_ranks(n, lambda comm: None)


def test_what_cannot_be_called_is_a_type_error():
    with pytest.raises(TypeError, match="fn is None; expected a function of one argument"):
        run_ranks(2, None)


def test_collectives_of_objects():
    def program(comm):
        assert comm.allgather([comm.rank]) == [[rank] for rank in range(comm.size)]
        assert comm.bcast({"from": comm.rank}, root=2) == {"from": 2}
        assert comm.gather(comm.rank, root=1) == ([0, 1, 2] if comm.rank == 1 else None)
        assert comm.allreduce(comm.rank + 1) == 6
        assert comm.allreduce(comm.rank, op=max) == 2
        comm.Barrier()

    run_ranks(3, program)


def test_objects_are_copies():
    shared = run_ranks(2, lambda comm: comm.bcast([1], root=0))
    assert shared[0] is not shared[1]


def test_collectives_of_buffers():
    def program(comm):
        mine = np.arange(4, dtype=np.float32) + 10 * comm.rank
        everything = np.empty((comm.size, 4), np.float32)
        comm.Allgather(mine, everything)
        assert [row[0] for row in everything] == [0.0, 10.0, 20.0]
        request = comm.Iallgather([mine, "f"], [everything, "f"])
        mine[:] = -1  # copied when it was entered
        assert request.Wait()
        assert everything[2, 3] == 23.0
        word = np.full(1, comm.rank, np.int64)
        comm.Bcast(word, root=1)
        assert word[0] == 1
        return everything.tobytes()

    assert len(set(run_ranks(3, program))) == 1


def test_messages_keep_their_order_and_match_by_tag():
    def program(comm):
        peer = 1 - comm.rank
        for text in (b"one", b"two"):
            comm.Isend(text, dest=peer, tag=7)
        comm.Isend(b"other", dest=peer, tag=8)
        got = [bytearray(5) for _ in range(3)]
        requests = [comm.Irecv(got[0], source=peer, tag=8)]
        requests += [comm.Irecv(buf, source=peer, tag=7) for buf in got[1:]]
        for request in requests:
            assert request.Wait(timeout=5)
        assert [bytes(buf).rstrip(b"\0") for buf in got] == [b"other", b"one", b"two"]
        assert not comm.Iprobe(source=peer, tag=7)

    run_ranks(2, program)


def test_a_cancelled_receive_takes_nothing():
    def program(comm):
        if comm.rank == 0:
            dead, live = bytearray(1), bytearray(1)
            comm.Irecv(dead, source=1).Cancel()
            request = comm.Irecv(live, source=1)
            comm.Barrier()
            request.Wait()
            return bytes(dead + live)
        comm.Barrier()
        comm.Isend(b"x", dest=0)
        return b"\0x"

    assert set(run_ranks(2, program)) == {b"\0x"}


def test_a_truncated_message_is_an_error_of_the_receiver():
    def program(comm):
        if comm.rank == 1:
            comm.Isend(b"long", dest=0)
        else:
            comm.Irecv(bytearray(2), source=1).Wait()

    with pytest.raises(ValueError, match="truncated: 4 bytes") as caught:
        run_ranks(2, program)
    assert caught.value.raised_on_rank == 0


def test_duplicates_do_not_share_messages():
    def program(comm):
        twin, request = comm.Idup()
        while not request.Test():
            comm.pause(0.01)
        peer = 1 - comm.rank
        twin.Isend(b"t", dest=peer)
        comm.Isend(b"c", dest=peer)
        c, t = bytearray(1), bytearray(1)
        comm.Irecv(c, source=peer).Wait()
        twin.Irecv(t, source=peer).Wait()
        assert (c, t) == (b"c", b"t")
        assert twin.rank == comm.rank
        twin.Free()
        with pytest.raises(RuntimeError, match="freed"):
            twin.Barrier()

    run_ranks(2, program)


def test_split_by_colour_and_key():
    def program(comm):
        part = comm.Split(color=comm.rank % 2, key=-comm.rank)
        assert comm.Split(color=-1) is None
        host = comm.Split_type()
        return part.allgather(comm.rank), host.size

    assert run_ranks(5, program) == [([4, 2, 0], 5), ([3, 1], 5)] * 2 + [([4, 2, 0], 5)]


def test_an_error_releases_the_others_and_names_its_rank():
    seen = []

    def program(comm):
        if comm.rank == 2:
            raise KeyError("gone")
        try:
            comm.Barrier()
        except RankAborted as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="gone") as caught:
        run_ranks(3, program)
    assert caught.value.raised_on_rank == 2
    assert len(seen) == 2
    assert all("rank 2 raised KeyError" in text for text in seen)


def test_the_limit_of_time_names_who_runs_and_where():
    stop = threading.Event()

    def program(comm):
        if comm.rank == 1:
            stop.wait(30)
        else:
            comm.Barrier()

    threading.Timer(1.0, stop.set).start()
    with pytest.raises(RanksTimeout, match="ranks 0, 1 still ran") as caught:
        run_ranks(2, program, timeout=0.3)
    assert caught.value.ranks == (0, 1)
    assert "stop.wait" in str(caught.value)


def test_ranks_that_disagree_about_a_collective_are_told():
    def program(comm):
        if comm.rank == 0:
            comm.Barrier()
        else:
            comm.allgather(1)

    with pytest.raises(RuntimeError, match="disagree about collective 0"):
        run_ranks(2, program)


class _Session:
    def __init__(self, baton):
        self.baton = baton

    def abort(self, why):
        pass


def _story(seed):
    """The order in which five ranks get their turns, with devices that have some work."""
    work = [40]

    def step():
        work[0] -= 1
        story.append("d")
        return work[0] > 0

    story = []

    def program(comm):
        for turn in range(4):
            story.append(f"{comm.rank}{turn}")
            if turn == 1:
                comm.Barrier()
            else:
                comm.pause(0.01 * comm.rank)
        return comm.clock()

    _run(5, program, _Session(Baton(seed, 5, step)), 30)
    return story


def test_a_seed_replays_the_order_of_the_threads():
    stories = [_story(seed) for seed in range(8)]
    assert stories == [_story(seed) for seed in range(8)]
    assert len({tuple(story) for story in stories}) > 4  # or the seed does nothing


def test_only_one_thread_runs_under_a_baton():
    inside = []

    def program(comm):
        for _ in range(20):
            inside.append(1)
            time.sleep(0.0005)  # a second thread would enter here
            assert len(inside) == 1
            inside.pop()
            comm.pause(0)

    _run(3, program, _Session(Baton(1, 3)), 30)


def test_an_error_under_a_baton_releases_the_others():
    def program(comm):
        comm.pause(0.01 * comm.rank)
        if comm.rank == 1:
            raise KeyError("gone")
        comm.Barrier()

    with pytest.raises(KeyError, match="gone") as caught:
        _run(3, program, _Session(Baton(5, 3)), 30)
    assert caught.value.raised_on_rank == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]


def test_virtual_time_jumps_to_the_next_deadline():
    def program(comm):
        comm.pause(1000.0 * (comm.rank + 1))
        return comm.clock()

    assert _run(2, program, _Session(Baton(3, 2)), 30) == [1000.0, 2000.0]


def test_a_deadlock_of_the_hosts_is_seen_at_once():
    def program(comm):
        if comm.rank == 0:
            comm.Barrier()

    with pytest.raises(HostDeadlock, match="1 ranks that still run"):
        _run(2, program, _Session(Baton(3, 2)), 30)


def test_after_a_rank_has_failed_the_devices_work_again():
    kept = []  # so that no finaliser tells the other rank

    def spins_or_raises(comm):
        gather = LamportAllGather(comm, 64, timeout=300)
        kept.append(gather)
        if comm.Get_rank() == 1:
            time.sleep(0.3)
            raise ArithmeticError("before its call")
        gather(to_device(np.ones(4, np.float32))).copy_to_host()

    def gathers(comm):
        with LamportAllGather(comm, 64, timeout=60) as gather:
            return gather(to_device(np.full(4, comm.Get_rank(), np.float32))).copy_to_host().tolist()

    with pytest.raises(ArithmeticError):
        run_ranks(2, spins_or_raises)
    assert run_ranks(2, gathers) == [[0.0] * 4 + [1.0] * 4] * 2
