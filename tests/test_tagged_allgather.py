"""TaggedAllGather: exact for every bit pattern and every number of bytes, whatever the sizes, across the wrap of the
tags.
"""

import re
import struct

import numpy as np
import pytest
from helpers import mpirun, ranks

import lamport_numba
from lamport_numba import TaggedAllGather, ptx
from lamport_numba.collectives.reports import CONTROL_BYTES
from lamport_numba.errors import CallMismatch, PeerTimeout

CAPACITY = 2048
LAST = 2**32 - 1
TRANSPORTS = [
    "peer",
    pytest.param("multicast", marks=pytest.mark.skipif(ranks.on_gpu(), reason="never on a borrowed GPU")),
]
needs_fabric = pytest.mark.skipif(ranks.on_gpu(), reason="the fabric of a GPU cannot be chosen")

DTYPES = "?bBhHiIlLqQefdFD"


def payload(rank, call, nbytes):
    """Bytes that differ by rank, call and position; among them sentinels, NaNs and zeros."""
    drawn = np.random.default_rng([rank, call, nbytes]).integers(0, 256, nbytes, np.uint8)
    words = drawn[: nbytes // 4 * 4].view(np.uint32)
    special = np.array([0x80000000, 0, 0x7F800001, 0xFFFFFFFF, 0x80000001, 1, 2, 3], np.uint32)
    words[call % 3 :: 3] = np.resize(np.roll(special, rank + call), words[call % 3 :: 3].size)
    return drawn


def whole(world, call, nbytes):
    return np.concatenate([payload(rank, call, nbytes) for rank in range(world)])


def run_sizes(comm, transport, sizes, capacity=CAPACITY, join=False, **options):
    """Calls of these sizes in a row, queued without waiting; returns which came out wrong."""
    rank, world = comm.Get_rank(), comm.Get_size()
    outs = []
    with TaggedAllGather(comm, capacity, transport=transport, timeout=30, **options) as gather:
        for call, nbytes in enumerate(sizes):
            outs.append(gather(lamport_numba.to_device(payload(rank, call, nbytes))))
            if join:
                ranks.synchronise()
        found = [out.copy_to_host() for out in outs]
        gather.check()
    return [
        f"rank {rank}, call {call}, {nbytes} bytes"
        for call, nbytes in enumerate(sizes)
        if not np.array_equal(found[call], whole(world, call, nbytes))
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_dips_and_growth(transport, world):
    sizes = [16, 2048, 16, 1024, 48, 2048, 2032, 512, 528, 16, 16, 2048, 64]
    assert ranks.each(run_sizes, world, transport=transport, sizes=sizes) == [[]] * world


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_number_of_bytes(transport):
    sizes = [*range(1, 40), 511, 512, 513, 517, 1023, 2047, 2048, 2045, 7, 1]
    assert ranks.each(run_sizes, 3, transport=transport, sizes=sizes) == [[]] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_under_mpirun(transport):
    env = {"LAMPORT_NUMBA_SHARE_DEVICE": "1"} if ranks.on_gpu() else {}
    sizes = [16, 2048, 33, 512, 2047, 16]
    found = mpirun.run(run_sizes, 4, env=env, multicast=transport == "multicast", transport=transport, sizes=sizes)
    assert found == [[]] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
@needs_fabric
def test_a_grid_of_one_cta(transport):
    sizes = [2048, 16, 2047, 1040, 2048, 33]
    assert ranks.each(run_sizes, 3, transport=transport, sizes=sizes, residency=1) == [[]] * 3


def run_dtypes(comm, transport):
    rank, world = comm.Get_rank(), comm.Get_size()
    wrong = []
    with TaggedAllGather(comm, CAPACITY, transport=transport, timeout=30) as gather:
        for call, code in enumerate(DTYPES):
            dtype = np.dtype(code)
            raw = whole(world, call, 24 * dtype.itemsize)
            if code == "?":
                raw &= 1
            expected = raw.view(dtype).reshape(4 * world, 6)
            mine = expected[4 * rank : 4 * rank + 4]
            out = gather(lamport_numba.to_device(mine))
            if out.dtype != dtype or out.shape != expected.shape or out.copy_to_host().tobytes() != expected.tobytes():
                wrong.append(code)
        gather.check()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.filterwarnings("error")
def test_every_dtype_is_exact_and_none_warns(transport):
    assert ranks.each(run_dtypes, 2, transport=transport) == [[]] * 2


def run_values(comm):
    rank = comm.Get_rank()
    values = np.array([-0.0, 2097153.0, 2.0**-1074, -np.inf][rank : rank + 1] * 2)
    numbers = np.array([2**31, -(2**31), -(2**63), 2**31 - 1][rank : rank + 1] * 2)
    with TaggedAllGather(comm, 64, timeout=30) as gather:
        floats = gather(lamport_numba.to_device(values)).copy_to_host()
        integers = gather(lamport_numba.to_device(numbers)).copy_to_host()
    return floats.tobytes().hex(), integers.tolist()


def test_what_the_sentinel_would_lose():
    found = ranks.each(run_values, 4)
    floats = np.repeat([-0.0, 2097153.0, 2.0**-1074, -np.inf], 2).tobytes().hex()
    integers = np.repeat([2**31, -(2**31), -(2**63), 2**31 - 1], 2).tolist()
    assert [tuple(each) for each in found] == [(floats, integers)] * 4


def run_graph(comm, transport, each, replays):
    rank, world = comm.Get_rank(), comm.Get_size()
    sizes = [640, 16, 1024][:each]
    wrong = []
    with TaggedAllGather(comm, CAPACITY, transport=transport, timeout=30) as gather, ranks.new_stream() as stream:
        inputs = [lamport_numba.to_device(np.zeros(n, np.uint8)) for n in sizes]
        outs = [lamport_numba.device_array((n * world,), np.uint8) for n in sizes]

        def queue():
            for x, out in zip(inputs, outs, strict=True):
                gather(x, out=out, stream=stream)

        with ranks.graph(stream, queue) as replay:
            for turn in range(replays):
                for x, n in zip(inputs, sizes, strict=True):
                    x.copy_to_device(payload(rank, turn, n))
                ranks.synchronise()
                replay()
                ranks.synchronise(stream)
                wrong += [
                    f"replay {turn}, {n} bytes"
                    for out, n in zip(outs, sizes, strict=True)
                    if not np.array_equal(out.copy_to_host(), whole(world, turn, n))
                ]
                if turn % 3 == 0:
                    eager = gather(lamport_numba.to_device(payload(rank, 100 + turn, 336)), stream=stream)
                    ranks.synchronise(stream)
                    if not np.array_equal(eager.copy_to_host(), whole(world, 100 + turn, 336)):
                        wrong.append(f"eager call after replay {turn}")
        gather.check()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("each", [1, 2, 3])
def test_graphs_with_eager_calls_in_between(transport, each):
    assert ranks.each(run_graph, 2, transport=transport, each=each, replays=20) == [[]] * 2


# The wrap of the tags


def wind(gather, tag, parity, coming):
    """Set every epoch of the channel, and plant a pair with the tag ``coming`` in every slot of its mailbox."""
    (channel,) = gather._channels.values()
    epochs = channel.world * (channel.row // 32 + 1)
    ranks.write(channel._generations, struct.pack("<II", tag, parity) * epochs)
    pairs = channel.mailbox_bytes() // 8
    ranks.write(channel.memory.local + CONTROL_BYTES, struct.pack("<II", 0xBADBAD, coming) * pairs)


def run_wrap(comm, transport, before, parity, sizes):
    """Calls across the wrap, from ``before`` tags below it, each time with another of the coming tags planted.

    ``before`` is at least 1, so that both of the last two calls, which tidy up, are among them.
    """
    rank, world = comm.Get_rank(), comm.Get_size()
    wrong = []
    for planted in range(1, 6):
        with TaggedAllGather(comm, 1024, transport=transport, timeout=5) as gather:
            wind(gather, LAST - 1 - before, parity, planted)
            comm.Barrier()
            outs = [gather(lamport_numba.to_device(payload(rank, call, n))) for call, n in enumerate(sizes)]
            for call, (out, n) in enumerate(zip(outs, sizes, strict=True)):
                if not np.array_equal(out.copy_to_host(), whole(world, call, n)):
                    wrong.append(f"rank {rank}, tag {planted} planted, call {call}, {n} bytes")
            gather.check()
    return wrong


# Small calls leave out most lanes of a warp up to the wrap; large ones use them all right after it.
WRAP_SIZES = [16, 64, 16, 16, 512, 512, 1024, 512, 16, 1024, 1024, 1024]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("before", "parity"), [(1, 0), (1, 1), (3, 0)])
def test_no_old_pair_matches_after_the_wrap(transport, before, parity):
    found = ranks.each(run_wrap, 3, transport=transport, before=before, parity=parity, sizes=WRAP_SIZES)
    assert found == [[]] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.skipif(ranks.on_gpu(), reason="the control's kernel is put in by hand")
def test_without_tidying_old_pairs_match(monkeypatch, transport):
    """A negative control: the planted tags do catch a kernel that leaves its last slots as they are."""
    edit_kernels(monkeypatch, "%wraps, %tag, 0xfffffffe, %slotted;", "%wraps, %tag, 0xffffffff, %slotted;")
    found = ranks.each(run_wrap, 3, transport=transport, before=1, parity=0, sizes=WRAP_SIZES)
    assert any(found)


def edit_kernels(monkeypatch, old, new):
    """Have the tagged kernels loaded with one line changed."""
    read = ptx.read

    def edited(name):
        text = read(name)
        if name.startswith("tagged_"):
            assert old in text
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(ptx, "read", edited)


# What goes wrong


def run_mismatch(comm, sizes):
    rank = comm.Get_rank()
    with TaggedAllGather(comm, CAPACITY, timeout=5) as gather:
        try:
            for n in sizes[rank]:
                gather(lamport_numba.to_device(payload(rank, 0, n)))
                ranks.synchronise()
                gather.check()
        except CallMismatch as error:
            said = str(error)
        else:
            said = None
        comm.Barrier()
        gather.reset()
        after = gather(lamport_numba.to_device(payload(rank, 1, 48))).copy_to_host()
        gather.check()
    return said, bool(np.array_equal(after, whole(comm.Get_size(), 1, 48)))


def test_sizes_that_differ_are_told_in_bytes():
    for said, works_again in ranks.each(run_mismatch, 2, sizes=[[33, 64], [64, 33]]):
        assert re.search(r"\b33 bytes", said)
        assert re.search(r"\b64 bytes", said)
        assert works_again


def run_absent(comm):
    rank = comm.Get_rank()
    with TaggedAllGather(comm, CAPACITY, timeout=0.3) as gather:
        said = None
        if rank != 1:
            gather(lamport_numba.to_device(payload(rank, 0, 64)))
            ranks.synchronise()
            try:
                gather.check()
            except PeerTimeout as error:
                said = [error.rank, error.call]
        comm.Barrier()
        gather.reset()
    return said


def test_a_missing_rank_is_named():
    assert ranks.each(run_absent, 3) == [[1, 0], None, [1, 0]]


def run_refusals(comm):
    with TaggedAllGather(comm, 64, timeout=5) as gather:
        sizes = (1, 3, 16, 63, 64, 65, 80)
        accepted = [n for n in sizes if gather.accepts(lamport_numba.to_device(np.zeros(n, np.uint8)))]
        with pytest.raises(ValueError, match=r"65 bytes.*64 bytes"):
            gather(lamport_numba.to_device(np.zeros(65, np.uint8)))
    return accepted


def test_every_size_up_to_the_capacity_is_accepted():
    assert ranks.each(run_refusals, 2) == [[1, 3, 16, 63, 64]] * 2


def test_only_multimem_stores_go_through_the_multicast_address():
    text = ptx.read("tagged_multicast.ptx")
    code = "\n".join(line.split("//")[0] for line in text.splitlines())
    assert len(re.findall(r"multimem\.st\.relaxed\.sys\.global\.b64 \[%to \+ \d+\], %pair\d;", code)) == 4
    assert code.count("multimem") == 4
    assert len(re.findall(r"%multicast\b", code)) == 3, "declared, loaded, added to the offset of a slot"
    assert "multimem" not in ptx.read("tagged_peer.ptx").split(".visible")[1]
