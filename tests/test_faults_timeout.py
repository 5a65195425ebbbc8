"""A peer that is missing: every rank raises the same root cause, in time, and reset makes a new start."""

import time
from functools import partial

import numpy as np
import pytest
from helpers import mpirun
from helpers.ranks import graph, new_stream, synchronise

from lamport_numba import LamportAllGather, TaggedAllGather, device_array, emulator, run_ranks, to_device
from lamport_numba.errors import ClosedError, LamportError, PeerLeft, PeerTimeout, SetupError

KINDS = [(LamportAllGather, "peer"), (LamportAllGather, "multicast"), (TaggedAllGather, "peer")]
kinds = pytest.mark.parametrize(("kind", "transport"), KINDS, ids=lambda value: getattr(value, "__name__", value))


def part(rank, packs=1, call=0):
    return (np.arange(4 * packs) + 1000 * rank + 100_000 * call).astype(np.float32)


def gathers_well(gather, call=0):
    """One call, checked."""
    out = gather(to_device(part(gather.rank, 2, call)))
    synchronise()
    gather.check()
    expected = np.concatenate([part(rank, 2, call) for rank in range(gather.world_size)])
    np.testing.assert_array_equal(out.copy_to_host(), expected)


def raised(gather):
    """What check raises once this rank's calls are over; it waits for a report of another rank."""
    synchronise()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            gather.check()
        except LamportError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was reported")


def told(errors, *, rank, call):
    """All ranks raised the same PeerTimeout."""
    assert {type(error) for error in errors} == {PeerTimeout}, errors
    assert {(error.rank, error.call) for error in errors} == {(rank, call)}, [str(error) for error in errors]
    assert len({str(error) for error in errors}) == 1
    assert f"rank {rank} was missing in call {call}: nothing came from it for" in str(errors[0])
    return errors[0]


@kinds
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_raise_the_same_timeout(kind, transport, world):
    def rank(comm):
        gather = kind(comm, 64, transport=transport, timeout=0.5)
        for call in range(3):
            gathers_well(gather, call)
        if comm.rank != 1:
            gather(to_device(part(comm.rank)))
        error = raised(gather)
        with pytest.raises(PeerTimeout) as again:  # also at the next call
            gather(to_device(part(comm.rank)))
        assert str(again.value) == str(error)
        assert again.value is not error
        gather.close()  # has been told
        gather.close()
        return error

    error = told(run_ranks(world, rank, timeout=60), rank=1, call=3)
    assert 0.5 <= error.seconds < 1.5


def test_a_rank_that_was_never_told_hears_it_at_close():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=0.4)
        gathers_well(gather)
        if comm.rank == 0:
            gather(to_device(part(0)))
            synchronise()  # rank 1 comes to close only then
        comm.Barrier()
        with pytest.raises(PeerTimeout) as caught:
            gather.close()
        return caught.value

    told(run_ranks(2, rank, timeout=60), rank=1, call=1)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_root_cause_is_named_and_not_the_messenger(late):
    """Calls in a graph, so that the ranks that wait stand in different calls; one rank has fewer of them."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=0.6)
        with new_stream() as stream:
            out = device_array(4 * comm.size, np.float32)
            call = gather.prepare(to_device(part(comm.rank)), out, stream)
            with graph(stream, lambda: [call() for _ in range(5 if comm.rank == late else 12)]) as launch:
                launch()
                synchronise(stream)
                error = raised(gather)
            gather.close()
        return error

    told(run_ranks(4, rank, timeout=60), rank=late, call=5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transport", ["peer", "multicast"])
def test_the_root_cause_with_late_words(transport, seed):
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport=transport, timeout=0.5)
        for _ in range(2 if comm.rank == 2 else 4):
            try:
                gather(to_device(part(comm.rank)))
            except PeerTimeout:
                break
        comm.Barrier()
        synchronise()
        comm.Barrier()
        with pytest.raises(PeerTimeout) as caught:
            gather.check()
        gather.close()
        return caught.value

    told(run_ranks(3, rank, fabric="adversarial", seed=seed, timeout=120), rank=2, call=2)


# Reset


@kinds
def test_rounds_of_timeout_reset_and_success(kind, transport):
    rounds = 50 if transport == "peer" and kind is LamportAllGather else 8

    def rank(comm):
        with kind(comm, 64, transport=transport, timeout=0.1) as gather:
            gathered = 0
            for turn in range(rounds):
                if comm.rank == turn % comm.size:
                    comm.Barrier()
                else:
                    gather(to_device(part(comm.rank)))
                    synchronise()
                    comm.Barrier()
                with pytest.raises(PeerTimeout, match=f"rank {turn % comm.size} was missing"):
                    gather.check()
                gather.reset()
                while True:  # a machine that is busy may take longer than this deadline
                    try:
                        gathers_well(gather, turn)
                    except PeerTimeout:
                        well = False
                    else:
                        well = True
                    if all(comm.allgather(well)):
                        break
                    gather.reset()
                gathered += 1
                comm.Barrier()
            return gathered

    assert run_ranks(2, rank, timeout=150) == [rounds] * 2


@pytest.mark.parametrize("seed", range(3))
def test_reset_while_words_are_late(seed):
    """What an earlier mailbox was sent never comes to the new one."""

    def rank(comm):
        with LamportAllGather(comm, 64, transport="multicast", timeout=1.0) as gather:
            for turn in range(4):
                if comm.rank:
                    gather(to_device(part(comm.rank, 3, turn)))
                gather.reset()
                for call in range(3):
                    gathers_well(gather, call)
                gather.reset()

    run_ranks(3, rank, fabric="adversarial", seed=seed, timeout=120)


def test_what_was_prepared_before_a_reset_is_refused():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=20) as gather:
            x, y = to_device(part(comm.rank)), device_array(4 * comm.size, np.float32)
            call = gather.prepare(x, y)
            call()
            gather(x, out=y)
            synchronise()
            gather.reset()
            gather(x, out=y)
            with pytest.raises(ClosedError, match="prepared before the reset; prepare it anew"):
                call()
            gather.prepare(x, y)()
            synchronise()
            gather.check()

    run_ranks(2, rank, timeout=60)


@pytest.mark.parametrize("way", ["prepared", "remembered"])
def test_a_graph_of_before_a_reset_leaves_at_once_and_is_told_of(way):
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=30) as gather, new_stream() as stream:
            x, out = to_device(part(comm.rank)), device_array(4 * comm.size, np.float32)
            if way == "prepared":
                call = gather.prepare(x, out, stream)
            else:
                gather(x, out, stream=stream)
                call = partial(gather, x, out, stream=stream)
            with graph(stream, call) as launch:
                launch()
                synchronise(stream)
                gather.reset()
                gathers_well(gather)
                launch()
                synchronise(stream)
                with pytest.raises(LamportError, match="before the reset was launched, by a graph perhaps"):
                    gather.check()
                gather.reset()
                gathers_well(gather)

    run_ranks(2, rank, timeout=60)


def test_a_reset_that_failed_can_be_tried_again():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=20) as gather:
            gathers_well(gather)
            if comm.rank == 0:
                emulator.inject("cuMemCreate", code=2, rank=1, times=1)
            comm.Barrier()
            with pytest.raises(SetupError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
                gather.reset()
            with pytest.raises(ClosedError, match=r"its reset did not complete; call reset\(\) again"):
                gathers_well(gather)
            gather.reset()
            gathers_well(gather)

    before = emulator.leaks()
    run_ranks(2, rank, timeout=60)
    assert emulator.leaks() == before


def test_a_reset_without_a_reason_is_a_new_start_too():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=20) as gather:
            for turn in range(5):
                gathers_well(gather, turn)
                gather.reset()

    run_ranks(3, rank, timeout=60)


# One rank leaves


@kinds
def test_an_exception_on_one_rank_is_told_to_the_others_at_once(kind, transport):
    def rank(comm):
        with kind(comm, 64, transport=transport, timeout=60) as gather:
            gathers_well(gather)
            comm.Barrier()
            if comm.rank == 1:
                raise KeyError("application")
            gather(to_device(part(comm.rank)))
            synchronise()
            gather.check()
            raise AssertionError("not reached")

    def caught(comm):
        with pytest.raises((KeyError, LamportError)) as found:
            rank(comm)
        return found.value

    errors = run_ranks(3, caught, timeout=40)
    assert isinstance(errors[1], KeyError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLeft)
        assert isinstance(error, PeerTimeout)
        assert (error.rank, error.call) == (1, 1)
        assert "rank 1 left before call 1" in str(error)


def late(comm, kind):
    """Rank 1 calls when the others have failed and their processes have ended, which takes their memory from the
    multicast object.
    """
    gather = kind(comm, 64, transport="multicast", timeout=0.5)
    gathers_well(gather)
    (channel,) = gather._channels.values()
    comm.Barrier()
    if comm.rank == 1:
        comm.Barrier()
        gather(to_device(part(1)))
        error = raised(gather)
        gather.abandon()
    else:
        gather(to_device(part(comm.rank)))
        error = raised(gather)
        gather.abandon()
        channel.memory.abandon()
        comm.Barrier()
    return error


SENDS_AT_ONCE = "    @%raised bra ALARMED;                       // a rank may have left: nothing is sent any more\n"


@pytest.mark.parametrize("kind", [LamportAllGather, TaggedAllGather])
def test_a_late_rank_sends_nothing_to_a_multicast_object_that_others_have_left(kind):
    told(run_ranks(3, lambda comm: late(comm, kind), timeout=40), rank=1, call=1)


@pytest.mark.parametrize(("kind", "file"), [("LamportAllGather", "lamport"), ("TaggedAllGather", "tagged")])
def test_control_a_late_rank_that_sends_all_the_same_is_a_fault(kind, file):
    code = f"""
import test_faults_timeout as t
from helpers.patches import edited
with edited({{"{file}_multicast.ptx": [(t.SENDS_AT_ONCE, "", 1)]}}):
    t.run_ranks(3, lambda comm: t.late(comm, t.{kind}), timeout=30)
"""
    done = mpirun.command(["-c", code], None, multicast=True, check=False)
    assert "that is a multicast mapping: at offset" in done.stderr
    assert done.returncode != 0


def test_a_rank_that_left_is_named_by_the_others_close():
    before = emulator.leaks()

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=60)
        gathers_well(gather)
        comm.Barrier()
        if comm.rank == 2:
            gather.abandon()
            gather.abandon()
            gather.close()
            return None
        with pytest.raises(LamportError) as caught:
            gather.close()
        return str(caught.value)

    said = run_ranks(3, rank, timeout=40)
    assert all("rank 2 left before call 1" in text for text in said[:2])
    assert emulator.leaks() == before
