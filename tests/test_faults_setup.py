"""A construction or a reset that goes wrong on one rank: all ranks hear its cause at once, and may try again."""

import numpy as np
import pytest
from helpers.ranks import graph, new_stream, synchronise

from lamport_numba import LamportAllGather, device_array, emulator, run_ranks, to_device
from lamport_numba.collectives import base
from lamport_numba.errors import DeviceUnavailable, SetupError

FOREVER = 600.0  # seconds: longer than any test here may take, so a rank that waited for it would be seen


def gathers_well(gather, call=0):
    out = gather(to_device(np.arange(4, dtype=np.float32) + 10 * gather.rank + 100 * call))
    synchronise()
    gather.check()
    expected = [np.arange(4) + 10 * rank + 100 * call for rank in range(gather.world_size)]
    np.testing.assert_array_equal(out.copy_to_host(), np.concatenate(expected).astype(np.float32))


# What fails on rank 1: the call, how many of its kind go well before, the step that is named
FIRST = [
    ("peer", "cuMemAlloc", 1, "fill the mailbox"),  # for the first call of all, of the whole capacity
    ("multicast", "cuMemAlloc", 1, "fill the mailbox"),
    ("peer", "cuLaunchKernelEx", 0, "warm up"),
    ("multicast", "cuLaunchKernelEx", 1, "warm up"),
    ("measure", "cuMemAlloc", 4, "allocate what is measured with"),
    ("measure", "cuMemAlloc", 5, "allocate what is measured with"),
    ("measure", "cuEventCreate", 1, "allocate what is measured with"),
    ("measure", "cuEventRecord", 2, "measure the transports"),
    ("measure", "cuLaunchKernelEx", 12, "measure the transports"),
]


@pytest.mark.parametrize(("transport", "call", "skip", "step"), FIRST)
def test_a_call_that_fails_on_one_rank_is_told_to_all_at_once(transport, call, skip, step):
    def rank(comm):
        if comm.rank == 1:
            emulator.inject(call, rank=1, skip=skip, code=2, times=1)
        comm.Barrier()
        with pytest.raises(SetupError) as caught:
            LamportAllGather(comm, 1024, transport=transport, timeout=FOREVER)
        with LamportAllGather(comm, 1024, transport=transport, timeout=FOREVER) as gather:
            gathers_well(gather)
        return str(caught.value)

    before = emulator.leaks()
    said = run_ranks(3, rank, timeout=60)
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank 1 failed at '{step}': {call} failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert ("bytes were asked for" in said[0]) == (call == "cuMemAlloc")
    if transport != "measure":  # memory that was bound to a multicast object and used stays until the process ends
        assert emulator.leaks() == before


def test_a_rank_without_a_device_tells_the_others(monkeypatch):
    real = base.select

    def rank(comm):
        with pytest.raises(DeviceUnavailable if comm.rank == 1 else SetupError) as caught:
            LamportAllGather(comm, 64, transport="peer", timeout=FOREVER)
        return str(caught.value)

    def select():
        from lamport_numba.driver import _thread

        if _thread.rank == 1:
            raise DeviceUnavailable("no driver here")
        return real()

    monkeypatch.setattr(base, "select", select)
    said = run_ranks(3, rank, timeout=60)
    assert said[1] == "no driver here"
    assert said[0] == said[2] == "rank 1 failed at 'choose the device': no driver here"


# The call, and whether a graph may hold calls of before the reset, whose mailbox then is kept
RESET = [
    ("cuMemcpyDtoHAsync", False),
    ("cuStreamDestroy", False),
    ("cuCtxSynchronize", True),
    ("cuMemsetD32Async", True),
    ("cuMemAlloc", True),
]


@pytest.mark.parametrize(("call", "captured"), RESET)
def test_a_reset_that_fails_on_one_rank_fails_on_all_and_may_be_tried_again(call, captured):
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=FOREVER) as gather, new_stream() as stream:
            gathers_well(gather)
            x, y = to_device(np.zeros(4, np.float32)), device_array(8, np.float32)
            if captured:
                with graph(stream, gather.prepare(x, y, stream)):
                    pass
            comm.Barrier()
            if comm.rank == 1:
                emulator.inject(call, rank=1, code=1, times=1)
            comm.Barrier()
            with pytest.raises(SetupError, match=rf"^rank 1 failed at .*: {call} failed"):
                gather.reset()
            gather.reset()
            for number in range(3):
                gathers_well(gather, number)

    before = emulator.leaks()
    run_ranks(2, rank, timeout=60)
    assert emulator.leaks() == before
