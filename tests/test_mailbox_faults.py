"""What goes wrong with a mailbox's memory: ranks that leave, garbage, layouts that differ, a launch without its epoch.

Runs on GPUs too, but for what chooses its fabric.
"""

import gc
import os
import warnings
import weakref
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
from helpers import mpirun, ranks

import lamport_numba
from lamport_numba.collectives.ends import sweep
from lamport_numba.errors import DriverError, LamportError, MailboxTimeout, PeerLeft
from lamport_numba.mailbox import Mailbox, MailboxLayout, MailboxMemory, int_of, kernel, preg
from lamport_numba.mailbox.holdings import MailboxHoldings

LONG = 600.0  # seconds: a test that ends has not waited for this deadline


@lru_cache
def exchanging(world, stride, bounded=True):
    """Each rank puts a value to all ranks and polls all of them, with or without the deadline and its alarm."""

    @kernel
    def exchange(out, rank, value, scratch, peers, epoch, control):
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control) if bounded else Mailbox(tag)
        for peer in range(world):
            mailbox.put(preg(peers[peer], parity * stride, "inbox"), rank, np.int32(value + rank))
        words = mailbox.poll_each(preg(peers[rank], parity * stride, "inbox"), 0, 1, world, 1)
        for source in range(world):
            out[source] = int_of(words[source][0])

    return exchange


class Party:
    """One rank's memory, compiled kernel and output; all ranks have them when it is built."""

    def __init__(self, comm, *, timeout=LONG, bounded=True):
        self.rank, self.world = comm.Get_rank(), comm.Get_size()
        layout = MailboxLayout(peer={"inbox": self.world})
        self.memory = MailboxMemory(comm, layout, timeout=timeout)
        self.out = lamport_numba.to_device(np.zeros(self.world, np.int32))
        self.kernel = exchanging(self.world, layout.stride, bounded)
        self.kernel.load(self.out, self.rank, 0, *self.memory.arguments)
        comm.Barrier()

    def launch(self, stream=0, *, value=0, advance=True):
        if advance:
            self.memory.epoch.advance(stream)
        self.kernel[1, 1, stream](self.out, self.rank, value, *self.memory.arguments)


def said(error):
    return [type(error).__name__, str(error)]


# A rank that leaves alone


def run_leaving(comm, own_stream):
    """Rank 0's kernel waits for rank 1 when an exception leaves the block; the others close."""
    party = Party(comm)
    with ranks.new_stream() if own_stream else nullcontext(0) as stream:
        try:
            with party.memory:
                if party.rank == 0:
                    party.launch(stream)
                    raise KeyError("mine")
        except (KeyError, LamportError) as error:
            found = said(error)
        ranks.synchronise(stream)  # a fault would show here
    held = party.memory._holdings.anything()
    party.memory.close()  # nothing is left to do
    with MailboxMemory(comm, party.memory.layout, timeout=LONG):
        pass
    return [*found, held]


@pytest.mark.parametrize("own_stream", [False, True])
def test_an_exception_leaves_while_the_own_kernel_waits(own_stream):
    """The own alarm ends the kernel, then the memory goes; the others hear who left and why, and give theirs back."""
    first, *others = ranks.each(run_leaving, 3, own_stream=own_stream)
    assert first == ["KeyError", "'mine'", False]
    text = "rank 0 left: it left its mailbox memory while an exception was passing: KeyError: 'mine'"
    assert others == [["PeerLeft", text, False]] * 2


def run_freed_at_once(comm):
    MailboxHoldings.silence = lambda self: None
    MailboxHoldings.streams_rest = lambda self: True
    party = Party(comm, timeout=5.0)
    if party.rank == 0:
        party.launch()
        party.memory.abandon()
    try:
        ranks.synchronise()
    except DriverError as error:
        return error.code
    return 0


@pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="under MPS a fault ends the other clients too")
def test_control_a_mailbox_freed_under_its_kernel_is_a_fault():
    """In processes of their own, because a fault costs the context."""
    assert mpirun.run(run_freed_at_once, 2)[0] == 700


def run_deaf(comm):
    """Rank 0's kernel looks at no alarm; rank 1 puts what it waits for only after rank 0 has left."""
    party = Party(comm, bounded=False)
    holdings = party.memory._holdings
    if party.rank == 0:
        party.launch()
        party.memory.abandon()
    kept = holdings.anything()
    comm.Barrier()
    if party.rank == 1:
        party.launch()
    ranks.synchronise()
    comm.Barrier()
    if party.rank == 1:
        with pytest.raises(PeerLeft):
            party.memory.close()
    sweep()
    return [kept, holdings.anything(), party.out.copy_to_host().tolist()]


def test_memory_under_a_kernel_that_does_not_leave_is_kept_until_it_is_over():
    assert ranks.each(run_deaf, 2) == [[True, False, [0, 1]]] * 2


def run_captured(comm):
    party = Party(comm)
    with ranks.new_stream() as stream, ranks.graph(stream, lambda: party.launch(stream)) as replay:
        party.memory.abandon()
        replay()  # the old alarm ends it, in memory that is still there
        ranks.synchronise(stream)
    return party.memory._holdings.anything()


@pytest.mark.skipif(ranks.on_gpu(), reason="the graph's kernel looks at the alarm of a rank that left")
def test_memory_that_a_graph_may_use_is_kept():
    assert ranks.each(run_captured, 2) == [True] * 2


def run_garbage(comm):
    party = Party(comm)
    if party.rank == 0:
        party.launch()
    gone, holdings = weakref.ref(party.memory), party.memory._holdings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        party.memory = None
        while gone() is not None:
            gc.collect()
    comm.Barrier()
    ranks.synchronise()
    sweep()
    return holdings.anything()


def test_garbage_whose_kernel_waits():
    assert ranks.each(run_garbage, 2) == [False, False]


def test_garbage_warns():
    memory = MailboxMemory(None, MailboxLayout(scratch={"s": 1}))
    with pytest.warns(ResourceWarning, match="unclosed MailboxMemory of rank 0"):
        del memory


@pytest.mark.parametrize("waits", [False, True])
def test_exit_without_close_is_quiet(waits, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "from test_mailbox_faults import Party\n"
        "party = Party(MPI.COMM_WORLD)\n"
        f"if {waits} and party.rank == 0:\n"
        "    party.launch()\n"
        "MPI.COMM_WORLD.Barrier()\n"
    )
    done = mpirun.command([str(program)], 2, env={"LAMPORT_NUMBA_SHARE_DEVICE": "1"})
    assert done.stderr == ""


def run_lost(comm):
    """An error that costs the context is the one that is raised."""
    party = Party(comm)
    party.memory.peers.copy_to_device(np.full(party.world, 1 << 40, np.uint64))
    party.launch()
    with pytest.raises(DriverError) as found, party.memory:
        party.out.copy_to_host()
    return found.value.call


@pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="under MPS a fault ends the other clients too")
def test_a_lost_context_hides_no_error():
    assert all(call.startswith(("cuMemcpyDtoH", "cuStreamSynchronize")) for call in mpirun.run(run_lost, 2))


# Ranks that differ


def construct(comm, layouts, timeouts=(LONG, LONG)):
    rank = comm.Get_rank()
    try:
        MailboxMemory(comm, MailboxLayout(**layouts[rank]), timeout=timeouts[rank]).close()
    except (LamportError, ValueError) as error:
        return said(error)
    return None


DIFFERENT = [
    ({"peer": {"a": 2, "b": 16}}, {"peer": {"b": 16, "a": 2}}),  # order
    ({"peer": {"a": 2}}, {"peer": {"b": 2}}),  # names
    ({"peer": {"a": 2}}, {"peer": {"a": 3}}),  # pairs, in one line of memory
    ({"peer": {"a": 2}}, {"scratch": {"a": 2}}),  # spaces
    ({"scratch": {"a": 2}}, {"scratch": {"a": 3}}),
]


@pytest.mark.parametrize("layouts", DIFFERENT)
def test_layouts_that_differ(layouts):
    found = ranks.each(construct, 2, layouts=layouts)
    assert found[0] == found[1]
    kind, text = found[0]
    assert kind == "SetupError"
    for rank, layout in enumerate(layouts):
        assert f"rank {rank}: {MailboxLayout(**layout)!r}" in text
    assert "the same names, in the same order" in text
    assert ranks.each(construct, 2, layouts=[layouts[0]] * 2) == [None, None]


def test_an_argument_of_one_rank():
    layout = {"peer": {"a": 2}}
    mine, theirs = ranks.each(construct, 2, layouts=[layout] * 2, timeouts=[-1.0, LONG])
    assert mine == ["ValueError", "rank 0: timeout is -1.0: a positive number of seconds is needed"]
    assert theirs[0] == "SetupError"
    assert "rank 0 failed at 'check the arguments': timeout is -1.0" in theirs[1]


# A launch without its epoch


def run_unadvanced(comm, forgets):
    """What each rank hears when the first launch of some is not preceded by epoch.advance."""
    party = Party(comm, timeout=LONG if len(forgets) == comm.Get_size() else 0.5)
    party.launch(advance=party.rank not in forgets, value=7)
    ranks.synchronise()
    comm.Barrier()
    try:
        party.memory.check()
    except MailboxTimeout as error:
        return [error.expected, error.seen, str(error)]
    finally:
        party.memory.close()
    return None


def test_a_first_launch_without_advance_matches_nothing():
    """On all ranks: neither zeroed memory nor what the others put counts, and no deadline is waited for."""
    for rank, (expected, seen, text) in enumerate(ranks.each(run_unadvanced, 2, forgets=[0, 1])):
        assert (expected, seen) == (0, 0)
        assert f"rank {rank}: a poll of pair" in text
        assert "the epoch was never advanced" in text


def test_a_first_launch_without_advance_on_one_rank():
    mine, theirs = ranks.each(run_unadvanced, 2, forgets=[0])
    assert mine[0] == 0
    assert "the epoch was never advanced" in mine[2]
    assert theirs[:2] == [1, 0]
    assert "nothing was ever put there" in theirs[2]
    assert "epoch.advance" in theirs[2]
