"""Every operation of the mailbox between the CTAs of a device and between ranks, bit for bit. Runs on GPUs too."""

from functools import lru_cache

import numpy as np
import pytest
from helpers import ranks
from numba import cuda

import lamport_numba
from lamport_numba.mailbox import (
    Mailbox,
    MailboxLayout,
    MailboxMemory,
    bf_of,
    float_of,
    int_of,
    kernel,
    preg,
    publish,
    sreg,
)

# NaNs, quiet and signalling, with payloads; zeros, infinities, subnormals, the integers at both ends
PATTERNS = np.array(
    [
        *(0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x7FC12345, 0x00000000, 0x80000000, 0x7F800000),
        *(0xFF800000, 0x00000001, 0x80000001, 0x007FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000, 0xDEADBEEF),
    ],
    np.uint32,
)
SPACES = ["scratch", "peer"]


def words_of(party, count):
    """``count`` words that differ by party and position, the patterns among them."""
    mixed = np.random.default_rng(party).integers(0, 2**32, count, dtype=np.uint32)
    taken = np.roll(PATTERNS, -party)[:count]
    mixed[: taken.size] = taken
    return mixed


def floats_of(party, count):
    drawn = np.random.default_rng([7, party]).normal(0, 10.0 ** np.random.default_rng(party).integers(-20, 20, count))
    return drawn.astype(np.float32)


def bf16(values):
    """The bits of float32 values rounded to bf16, to nearest even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


FLOAT, INT, WORD, WORDS_1, WORDS_2, BF_2, BF_4 = range(7)  # the operations
PAIRS = {FLOAT: 1, INT: 1, WORD: 1, WORDS_1: 1, WORDS_2: 2, BF_2: 1, BF_4: 2}


@lru_cache
def exchange(space, operation, parties, places, stride):
    """A kernel in which thread k of each party puts place k, four values wide, and polls it from every party.

    A party is a CTA of one device (scratch) or the one CTA of a rank (peer).
    """
    scratch, two = space == "scratch", PAIRS[operation] == 2
    targets = 1 if scratch else parties
    region_of = sreg if scratch else preg

    @kernel
    def exchanged(words, floats, out, rank, memory, peers, epoch, control):
        mailbox = Mailbox(epoch[0], control)
        if scratch:
            me, mine, offset = np.int64(cuda.blockIdx.x), memory, np.int64(128)
        else:
            me, mine, offset = np.int64(rank), peers[rank], np.int64(128) + epoch[1] * stride
        k = np.int64(cuda.threadIdx.x)
        at = 4 * (places * me + k)
        for t in range(targets):
            region = region_of(memory if scratch else peers[t], offset, "inbox")
            if operation == FLOAT:
                mailbox.put(region, at, floats[at])
            elif operation == INT:
                mailbox.put(region, at, np.int32(words[at]))
            elif operation == WORD:
                mailbox.put(region, at, words[at])
            elif operation == WORDS_1:
                mailbox.put_words(region, at, (words[at],))
            elif operation == WORDS_2:
                mailbox.put_words(region, at, (words[at], np.int32(words[at + 1])))
            elif operation == BF_2:
                mailbox.put_bf(region, 2 * at, (floats[at], floats[at + 1]))
            elif operation == BF_4:
                mailbox.put_bf(region, 2 * at, (floats[at], floats[at + 1], floats[at + 2], floats[at + 3]))
        region = region_of(mine, offset, "inbox")
        base = 2 * parties * places * (me if scratch else 0) + 2 * k
        if two:
            pairs = mailbox.poll_each(region, 4 * k, 4 * places, parties, 2)
            for p in range(parties):
                out[base + 2 * places * p] = pairs[p][0]
                out[base + 2 * places * p + 1] = pairs[p][1]
        else:
            singles = mailbox.poll_each(region, 4 * k, 4 * places, parties, 1)
            for p in range(parties):
                out[base + 2 * places * p] = singles[p][0]

    return exchanged


def run_exchange(comm, space, operation, parties, places, launches=3):
    """Launch it some times on fresh values; returns what was wrong."""
    rank = comm.Get_rank()
    count = 4 * parties * places
    regions = {"other": 16, "inbox": count}
    layout = MailboxLayout(scratch=regions) if space == "scratch" else MailboxLayout(peer=regions)
    exchanged = exchange(space, operation, parties, places, layout.stride)
    ctas = parties if space == "scratch" else 1
    wrong = []
    with MailboxMemory(comm, layout, timeout=20) as memory:
        for launch in range(launches):
            words = np.concatenate([words_of(party + 10 * launch, 4 * places) for party in range(parties)])
            floats = np.concatenate([floats_of(party + 10 * launch, 4 * places) for party in range(parties)])
            out = lamport_numba.to_device(np.zeros(2 * ctas * parties * places, np.uint32))
            device_words, device_floats = lamport_numba.to_device(words), lamport_numba.to_device(floats)
            memory.epoch.advance()
            exchanged[ctas, places](device_words, device_floats, out, rank, *memory.arguments)
            found = out.copy_to_host().reshape(ctas, parties, places, 2)
            memory.check()
            expected = np.zeros((parties, places, 2), np.uint32)
            sent, rounded = words.reshape(parties, places, 4), bf16(floats).reshape(parties, places, 4)
            if operation == FLOAT:
                expected[..., 0] = floats.view(np.uint32).reshape(parties, places, 4)[..., 0]
            elif operation in (BF_2, BF_4):
                packed = rounded[..., 0::2] | rounded[..., 1::2] << 16
                expected[..., : PAIRS[operation]] = packed[..., : PAIRS[operation]]
            else:
                expected[..., : PAIRS[operation]] = sent[..., : PAIRS[operation]]
            wrong += [
                f"launch {launch}, CTA {cta}: {found[cta]} instead of {expected}"
                for cta in range(ctas)
                if not np.array_equal(found[cta], expected)
            ]
    return wrong


@pytest.mark.parametrize("operation", range(7), ids=["float32", "int32", "uint32", "words1", "words2", "bf2", "bf4"])
@pytest.mark.parametrize("space", SPACES)
def test_every_operation_is_exact(space, operation):
    parties = 3
    world = 1 if space == "scratch" else parties
    found = ranks.each(run_exchange, world, space=space, operation=operation, parties=parties, places=5)
    assert found == [[]] * world


@kernel
def unpacked(words, out):
    i = cuda.threadIdx.x
    x, y = bf_of(words[i])
    out[4 * i], out[4 * i + 1] = x, y
    out[4 * i + 2] = float_of(words[i])
    out[4 * i + 3] = float_of(int_of(float_of(words[i])))


def run_unpacked(comm):
    finite = PATTERNS[(PATTERNS & 0x7F800000) != 0x7F800000]
    out = lamport_numba.device_array((4 * finite.size,), np.float32)
    unpacked[1, finite.size](lamport_numba.to_device(finite), out)
    found = out.copy_to_host().view(np.uint32).reshape(-1, 4)
    return np.array_equal(found, np.stack([finite << 16, finite & 0xFFFF0000, finite, finite], axis=1))


def test_words_turn_into_floats_bit_by_bit():
    assert ranks.each(run_unpacked, 1) == [True]


# publish: plain data and the flag that announces it


@lru_cache
def announced(space, fence, stride):
    """Party 0 stores data by all threads and announces it; party 1 waits for the flag and reads the data."""
    scratch = space == "scratch"
    region_of = sreg if scratch else preg

    @kernel
    def announcing(data, value, out, rank, memory, peers, epoch, control):
        mailbox = Mailbox(epoch[0], control)
        thread = np.int64(cuda.threadIdx.x)
        if scratch:
            me, theirs, mine, offset = np.int64(cuda.blockIdx.x), memory, memory, np.int64(0)
        else:
            me, theirs, mine, offset = np.int64(rank), peers[1], peers[rank], epoch[1] * np.int64(stride)
        flag = region_of(theirs, offset, "flag")
        if me == 0:
            data[thread] = value + np.uint32(thread)
            if fence:
                publish(mailbox, flag, 3, value, 5)
            else:
                cuda.syncthreads()
                if thread == 5:
                    mailbox.put(flag, 3, value)
        if me == 1:
            ((word,),) = mailbox.poll(((region_of(mine, offset, "flag"), 3, 1),), acquire=True)
            out[thread] = data[thread] - word

    return announcing


def run_announced(comm, space, fence, threads=64, launches=4):
    """How many words of data were not there when the flag was."""
    rank = comm.Get_rank()
    layout = MailboxLayout(scratch={"flag": 4}) if space == "scratch" else MailboxLayout(peer={"flag": 4, "data": 64})
    announcing = announced(space, fence, layout.stride)
    early = 0
    with MailboxMemory(comm, layout, timeout=20) as memory:
        if space == "scratch":
            data = lamport_numba.to_device(np.zeros(threads, np.uint32))
        else:  # the data lies in rank 1's memory, behind the flags of both parities
            at = int(memory.peers.copy_to_host()[1]) + layout.offset("data")
            data = ranks.Words(at, threads)
        for launch in range(launches):
            out = lamport_numba.to_device(np.zeros(threads, np.uint32))
            memory.epoch.advance()
            announcing[2 if space == "scratch" else 1, threads](
                data, np.uint32(1000 * (launch + 1)), out, rank, *memory.arguments
            )
            found = out.copy_to_host()
            memory.check()
            if space == "scratch" or rank == 1:
                early += int(np.count_nonzero(found != np.arange(threads)))
            comm.Barrier()  # the data is not double-buffered
    return early


@pytest.mark.parametrize("space", SPACES)
def test_published_data_is_there_when_its_flag_is(space):
    world = 1 if space == "scratch" else 2
    assert ranks.each(run_announced, world, space=space, fence=True) == [0] * world
