"""Launch after launch: epochs in eager launches and in graphs, the wrap of the tag, mailboxes side by side, and what
happens when a launch does not poll every rank. Runs on GPUs too, but for what chooses its fabric.
"""

import os
import struct
from functools import lru_cache

import numpy as np
import pytest
from helpers import mpirun, ranks
from numba import cuda

import lamport_numba
from lamport_numba import ptx
from lamport_numba.errors import ClosedError, MailboxTimeout
from lamport_numba.mailbox import Mailbox, MailboxLayout, MailboxMemory, kernel, preg, sreg

LAST = 2**32 - 1
SLOTS = 4  # a launch uses one of so many sets of pairs, in turn, so that pairs of older launches lie about


@lru_cache
def logged(world, ctas, layout_stride):
    """A launch in which every CTA hands a value to all CTAs, and every rank one to all ranks; what came goes to a
    log.
    """

    @kernel
    def logging(log, cursor, rank, salt, scratch, peers, epoch, control):
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control)
        cta = np.int64(cuda.blockIdx.x)
        slot = np.int64(tag % np.uint32(SLOTS))
        partials = sreg(scratch, 0, "partials")
        mailbox.put(partials, slot * ctas + cta, np.uint32(tag * np.uint32(64) + np.uint32(cta) + salt))
        if cta == 0:
            for peer in range(world):
                inbox = preg(peers[peer], parity * layout_stride, "inbox")
                mailbox.put(inbox, slot * world + rank, np.uint32(tag * np.uint32(64) + np.uint32(rank) + salt))
        from_ctas = mailbox.poll_each(partials, slot * ctas, 1, ctas, 1)
        from_ranks = mailbox.poll_each(preg(peers[rank], parity * layout_stride, "inbox"), slot * world, 1, world, 1)
        at = (np.int64(cursor[cta]) * ctas + cta) * (ctas + world + 2)
        cursor[cta] += 1
        log[at], log[at + 1] = tag, parity
        for c in range(ctas):
            log[at + 2 + c] = from_ctas[c][0]
        for r in range(world):
            log[at + 2 + ctas + r] = from_ranks[r][0]

    return logging


class Logbook:
    """Launches of ``logged`` on one mailbox, and what their log should say."""

    def __init__(self, comm, launches, *, ctas=2, salt=0, timeout=20.0):
        self.rank, self.world, self.ctas = comm.Get_rank(), comm.Get_size(), ctas
        self.salt, self.launches = salt, launches
        self.layout = MailboxLayout(scratch={"partials": SLOTS * ctas}, peer={"inbox": SLOTS * self.world})
        self.memory = MailboxMemory(comm, self.layout, timeout=timeout)
        self.kernel = logged(self.world, ctas, self.layout.stride)
        self.log = lamport_numba.to_device(np.zeros(launches * ctas * self.width, np.uint32))
        self.cursor = lamport_numba.to_device(np.zeros(ctas, np.uint32))

    @property
    def width(self):
        return self.ctas + self.world + 2

    def launch(self, stream=0):
        self.memory.epoch.advance(stream)
        self.kernel[self.ctas, 1, stream](
            self.log, self.cursor, self.rank, np.uint32(self.salt), *self.memory.arguments
        )

    def wrong(self, tags, parity=1):
        """What of the log is not as it should be for launches of these tags, the first with this parity."""
        found = self.log.copy_to_host().reshape(self.launches, self.ctas, self.width)
        self.memory.check()
        tags = np.array(tags, np.int64)
        expected = np.zeros((len(tags), self.ctas, self.width), np.uint32)
        expected[..., 0] = tags[:, None]
        expected[..., 1] = (parity + np.arange(len(tags)))[:, None] % 2
        parties = np.concatenate([np.arange(self.ctas), np.arange(self.world)])
        expected[..., 2:] = (tags[:, None, None] * 64 + parties + self.salt) & LAST
        bad = [n for n in range(len(tags)) if not np.array_equal(found[n], expected[n])]
        return [f"rank {self.rank}, launch {n}: {found[n].tolist()} is not {expected[n].tolist()}" for n in bad[:3]]


def tags_from(first, count):
    """Tags in a row; none is 0."""
    return [(first - 1 + n) % LAST + 1 for n in range(count)]


def run_eager(comm, launches):
    book = Logbook(comm, launches)
    with book.memory, ranks.new_stream() as stream:
        for _ in range(launches):
            book.launch(stream)
        ranks.synchronise(stream)
        return book.wrong(tags_from(1, launches))


def run_graph(comm, launches, each):
    """Graphs of ``each`` launches, replayed, with one eager launch after every third replay."""
    book = Logbook(comm, launches)
    with book.memory, ranks.new_stream() as stream:
        book.launch(stream)  # compile and load before the capture
        made = 1
        with ranks.graph(stream, lambda: [book.launch(stream) for _ in range(each)]) as replay:
            replays = 0
            while made + each <= launches:
                replay()
                made, replays = made + each, replays + 1
                if replays % 3 == 0 and made < launches:
                    book.launch(stream)
                    made += 1
            ranks.synchronise(stream)
        for _ in range(launches - made):
            book.launch(stream)
        ranks.synchronise(stream)
        return book.wrong(tags_from(1, launches))


@pytest.mark.parametrize("launches", [3, 1000])
def test_epochs_over_eager_launches(launches):
    assert ranks.each(run_eager, 2, launches=launches, timeout=120) == [[]] * 2


@pytest.mark.parametrize(("launches", "each"), [(3, 1), (3, 2), (1000, 3), (1000, 100)])
def test_epochs_over_graphs(launches, each):
    assert ranks.each(run_graph, 2, launches=launches, each=each, timeout=120) == [[]] * 2


@pytest.mark.parametrize("world", [1, 3, 4])
def test_epochs_over_more_ranks(world):
    assert ranks.each(run_eager, world, launches=25) == [[]] * world


# The wrap


def plant(memory, tag):
    """Put a pair with ``tag`` into every slot, scratch and both peer buffers."""
    mine = int(memory.peers.copy_to_host()[memory.rank])
    for address, nbytes in ((int(memory.scratch), memory.layout.scratch_bytes), (mine, memory.layout.peer_bytes)):
        ranks.write(address, struct.pack("<II", 0xBADBAD, tag) * (nbytes // 8))


def run_wrap(comm, before, parity, launches):
    """Launches across the wrap, from ``before`` tags below it, each time with another of the coming tags planted."""
    wrong = []
    for planted in range(1, SLOTS + 3):
        book = Logbook(comm, launches, timeout=5.0)
        with book.memory, ranks.new_stream() as stream:
            first = LAST - before
            book.memory.epoch.restart(first - 1, parity)
            plant(book.memory, planted)  # as launches of long ago may have left it
            comm.Barrier()
            for _ in range(launches):
                book.launch(stream)
            ranks.synchronise(stream)
            wrong += book.wrong(tags_from(first, launches), 1 - parity)
    return wrong


@pytest.mark.parametrize(("before", "parity"), [(0, 0), (1, 0), (2, 0), (2, 1), (5, 1)])
def test_no_old_pair_matches_after_the_wrap(before, parity):
    assert ranks.each(run_wrap, 2, before=before, parity=parity, launches=14) == [[]] * 2


@pytest.mark.parametrize("space", ["peer", "scratch"])
@pytest.mark.skipif(ranks.on_gpu(), reason="the control's kernel is put in by hand")
def test_without_tidying_old_pairs_match(monkeypatch, space):
    """A negative control: the planted tags do catch an epoch that zeroes nothing, or only one of the spaces."""
    text = ptx.read("epoch.ptx")
    if space == "peer":
        text = text.replace("setp.lt.u64 %more, %offset, %bytes;", "setp.lt.u64 %more, %bytes, 0;", 1)
    else:
        text = text.replace("setp.ne.u32 %more, %tag, 0xffffffff;", "setp.ne.u32 %more, %tag, 0;", 1)
    assert text != ptx.read("epoch.ptx")
    monkeypatch.setattr(ptx, "read", lambda name: text)
    found = ranks.each(run_wrap, 2, before=2, parity=0, launches=14)
    assert any(found)


# A launch that does not poll every rank


@lru_cache
def ringed(world, stride, everybody):
    """Each rank puts to the next one. Rank 0 dawdles before it polls; it polls its neighbour, or everybody."""

    @kernel
    def ring(raw, rank, scratch, peers, epoch, control):
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control)
        for peer in range(world):
            mailbox.put(preg(peers[peer], parity * stride, "inbox"), rank, tag)
        before = (rank + world - 1) % world
        if rank == 0 and tag == 2:
            seen, looks = tag, 0
            at = parity * np.int64(stride // 4) + 2 * before + 1
            while seen <= tag and looks < 5000:  # until the neighbour's pair is overwritten, or for a while
                seen = cuda.atomic.max(raw, at, np.uint32(0))
                looks += 1
        inbox = preg(peers[rank], parity * stride, "inbox")
        if everybody:
            mailbox.poll_each(inbox, 0, 1, world, 1)
        else:
            mailbox.poll(((inbox, before, 1),))

    return ring


def run_ring(comm, everybody, deadline, launches=8):
    """Returns the region of a poll that found its pair overwritten, or None."""
    rank, world = comm.Get_rank(), comm.Get_size()
    layout = MailboxLayout(peer={"inbox": world})
    ring = ringed(world, layout.stride, everybody)
    with ranks.new_stream() as stream:
        memory = MailboxMemory(comm, layout, timeout=deadline)
        raw = ranks.Words(int(memory.peers.copy_to_host()[rank]), layout.peer_bytes // 4)
        for launch in range(launches):
            memory.epoch.advance(stream)
            ring[1, 1, stream](raw, rank, *memory.arguments)
            if launch == 0:  # everybody has compiled when rank 0 dawdles
                ranks.synchronise(stream)
                comm.Barrier()
        ranks.synchronise(stream)
        comm.Barrier()
        try:
            memory.check()
        except MailboxTimeout as error:
            return [error.region, error.expected, error.seen]
        finally:
            memory.close()
    return None


def test_a_launch_that_polls_everybody_is_never_overtaken():
    assert ranks.each(run_ring, 3, everybody=True, deadline=30) == [None] * 3


def test_a_ring_that_polls_only_its_neighbour_is_overtaken():
    """A control for the precondition: rank 2 gets ahead of rank 0 and overwrites what rank 0 has yet to read."""
    region, expected, seen = ranks.each(run_ring, 3, everybody=False, deadline=2)[0]
    assert (region, expected) == ("inbox", 2)
    assert seen in (4, 6, 8)  # of the same parity; how far ahead depends on the machine


# Several mailboxes


def run_interleaved(comm):
    launches = 30
    first, second = Logbook(comm, launches, salt=7), Logbook(comm, launches, ctas=3, salt=1 << 20)
    with first.memory, second.memory, ranks.new_stream() as stream:
        order = np.random.default_rng(3).permutation([0] * launches + [1] * launches)  # the same on every rank
        for which in order:
            (first, second)[which].launch(stream)
        ranks.synchronise(stream)
        return first.wrong(tags_from(1, launches)) + second.wrong(tags_from(1, launches))


def test_mailboxes_interleave():
    assert ranks.each(run_interleaved, 2) == [[]] * 2


# What goes wrong


@lru_cache
def lopsided(world, stride):
    """Rank 1 puts nothing in its second launch."""

    @kernel
    def waits(out, rank, scratch, peers, epoch, control):
        tag, parity = epoch[0], epoch[1]
        mailbox = Mailbox(tag, control)
        if mailbox.failed():
            out[2] += np.uint32(1)
        if rank != 1 or tag != 2:
            for peer in range(world):
                mailbox.put(preg(peers[peer], parity * stride, "inbox"), 3 * rank, tag)
        inbox = preg(peers[rank], parity * stride, "inbox")
        (a,), (b,) = mailbox.poll(((inbox, 0, 1), (inbox, 3, 1)))
        out[0], out[1] = a, b

    return waits


def run_lopsided(comm, deadline):
    rank, world = comm.Get_rank(), comm.Get_size()
    layout = MailboxLayout(peer={"other": 5, "inbox": 3 * world})
    waits = lopsided(world, layout.stride)
    out = lamport_numba.to_device(np.zeros(3, np.uint32))
    memory = MailboxMemory(comm, layout, timeout=deadline)
    with ranks.new_stream() as stream:
        shifted = lamport_numba.to_device(memory.peers.copy_to_host() + np.uint64(layout.offset("inbox")))
        arguments = out, rank, memory.scratch, shifted, memory.epoch.state, memory.control
        waits.load(*arguments)
        comm.Barrier()  # to compile takes longer than the deadline
        for _ in range(4):
            memory.epoch.advance(stream)
            waits[1, 1, stream](*arguments)
        ranks.synchronise(stream)
    comm.Barrier()
    try:
        memory.check()
    except MailboxTimeout as error:
        return [
            str(error),
            error.region,
            error.pair,
            error.expected,
            error.seen,
            error.seconds,
            int(out.copy_to_host()[2]),
        ]
    finally:
        memory.close()
    return None


def test_a_poll_gives_up_at_its_deadline_and_says_what_was_missing():
    found = ranks.each(run_lopsided, 2, deadline=0.3)
    for rank, (text, region, pair, expected, seen, seconds, failed) in enumerate(found):
        assert (region, pair, expected, seen) == ("inbox", 3, 2, 0)
        assert seconds >= 0.3
        assert f"rank {rank}" in text
        assert "'inbox'" in text
        assert failed == 2, "the launches after it knew"


def run_closed(comm):
    memory = MailboxMemory(comm, MailboxLayout(peer={"inbox": 1}), timeout=5)
    memory.check()
    memory.close()
    memory.close()
    with pytest.raises(ClosedError):
        memory.check()
    return True


def test_close_is_idempotent_and_final():
    assert ranks.each(run_closed, 2) == [True, True]


def test_peer_regions_need_a_communicator():
    with pytest.raises(ValueError, match="needs a communicator"):
        MailboxMemory(None, MailboxLayout(peer={"inbox": 1}))
    with pytest.raises(ValueError, match="timeout is 0"):
        MailboxMemory(None, MailboxLayout(scratch={"s": 1}), timeout=0)


@kernel
def misaligned(i, scratch, epoch):
    Mailbox(epoch[0]).put_words(sreg(scratch, 0, "s"), i, (np.uint32(1), np.uint32(2)))


def run_misaligned(comm, i):
    layout = MailboxLayout(scratch={"s": 8})
    memory = MailboxMemory(None, layout)
    memory.epoch.advance()
    misaligned[1, 1](i, memory.scratch, memory.epoch.state)
    try:
        ranks.synchronise()
    except lamport_numba.errors.DriverError as error:
        return error.code
    memory.close()
    return 0


@pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="under MPS a fault ends the other clients too")
@pytest.mark.parametrize(("i", "code"), [(2, 0), (3, 716)])
def test_two_pairs_at_an_odd_index_fault_where_it_could_not_be_seen(i, code):
    """In a process of its own, because a fault costs the context."""
    assert mpirun.run(run_misaligned, 1, i=i) == [code]
