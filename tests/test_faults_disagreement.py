"""Ranks that disagree: the header of every call shows it, all ranks raise the same error, and no data is taken for
good.
"""

import re
from contextlib import suppress

import numpy as np
import pytest
from helpers.ranks import OnStream, graph, new_stream, synchronise

from lamport_numba import LamportAllGather, device_array, emulator, ptx, run_ranks, to_device
from lamport_numba.collectives import arguments
from lamport_numba.driver import structs
from lamport_numba.errors import CallMismatch, ClosedError, DriverError, LamportError, SetupError, StreamError

PATIENT = 60.0  # seconds; no test here may need a deadline


def part(rank, packs, call=0):
    return (np.arange(4 * packs) + 1000 * rank + 100_000 * call).astype(np.float32)


def whole(world, packs, call=0):
    return np.concatenate([part(rank, packs, call) for rank in range(world)])


def same_error(found):
    """The error that all ranks raised, told alike."""
    assert {type(error) for error in found} == {CallMismatch}, found
    assert len({str(error) for error in found}) == 1, [str(error) for error in found]
    return found[0]


def reported(gather):
    """What the device reports once this rank's calls are over."""
    synchronise()
    with pytest.raises(LamportError) as caught:
        gather.check()
    return caught.value


def disagree(world, calls, *, transport="peer", fabric=None, seed=None):
    """Make the calls ``calls(gather, rank)`` on every rank; the errors that the ranks then raise."""

    def rank(comm):
        gather = LamportAllGather(comm, 256, transport=transport, timeout=PATIENT)
        out = gather(to_device(part(comm.rank, 3)))
        synchronise()
        np.testing.assert_array_equal(out.copy_to_host(), whole(comm.size, 3))
        with suppress(CallMismatch):  # the emulated device may be so fast that the next call raises already
            calls(gather, comm.rank)
        error = reported(gather)
        gather.close()  # has been told
        return error

    return run_ranks(world, rank, timeout=60, fabric=fabric, seed=seed)


def call(gather, packs, dtype=np.float32, shape=None):
    gather(to_device(np.ones(packs * 16 // np.dtype(dtype).itemsize, dtype).reshape(shape or -1)))


@pytest.mark.parametrize("transport", ["peer", "multicast"])
@pytest.mark.parametrize("world", [2, 3])
def test_sizes_1_2_against_2_1(world, transport):
    def calls(gather, rank):
        for packs in (2, 1) if rank == 1 else (1, 2):
            call(gather, packs)

    error = same_error(disagree(world, calls, transport=transport))
    assert error.call == 1
    assert "of 16 bytes" in str(error)
    assert "of 32 bytes" in str(error)


@pytest.mark.parametrize("transport", ["peer", "multicast"])
@pytest.mark.parametrize("seed", range(4))
def test_sizes_1_2_against_2_1_with_late_words(transport, seed):
    def calls(gather, rank):
        for packs in (2, 1) if rank == 1 else (1, 2):
            call(gather, packs)

    same_error(disagree(3, calls, transport=transport, fabric="adversarial", seed=seed))


@pytest.mark.parametrize("transport", ["peer", "multicast"])
def test_control_without_the_comparison_sizes_1_2_against_2_1_are_silent(transport, monkeypatch):
    text = ptx.read(f"lamport_{transport}.ptx")
    without = text.replace("    @%differs bra RAISE;\n", "")
    assert without != text
    real = ptx.read
    monkeypatch.setattr(ptx, "read", lambda file: without if file == f"lamport_{transport}.ptx" else real(file))

    def rank(comm):
        gather = LamportAllGather(comm, 256, transport=transport, timeout=2)
        outs = []
        for packs in (2, 1) if comm.rank else (1, 2):
            try:
                outs.append(gather(to_device(part(comm.rank, packs, len(outs)))))
            except LamportError:
                break
        synchronise()
        gather.abandon()
        return [out.copy_to_host().tolist() for out in outs[:1]]

    first = run_ranks(2, rank, timeout=30)[0][0]
    assert first == [*part(0, 1), *part(1, 2)[:4]]  # rank 0 took half of what rank 1 meant


def test_dtypes_that_differ():
    error = same_error(disagree(2, lambda gather, rank: call(gather, 2, np.float16 if rank else np.float32)))
    assert error.mine[2] != error.theirs[2]


def test_shapes_that_differ():
    same_error(disagree(3, lambda gather, rank: call(gather, 2, shape=(4, 2) if rank == 2 else (2, 4))))


def test_a_rank_that_is_one_call_ahead():
    def calls(gather, rank):
        if rank == 1:
            with pytest.raises(ValueError, match="20 bytes"):
                gather(device_array(5, np.float32))
        for _ in range(2):
            call(gather, 1)

    error = same_error(disagree(2, calls))
    assert {error.mine[0], error.theirs[0]} == {1, 2}
    assert "every rank must make the same calls in the same order" in str(error)


REFUSED = {
    "out": lambda gather: gather(to_device(part(0, 1)), out=device_array(4, np.float32)),
    "dtype": lambda gather: gather(np.ones(4, object)),
    "size": lambda gather: gather(device_array(0, np.float32)),
    "stream": lambda gather: gather(to_device(part(0, 1)), stream=True),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_refusal_on_one_rank_shows_in_the_next_call(refused):
    def calls(gather, rank):
        good = to_device(part(rank, 1))
        if rank == 1:
            with pytest.raises((ValueError, TypeError)):
                REFUSED[refused](gather)
        gather(good)
        gather(good)

    same_error(disagree(2, calls))


def no_room(gather, x, y):
    emulator.inject(call="cuMemAlloc", rank=gather.rank, code=2, times=1)
    gather(x)


def unknown_stream(gather, x, y):
    gather(OnStream(x, 12345), y)


def captured_stream(gather, x, y):
    drv, mode = gather._drv, structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with new_stream() as stream, drv.current(gather.device):
        drv.call("cuStreamBeginCapture", stream, mode)
        try:
            gather(OnStream(x, stream), y)
        finally:
            drv.call("cuGraphDestroy", drv.call("cuStreamEndCapture", stream))


def no_launch(gather, x, y):
    emulator.inject(call="cuLaunchKernelEx", rank=gather.rank, code=1, times=1)
    gather(x, y)


UNMADE = {
    "no memory for the output": (no_room, DriverError, "cuMemAlloc"),
    "the array's stream does not exist": (unknown_stream, ValueError, "array's own stream is 12345"),
    "the array's stream is captured": (captured_stream, LamportError, "is captured into a graph"),
    "the launch fails": (no_launch, DriverError, "cuLaunchKernelEx"),
}


@pytest.mark.parametrize("unmade", UNMADE)
def test_a_call_that_was_not_made_is_never_taken_for_the_next(unmade):
    """Sizes and dtypes are the same in every call: only the count tells that rank 1's next call is another one."""
    attempt, kind, says = UNMADE[unmade]

    def calls(gather, rank):
        x, y = to_device(part(rank, 1)), device_array(8, np.float32)
        if rank == 1:
            with pytest.raises(kind, match=says):
                attempt(gather, x, y)
        gather(x, y)
        gather(x, y)

    error = same_error(disagree(2, calls))
    assert {error.mine[0], error.theirs[0]} == {1, 2}


def test_a_compared_call_that_was_not_made_is_never_taken_for_the_next():
    """Over MPI the ranks agreed about it before its launch failed: the device tells."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT, compare_calls=True)
        x, y = to_device(part(comm.rank, 1)), device_array(8, np.float32)
        if comm.rank == 1:
            with pytest.raises(DriverError, match="cuLaunchKernelEx"):
                no_launch(gather, x, y)
        else:
            gather(x, y)
        with suppress(CallMismatch):
            gather(x, y)
        error = reported(gather)
        gather.close()
        return error

    error = same_error(run_ranks(2, rank, timeout=60))
    assert {error.mine[0], error.theirs[0]} == {0, 1}


@pytest.mark.parametrize("unmade", ["no memory for the output", "the array's stream does not exist"])
def test_compared_calls_are_told_of_one_that_cannot_be_made(unmade):
    attempt, kind, says = UNMADE[unmade]

    def calls(gather, rank):
        x, y = to_device(part(rank, 1)), device_array(8, np.float32)
        if rank == 0:
            gather(x, y)
        with pytest.raises(kind, match=says):
            attempt(gather, x, y)
        raise CallMismatch("refused")

    found = compared(2, calls)
    assert re.search(f"rank 1: refused call 1 .*{says}", str(found[0]))


def test_an_object_whose_call_cannot_even_be_counted_is_not_used_again():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        x, y = to_device(part(0, 1)), device_array(4, np.float32)
        emulator.inject(call="cuLaunchKernelEx", rank=0, code=1, times=2)
        with pytest.raises(DriverError, match="cuLaunchKernelEx"):
            gather(x, y)
        with pytest.raises(ClosedError, match="could not be counted"):
            gather(x, y)
        gather.close()

    run_ranks(1, rank, timeout=60)


@pytest.mark.parametrize("busy", [False, True], ids=["first calls", "after calls on another stream"])
@pytest.mark.parametrize("refusing", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_a_refusal_while_its_stream_is_captured_is_counted_in_the_graph(refusing, busy):
    """The outputs are of one size: only the count tells that rank 1's second call of a replay is the others' third."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        if busy:
            gather(to_device(part(comm.rank, 1)))
            synchronise()
        with new_stream() as stream:
            outs = [device_array(8, np.float32) for _ in range(3)]
            calls = [gather.prepare(to_device(part(comm.rank, 1, n)), out, stream) for n, out in enumerate(outs)]

            def capture():
                for number, one in enumerate(calls):
                    if number == 1 and comm.rank in refusing:
                        with pytest.raises(ValueError, match="20 bytes"):
                            gather(device_array(5, np.float32), stream=stream)
                    else:
                        one()

            with graph(stream, capture) as launch:
                launch()
                launch()
                synchronise(stream)
                if len(refusing) == 2:
                    gather.check()
                    for number in (0, 2):
                        np.testing.assert_array_equal(outs[number].copy_to_host(), whole(2, 1, number))
                    gather.close()
                    return None
                with pytest.raises(CallMismatch) as caught:
                    gather.check()
                gather.close()
        return caught.value

    found = run_ranks(2, rank, timeout=60)
    if len(refusing) == 1:
        error = same_error(found)
        assert {error.mine[0], error.theirs[0]} == {busy + 1, busy + 2}


def test_a_refusal_beside_a_capture_cannot_be_counted():
    """Neither in the graph, which may be launched often or never, nor beside what the stream may still have to do."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        x, y = to_device(part(comm.rank, 1)), device_array(8, np.float32)
        with new_stream() as stream, new_stream() as other:

            def capture():
                gather(x, y, stream=stream)
                with pytest.raises(StreamError, match="is being captured"):
                    gather(x, y, stream=other)
                gather(x, y, stream=stream)
                with pytest.raises(ValueError, match="20 bytes"):
                    gather(device_array(5, np.float32), stream=other)
                with pytest.raises(ClosedError, match=r"could not be counted .*is being captured"):
                    gather(x, y, stream=stream)

            with graph(stream, capture):
                pass
            gather.close()

    run_ranks(2, rank, timeout=60)


@pytest.mark.parametrize("broken", [True, False])
def test_a_refusal_that_cannot_be_counted_in_a_graph(broken):
    """It matters only if there will be a graph."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        x, y, drv = to_device(part(comm.rank, 1)), device_array(8, np.float32), gather._drv
        with new_stream() as stream, drv.current(gather.device):
            drv.call("cuStreamBeginCapture", stream, structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            if broken:
                assert drv.api.cuStreamQuery(stream)[0] != 0
            else:
                emulator.inject(call="cuLaunchKernelEx", rank=comm.rank, code=2, times=1)
            with pytest.raises(ValueError, match="20 bytes"):
                gather(device_array(5, np.float32), stream=stream)
            code, *made = drv.api.cuStreamEndCapture(stream)
            assert (code != 0) == broken
            if broken:
                gather(x, y, stream=stream)
                synchronise(stream)
                np.testing.assert_array_equal(y.copy_to_host(), whole(2, 1))
            else:
                drv.call("cuGraphDestroy", *made)
                with pytest.raises(ClosedError, match="could not be counted"):
                    gather(x, y, stream=stream)
            gather.close()

    run_ranks(2, rank, timeout=60)


def test_a_refusal_in_a_graph_that_is_never_launched_is_no_disagreement():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=PATIENT) as gather, new_stream() as stream:

            def capture():
                if comm.rank == 1:
                    with pytest.raises(ValueError, match="20 bytes"):
                        gather(device_array(5, np.float32), stream=stream)

            with graph(stream, capture):
                out = gather(to_device(part(comm.rank, 1)), stream=stream)
                synchronise(stream)
                np.testing.assert_array_equal(out.copy_to_host(), whole(2, 1))

    run_ranks(2, rank, timeout=60)


@pytest.mark.parametrize("named", [True, False], ids=["on a busy stream", "on no stream"])
def test_the_first_call_of_all_is_refused_and_the_next_is_on_another_stream(named):
    """The count is there before the next call, whatever the stream of the refused one still has to do."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        other = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        x, y = to_device(part(comm.rank, 1)), device_array(8, np.float32)
        with new_stream() as busy, new_stream() as stream:
            if comm.rank == 1:
                other(x, stream=busy)  # waits for rank 0
                with pytest.raises((ValueError, TypeError), match=r"20 bytes|a bool"):
                    gather(device_array(5, np.float32) if named else x, stream=busy if named else True)
            with suppress(CallMismatch):
                gather(x, y, stream=stream)
                gather(x, y, stream=stream)
            synchronise(stream)
            with pytest.raises(CallMismatch) as caught:
                gather.check()
            if comm.rank == 0:
                other(x, stream=busy)
            synchronise(busy)
            other.close()
            gather.close()
            return caught.value

    error = same_error(run_ranks(2, rank, timeout=60))
    assert {error.mine[0], error.theirs[0]} == {0, 1}


@pytest.mark.parametrize("stream", [[], True, 1.0, "x"], ids=repr)
def test_a_stream_that_is_none_is_refused_however_well_the_arrays_are_known(stream):
    def calls(gather, rank):
        x, y = to_device(part(rank, 1)), device_array(8, np.float32)
        gather(x, y, stream=1)
        if rank == 1:
            with pytest.raises(TypeError, match=r"^rank 1: stream is "):
                gather(x, y, stream=stream)
        gather(x, y, stream=1)
        gather(x, y, stream=1)

    error = same_error(disagree(2, calls))
    assert {error.mine[0], error.theirs[0]} == {2, 3}


def test_a_refusal_on_all_ranks_alike_is_no_disagreement():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=PATIENT) as gather:
            for turn in range(3):
                with pytest.raises(ValueError, match="1040 bytes"):
                    gather(device_array(260, np.float32))
                out = gather(to_device(part(comm.rank, 2, turn)))
                synchronise()
                np.testing.assert_array_equal(out.copy_to_host(), whole(comm.size, 2, turn))

    run_ranks(2, rank, timeout=60)


def test_orders_that_differ_between_two_graphs():
    def rank(comm):
        gather = LamportAllGather(comm, 256, transport="peer", timeout=PATIENT)
        with new_stream() as stream:
            sizes = (1, 4) if comm.rank else (4, 1)
            calls = [
                gather.prepare(to_device(part(comm.rank, n)), device_array(4 * n * comm.size, np.float32), stream)
                for n in sizes
            ]
            with graph(stream, lambda: [one() for one in calls]) as launch:
                launch()
                synchronise(stream)
                with pytest.raises(CallMismatch) as caught:
                    gather.check()
                gather.close()
        return caught.value

    same_error(run_ranks(2, rank, timeout=60))


# Numbers of calls


def closes(world, calls, **options):
    """Each rank makes ``calls(gather, rank)`` and closes; what close raised."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT, **options)
        calls(gather, comm.rank)
        with pytest.raises(LamportError) as caught:
            gather.close()
        return caught.value

    return run_ranks(world, rank, timeout=50)


@pytest.mark.parametrize("world", [2, 4])
def test_close_compares_the_numbers_of_calls_before_the_deadline_does(world):
    def calls(gather, rank):
        for _ in range(4 if rank == 1 else 3):
            call(gather, 1)

    error = same_error(closes(world, calls))
    assert "different numbers of calls (rank 0: 3, rank 1: 3" in str(error)
    assert "in another one" in str(error)
    assert "compare_calls=True" in str(error)


def test_close_shows_that_one_rank_refused():
    def calls(gather, rank):
        call(gather, 1)
        if rank == 0:
            call(gather, 1)
        else:
            with pytest.raises(ValueError, match="multiple of 16"):
                gather(device_array(5, np.float32))

    error = same_error(closes(2, calls))
    assert "some ranks refused a call and others did not (rank 0: 1, rank 1: 2, 1 of them refused)" in str(error)


def test_a_reset_ends_calls_that_cannot_complete():
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", timeout=PATIENT) as gather:
            for _ in range(2 + comm.rank):
                call(gather, 1)
            gather.reset()
            out = gather(to_device(part(comm.rank, 2)))
            synchronise()
            np.testing.assert_array_equal(out.copy_to_host(), whole(comm.size, 2))

    run_ranks(2, rank, timeout=50)


# Construction


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (lambda rank: {"rank_capacity_bytes": 64 + 16 * rank}, "rank_capacity_bytes=64"),
        (lambda rank: {"transport": "peer" if rank else "multicast"}, "transport='multicast'"),
        (lambda rank: {"timeout": 5.0 + rank}, "timeout=5,"),
        (lambda rank: {"pdl": bool(rank)}, "pdl=False"),
        (lambda rank: {"compare_calls": bool(rank)}, "compare_calls=True"),
    ],
    ids=["capacity", "transport", "timeout", "pdl", "compare_calls"],
)
def test_ranks_that_are_constructed_differently(options, text):
    def rank(comm):
        with pytest.raises(SetupError) as caught:
            LamportAllGather(comm, **{"rank_capacity_bytes": 64, "timeout": 5.0, **options(comm.rank)})
        return str(caught.value)

    said = run_ranks(3, rank, timeout=60)
    assert len(set(said)) == 1
    assert text in said[0]
    assert "rank 2: LamportAllGather of lamport-numba" in said[0]


def test_versions_that_differ(monkeypatch):
    from lamport_numba import driver

    class Version:
        def __str__(self):
            return f"1.{driver._thread.rank}"

        def __format__(self, spec):
            return str(self)

    monkeypatch.setattr(arguments, "__version__", Version())

    def rank(comm):
        with pytest.raises(SetupError, match=r"rank 0: .* of lamport-numba 1\.0: .*; rank 1: .* 1\.1: "):
            LamportAllGather(comm, 64)

    run_ranks(2, rank, timeout=60)


# compare_calls=True


def compared(world, calls):
    def rank(comm):
        gather = LamportAllGather(comm, 256, transport="peer", timeout=PATIENT, compare_calls=True)
        call(gather, 2)
        with pytest.raises(LamportError) as caught:
            calls(gather, comm.rank)
        call(gather, 1)  # nothing was made on any rank, so all goes on
        synchronise()
        gather.check()
        gather.close()
        return caught.value

    return run_ranks(world, rank, timeout=60)


def test_compared_calls_name_every_rank_s_values():
    error = same_error(compared(3, lambda gather, rank: call(gather, 1 + rank, shape=(2, -1))))
    assert error.call == 1
    for rank in range(3):
        assert f"rank {rank}: call 1 of {16 * (1 + rank)} bytes, dtype <f4, shape (2, {2 + 2 * rank})" in str(error)


def test_compared_calls_name_the_rank_that_refused():
    def calls(gather, rank):
        if rank == 0:
            call(gather, 1)
        with pytest.raises(ValueError, match="20 bytes"):
            gather(device_array(5, np.float32))
        raise CallMismatch("refused")

    found = compared(2, calls)
    assert "rank 1: refused call 1 (ValueError: rank 1: an array of 20 bytes" in str(found[0])


def test_compared_numbers_of_calls_that_differ_show_in_the_call_too_many_and_in_close():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT, compare_calls=True)
        call(gather, 1)
        comm.Barrier()
        with pytest.raises(CallMismatch) as caught:
            gather(to_device(part(1, 1))) if comm.rank == 1 else gather.close()
        gather.close()
        return str(caught.value)

    said = run_ranks(2, rank, timeout=60)
    assert said[0].startswith("rank 0 closes after 1 calls, and not all ranks do: rank 1 is at another stage")
    assert said[1].startswith("call 1 is no call of all ranks, and it was not made: rank 0 is at another stage")


def test_compared_mode_by_the_environment(monkeypatch):
    monkeypatch.setenv("LAMPORT_NUMBA_COMPARE", "1")

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=PATIENT)
        with pytest.raises(CallMismatch, match="it was not made"):
            call(gather, 1 + comm.rank)
        gather.close()

    run_ranks(2, rank, timeout=60)
