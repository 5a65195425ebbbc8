"""The rendezvous: payloads of any size, votes that are the same everywhere, and deadlines that blame the right rank."""

import os
import time

import pytest

from lamport_numba import driver, run_ranks
from lamport_numba.errors import ClosedError, DriverError, MulticastUnavailable, RendezvousTimeout, SetupError
from lamport_numba.symmetric import communicator as module
from lamport_numba.symmetric.communicator import Communicator, _Exchange


def everywhere(n, program):
    """Run ``program(communicator)`` on every rank; return what each returned or raised."""

    def body(comm):
        try:
            communicator = Communicator(comm, timeout=10)
            return program(communicator)
        except Exception as error:
            return error

    return run_ranks(n, body, timeout=60)


def payload(rank, length):
    return bytes((rank * 37 + i * 11) % 251 for i in range(length))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_gather_of_any_size(n):
    lengths = [0, 1, 2031, 2032, 2033, 10000]

    def program(c):
        for length in lengths:
            assert c.all_gather(payload(c.rank, length + c.rank), "x") == [payload(r, length + r) for r in range(n)]
        c.barrier("y")
        assert c.agree("z", {"rank": c.rank}) == [{"rank": r} for r in range(n)]
        c.free()
        c.free()
        with pytest.raises(ClosedError):
            c.barrier("after")
        return "fine"

    assert everywhere(n, program) == ["fine"] * n


@pytest.mark.parametrize("failing", range(3))
def test_a_vote_raises_the_same_error_everywhere(failing):
    def program(c):
        c.vote("first")
        c.vote("create", DriverError("cuMemCreate", 2, rank=c.rank) if c.rank == failing else None)

    errors = everywhere(3, program)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert type(error) is SetupError
        assert (error.rank, error.step, error.call, error.code) == (failing, "create", "cuMemCreate", 2)
        assert str(error).startswith(f"rank {failing} failed at 'create': cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
    assert isinstance(errors[failing].__cause__, DriverError)


def test_a_vote_keeps_the_reason_and_counts_all_who_failed():
    def program(c):
        c.vote("bind", MulticastUnavailable("no slots", reason="slots") if c.rank else None)

    errors = everywhere(3, program)
    assert {(type(e), e.reason, e.rank) for e in errors} == {(MulticastUnavailable, "slots", 1)}
    assert str(errors[0]).endswith("(and so did rank 2)")


def test_the_object_goes_on_after_a_failed_vote():
    def program(c):
        with pytest.raises(SetupError):
            c.vote("first", ValueError("bad") if c.rank == 0 else None)
        return c.all_gather(payload(c.rank, 5), "second")

    assert everywhere(2, program) == [[payload(0, 5), payload(1, 5)]] * 2


def test_a_step_votes_on_what_its_block_did():
    def program(c):
        with c.step("first") as step:
            step.value = c.rank * 2
        assert step.values == [0, 2]
        with c.step("second"):
            if c.rank == 1:
                raise ValueError("bad")

    errors = everywhere(2, program)
    assert [str(error) for error in errors] == ["rank 1 failed at 'second': bad"] * 2


def test_the_missing_rank_is_named():
    def program(c):
        if c.rank == 2:
            return  # never comes
        c.barrier("map", timeout=0.3)

    errors = everywhere(4, program)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], RendezvousTimeout)
        assert (errors[rank].stage, errors[rank].missing) == ("map", (2,))
        assert "waited 0.3 s at 'map' for rank 2" in str(errors[rank])


def test_a_messenger_is_not_blamed():
    """Rank 1 never leaves stage a, for it waits for rank 2; rank 0 has passed a and waits for both in b."""

    def program(c):
        if c.rank == 2:
            # leaves a for rank 0 only: what a death between two sends looks like
            frame = next(iter(module._frames(c._stage, module.zlib.crc32(b"a"), b"")))
            c._comm.Isend(frame, dest=0, tag=module._TAG)
            return
        c.barrier("a", timeout=1.5)
        c.barrier("b", timeout=0.3)  # rank 0 is first to lose patience

    errors = everywhere(3, program)
    assert [error.missing for error in errors[:2]] == [(2,), (2,)]


def test_a_late_rank_hears_that_it_was_late():
    def program(c):
        if c.rank == 1:
            time.sleep(1.5)
        c.barrier("map", timeout=0.3)
        c.barrier("more", timeout=0.3)

    errors = everywhere(3, program)
    assert [error.missing for error in errors] == [(1,)] * 3
    assert "came after the deadline" in str(errors[1])


def test_where_all_are_alive_the_one_that_most_missed_is_late():
    def program(c):
        if c.rank != 1:
            c.barrier("map", timeout=0.3)
        else:  # it is there, but sends nothing
            c.wait(lambda: False, lambda: (0, 2, 3), "map", time.sleep)

    errors = everywhere(4, program)
    assert [error.missing for error in errors] == [(1,)] * 4
    assert "it came after the deadline" in str(errors[0])
    assert "this rank, 1, came after the deadline" in str(errors[1])


def test_the_constructor_has_a_deadline_too():
    def body(comm):
        if comm.rank == 1:
            return None
        with pytest.raises(RendezvousTimeout, match="duplicate the communicator") as caught:
            Communicator(comm, timeout=0.3)
        return caught.value.missing

    assert run_ranks(4, body) == [(1,), None, (1,), (1,)]


def test_a_rank_that_gives_up_releases_the_others():
    def program(c):
        if c.rank == 0:
            c.give_up("Ctrl-C")
            c.barrier("next")
        c.barrier("next", timeout=8)

    errors = everywhere(3, program)
    assert isinstance(errors[0], ClosedError)
    for error in errors[1:]:
        assert type(error) is SetupError
        assert str(error) == "rank 0 gave up: Ctrl-C"


def test_after_a_timeout_the_same_error_comes_again():
    def program(c):
        if c.rank == 0:
            with pytest.raises(RendezvousTimeout):
                c.barrier("a", timeout=0.1)
            c.barrier("b")

    assert everywhere(2, program)[0].stage == "a"


def test_ranks_at_different_stages_are_told():
    errors = everywhere(2, lambda c: c.barrier("left" if c.rank else "right", timeout=5))
    assert all(isinstance(error, SetupError) for error in errors)
    assert any("is at another stage" in str(error) for error in errors)


def test_the_ranks_of_a_host_are_counted(monkeypatch):
    hosts = ["alpha", "beta", "alpha", "alpha"]
    monkeypatch.setattr(module, "boot_id", lambda: hosts[driver._thread.rank])
    assert everywhere(4, lambda c: c.split_host()) == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_a_fork_is_refused():
    def program(c):
        c._pid -= 1  # what a child sees
        with pytest.raises(ClosedError, match="fork"):
            c.barrier("x")
        c.free()
        c._pid = os.getpid()
        c.barrier("y")

    everywhere(2, program)


@pytest.mark.parametrize("comm", [None, 3, "world"])
def test_something_else_is_a_type_error(comm):
    with pytest.raises(TypeError, match="expected an mpi4py communicator"):
        Communicator(comm)


def test_the_null_communicator_is_named():
    MPI = pytest.importorskip("mpi4py.MPI")
    freed = MPI.COMM_SELF.Dup()
    freed.Free()
    for comm in (MPI.COMM_NULL, freed):
        with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL"):
            Communicator(comm)


def test_the_application_s_messages_do_not_meet_ours():
    def body(comm):
        peer = 1 - comm.rank
        mine = bytearray(4)
        early = comm.Irecv(mine, source=peer, tag=32101)  # the tag that we use, on the caller's communicator
        c = Communicator(comm, timeout=5)
        assert c.all_gather(payload(c.rank, 9), "x") == [payload(0, 9), payload(1, 9)]
        assert not early.Test()
        comm.Barrier()
        comm.Isend(b"mine", dest=peer, tag=32101)
        assert early.Wait(timeout=5)
        return bytes(mine)

    assert run_ranks(2, body) == [b"mine"] * 2


def test_a_rank_that_leaves_after_a_stage_does_not_spoil_it(monkeypatch):
    advance = _Exchange.advance

    def slowly(exchange):
        done = advance(exchange)
        if done and exchange._comm.rank == 1:
            time.sleep(0.1)  # rank 0 leaves meanwhile
        return done

    def rank(comm):
        communicator = Communicator(comm, timeout=10)
        assert communicator.all_gather(b"word", "speak") == [b"word"] * 2
        if comm.rank == 0:
            communicator.give_up("it had enough")
        else:
            with pytest.raises(SetupError, match="rank 0 gave up"):
                communicator.barrier("go on")

    monkeypatch.setattr(_Exchange, "advance", slowly)
    run_ranks(2, rank, timeout=30)
