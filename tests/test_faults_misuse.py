"""What a program can do wrong with an all-gather, and what it hears: streams, ends, forks, threads, Ctrl-C, garbage."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from helpers import environment, mpirun
from helpers.ranks import graph, new_stream, synchronise

from lamport_numba import LamportAllGather, device_array, driver, emulator, run_ranks, to_device
from lamport_numba.errors import ClosedError, DriverError, LamportError, PeerTimeout, StreamError

PEER = {"transport": "peer", "timeout": 20.0}


def part(rank):
    return np.arange(4, dtype=np.float32) + 10 * rank


def gathers_well(gather, stream=None):
    out = gather(to_device(part(gather.rank)), stream=stream)
    synchronise(stream or 0)
    gather.check()
    expected = np.concatenate([part(rank) for rank in range(gather.world_size)])
    np.testing.assert_array_equal(out.copy_to_host(), expected)


# Streams


def test_two_streams_at_once_are_refused_and_one_after_the_other_work():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as one, new_stream() as two:
            x = to_device(part(comm.rank))
            if comm.rank == 0:  # rank 1 has not called yet, so this call waits on stream one
                gather(x, stream=one)
                with pytest.raises(StreamError, match=f"rank 0: a call on stream {two:#x} while stream {one:#x}"):
                    gather(x, stream=two)
                prepared = gather.prepare(x, device_array(8, np.float32), two)
                with pytest.raises(StreamError, match="make another object"):
                    prepared()
            comm.Barrier()
            if comm.rank == 1:
                gather(x, stream=one)
            synchronise(one)
            gathers_well(gather, two)
            gathers_well(gather, one)
            gathers_well(gather)

    run_ranks(2, rank, timeout=60)


def test_a_graph_that_runs_on_another_stream_is_seen_where_it_was_captured():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as one, new_stream() as two:
            x = to_device(part(comm.rank))
            call = gather.prepare(x, device_array(8, np.float32), one)
            with graph(one, call) as launch:
                if comm.rank == 0:
                    launch()
                    with pytest.raises(StreamError):
                        gather(x, stream=two)
                comm.Barrier()
                if comm.rank == 1:
                    launch()
                synchronise(one)
            gathers_well(gather, two)

    run_ranks(2, rank, timeout=60)


def test_two_objects_interleaved_in_one_order_on_two_streams():
    def rank(comm):
        with (
            LamportAllGather(comm, 64, **PEER) as first,
            LamportAllGather(comm, 64, **PEER) as second,
            new_stream() as one,
            new_stream() as two,
        ):
            x = to_device(part(comm.rank))
            for _ in range(20):
                first(x, stream=one)
                second(x, stream=two)
            gathers_well(first, one)
            gathers_well(second, two)

    run_ranks(2, rank, timeout=60)


def test_a_call_during_the_capture_of_another_stream():
    """The other capture is not broken, and the call runs."""

    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as one, new_stream() as two:
            gathers_well(gather, one)
            done = []

            def capture():
                out = gather(to_device_later, stream=one)
                synchronise(one)
                done.append(out)

            to_device_later = to_device(part(comm.rank))
            with graph(two, capture) as launch:
                launch()
            np.testing.assert_array_equal(done[0].copy_to_host(), np.concatenate([part(0), part(1)]))

    run_ranks(2, rank, timeout=60)


def test_a_stream_is_not_left_while_it_is_captured():
    """Nobody can tell whether it still has work."""

    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as one, new_stream() as two:
            x, y = to_device(part(comm.rank)), device_array(8, np.float32)
            if comm.rank == 0:
                gather(x, y, stream=one)  # waits
                with graph(one, lambda: refused(gather, x, two)):
                    comm.Barrier()
            else:
                comm.Barrier()
                gather(x, y, stream=one)
            synchronise(one)
            np.testing.assert_array_equal(y.copy_to_host(), np.concatenate([part(0), part(1)]))
            gathers_well(gather, two)

    def refused(gather, x, stream):
        with pytest.raises(StreamError, match="still has work or is being captured"):
            gather(x, stream=stream)

    run_ranks(2, rank, timeout=60)


def test_a_known_call_is_captured_and_its_buffers_are_held():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as stream:
            arrays = [to_device(part(comm.rank)), device_array(8, np.float32)]
            gather(*arrays, stream=stream)
            with graph(stream, lambda: gather(*arrays, stream=stream)) as launch:
                gone = [weakref.ref(array) for array in arrays]
                arrays.clear()
                for _ in range(20):  # more than are remembered
                    gather(to_device(part(comm.rank)), device_array(8, np.float32), stream=stream)
                synchronise(stream)
                gc.collect()
                assert all(ref() is not None for ref in gone)
                launch()
                synchronise(stream)
                gather.check()
                np.testing.assert_array_equal(gone[1]().copy_to_host(), np.concatenate([part(0), part(1)]))

    run_ranks(2, rank, timeout=60)


def test_known_calls_are_let_go_while_their_stream_is_captured():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as one, new_stream() as two:
            arrays = [(to_device(part(comm.rank)), device_array(8, np.float32)) for _ in range(40)]
            for x, y in arrays[:8]:
                gather(x, y, stream=one)
            synchronise(one)
            gathers_well(gather, two)
            with graph(one, lambda: [gather(x, y, stream=two) for x, y in arrays[8:]]) as launch:
                launch()
            for x, y in arrays:
                gather(x, y, stream=two)
            gathers_well(gather, two)

    run_ranks(2, rank, timeout=60)


@pytest.mark.parametrize("captured", [False, True])
def test_buffers_are_held_although_what_comes_after_the_launch_fails(captured):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as stream:
            x, y = to_device(part(comm.rank)), device_array(9, np.float32)[1:]  # gathered beside it, then copied
            gone = weakref.ref(x)

            def call():
                emulator.inject("cuMemcpyDtoDAsync", rank=comm.rank, code=2, times=1)
                with pytest.raises(DriverError, match="cuMemcpyDtoDAsync"):
                    gather(x, y, stream=stream)

            if captured:
                with graph(stream, call) as launch:
                    assert gather._remains.captured
                    del x
                    gc.collect()
                    assert gone() is not None
                    launch()
            else:
                if comm.rank == 0:
                    call()
                    del x
                    gc.collect()
                    assert gone() is not None  # its kernel waits for rank 1
                comm.Barrier()
                if comm.rank == 1:
                    call()
            synchronise(stream)
            gather.check()
            gathers_well(gather, stream)

    run_ranks(2, rank, timeout=60)


# Ends


@pytest.mark.parametrize("how", ["close", "reset"])
def test_the_end_while_the_stream_is_captured_is_refused(how):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, new_stream() as stream:
            gathers_well(gather, stream)

            def capture():
                with pytest.raises(LamportError, match=rf"{how}\(\) while stream .* end the capture first"):
                    getattr(gather, how)()

            with graph(stream, capture):
                gathers_well(gather, stream)

    run_ranks(2, rank, timeout=60)


def test_an_exception_in_a_capture_unmaps_nothing_under_a_waiting_kernel():
    def rank(comm):
        gather = LamportAllGather(comm, 64, **PEER)
        gathers_well(gather)
        with new_stream() as stream:
            if comm.rank == 0:
                gather(to_device(part(0)), stream=stream)  # waits for rank 1, which never calls
                with pytest.raises(KeyError), graph(stream, lambda: leave(gather)):
                    pass
            comm.Barrier()
            synchronise(stream)
        with pytest.raises(PeerTimeout if comm.rank else ClosedError):
            gather.check()
        gather.close()

    def leave(gather):
        with gather:
            raise KeyError("application")

    before = emulator.last_fault()
    run_ranks(2, rank, timeout=60)
    assert emulator.last_fault() is before


def test_events_and_graphs_are_given_back_too():
    def rank(comm):
        before = {}
        for turn in range(4):
            gather = LamportAllGather(comm, 64, **PEER)
            if turn == 0:  # what other tests have kept is given back now
                gather.abandon()
                before = emulator.calls()
                continue
            gathers_well(gather)
            with new_stream() as stream, pytest.raises(KeyError), graph(stream, lambda: {}["missing"]):
                pass
            gather.abandon()
        after = emulator.calls()
        return {name: number - before.get(name, 0) for name, number in after.items()}

    (made,) = run_ranks(1, rank, timeout=60)
    assert made["cuEventDestroy"] == made["cuEventCreate"] >= 3
    assert made["cuGraphDestroy"] == made["cuStreamEndCapture"] == 3


def test_use_after_close():
    def rank(comm):
        gather = LamportAllGather(comm, 64, **PEER)
        x, y = to_device(part(comm.rank)), device_array(8, np.float32)
        call = gather.prepare(x, y)
        gather(x, out=y)
        gather.close()
        for use in (call, lambda: gather(x, out=y), lambda: gather(x), gather.check, gather.reset):
            with pytest.raises(
                ClosedError, match=f"rank {comm.rank}: this LamportAllGather cannot be .*: it is closed"
            ):
                use()
        gather.close()
        gather.abandon()

    run_ranks(2, rank, timeout=60)


def test_a_fresh_host_thread_makes_calls_checks_and_closes():
    def rank(comm):
        gather = LamportAllGather(comm, 64, **PEER)
        x, y = to_device(part(comm.rank)), device_array(8, np.float32)
        gather(x, out=y)
        synchronise()
        failed = []

        def thread():
            try:
                gather(x, out=y)
                gather.prepare(x, y)()
                gather.check()
                gather.close()
            except BaseException as error:
                failed.append(error)

        other = threading.Thread(target=thread)
        other.start()
        other.join()
        assert failed == []
        return y.copy_to_host().tolist()

    expected = np.concatenate([part(0), part(1)]).tolist()
    assert run_ranks(2, rank, timeout=60) == [expected] * 2


def forks(comm):
    gather = LamportAllGather(comm, 64, **PEER)
    x, y = to_device(part(comm.rank)), device_array(4 * comm.size, np.float32)
    call = gather.prepare(x, y)
    gather(x, out=y)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for use in (call, lambda: gather(x, out=y), lambda: gather(x), gather.check, gather.reset):
            try:
                use()
                said.append("nothing")
            except ClosedError as error:
                said.append(str(error))
        gather.close()
        del gather, call
        gc.collect()
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    said = os.read(read, 1 << 16).decode().split("\n")
    gathers_well(gather)  # the parent goes on
    gather.close()
    return said


def test_use_after_a_fork_is_refused_and_the_parent_goes_on():
    for said in mpirun.run(forks, 2):
        assert len(said) == 5
        assert all("the process forked after it was built" in text for text in said)


def python(code, ranks, *, check=True, env=None):
    return mpirun.command(["-W", "error::ResourceWarning", "-c", code], ranks, check=check, env=env, timeout=60)


BEGIN = """
import atexit, numpy as np, os, sys, time
from mpi4py import MPI
from lamport_numba import LamportAllGather, device_array, to_device
from lamport_numba.errors import ClosedError, DriverError, LamportError
comm = MPI.COMM_WORLD
"""


def test_use_while_the_interpreter_ends_is_refused():
    code = f"""import atexit
def late():  # registered before the library's own, so that it runs after it
    try:
        gather(x, out=y)
    except ClosedError as error:
        print("late:", error, flush=True)
atexit.register(late)
{BEGIN}
gather = LamportAllGather(comm, 64, transport="peer", timeout=20)
x, y = to_device(np.ones(4, np.float32)), device_array(8, np.float32)
gather(x, out=y)
y.copy_to_host()
comm.Barrier()
"""
    done = python(code, 2)
    assert done.stdout.count("the interpreter is ending") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["global", "cycle", "in flight"])
def test_exit_without_close_is_quiet(how):
    more = {
        "global": "",
        "cycle": "loop = [gather]; loop.append(loop); del gather",
        "in flight": "gather(x, out=y) if comm.rank == 0 else None",  # waits for a peer that never comes
    }
    code = f"""{BEGIN}
gather = LamportAllGather(comm, 64, transport="peer", timeout=20)
x, y = to_device(np.ones(4, np.float32)), device_array(8, np.float32)
gather(x, out=y)
y.copy_to_host()
comm.Barrier()
{more[how]}
"""
    done = python(code, 2)
    assert done.stderr == ""
    assert done.seconds < 19, "a kernel that waits does not hold up the end of its process"


# Ctrl-C


def test_ctrl_c_ends_a_kernel_that_waits():
    code = f"""{BEGIN}
from helpers.ranks import synchronise
gather = LamportAllGather(comm, 64, transport="peer", timeout=600)
x = to_device(np.ones(4, np.float32))
gather(x)
synchronise()
if comm.rank == 0:
    with gather:
        gather(x)
        print("waiting", os.getpid(), flush=True)
        synchronise()
else:
    try:
        time.sleep(2)
        gather.close()
    except LamportError as error:
        print("other:", type(error).__name__, flush=True)
    os._exit(3)
"""
    argv = [*mpirun.launcher().argv(2), sys.executable, "-c", code]
    process = subprocess.Popen(
        argv, env=environment.of_ranks(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for line in process.stdout:
            if line.startswith("waiting"):
                time.sleep(0.3)
                os.kill(int(line.split()[1]), signal.SIGINT)
                break
        said, problems = process.communicate(timeout=40)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in problems
    assert "other:" in said


def test_ctrl_c_in_close_leaves_nothing_waiting():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=60)
        gathers_well(gather)
        comm.Barrier()
        if comm.rank == 0:
            gather._remains._at_rest = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                gather.close()
            with pytest.raises(ClosedError):
                gathers_well(gather)
        else:
            with pytest.raises(LamportError, match="rank 0 gave up"):
                gather.close()

    run_ranks(2, rank, timeout=60)


# Garbage


def test_garbage_that_was_not_closed_warns_and_gives_everything_back():
    before = emulator.leaks()

    def rank(comm):
        for _ in range(3):
            gather = LamportAllGather(comm, 64, **PEER)
            gathers_well(gather)
            comm.Barrier()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del gather
                gc.collect()
            comm.Barrier()
        return [str(one.message) for one in caught if one.category is ResourceWarning]

    said = run_ranks(1, rank, timeout=60)
    assert said == [["unclosed LamportAllGather of rank 0"]]
    assert emulator.leaks() == before


def test_garbage_whose_kernel_waits_for_a_peer():
    """Its own alarm makes the kernel leave before anything is unmapped: no fault, and no wait for the deadline."""

    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=600)
        gathers_well(gather)
        comm.Barrier()
        if comm.rank == 0:
            gather(to_device(part(0)))
        gone = weakref.ref(gather)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del gather
            while gone() is not None:  # another thread may be collecting
                gc.collect()
        comm.Barrier()
        synchronise()

    before = emulator.leaks(), emulator.last_fault()
    run_ranks(2, rank, timeout=60)
    assert emulator.last_fault() is before[1]
    again = run_ranks(2, lambda comm: LamportAllGather(comm, 64, **PEER).close(), timeout=60)
    assert again == [None, None]
    assert emulator.leaks() == before[0]


def unmap_too_early(comm):
    gather = LamportAllGather(comm, 64, transport="peer", timeout=600)
    gathers_well(gather)
    comm.Barrier()
    if comm.rank == 0:
        gather(to_device(part(0)))
        (channel,) = gather._channels.values()
        with driver.select().current(gather.device):
            channel.memory.abandon()
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            synchronise()
    comm.Barrier()
    os._exit(0 if comm.rank == 0 else 1)


def test_control_memory_unmapped_under_a_waiting_kernel_is_a_fault():
    code = "import test_faults_misuse as t; t.run_ranks(2, t.unmap_too_early, timeout=30)"
    done = mpirun.command(["-c", code], None, check=False)
    assert "illegal address" in done.stderr


def test_buffers_are_held_while_a_call_waits():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            for _ in range(30):
                out = gather(to_device(part(comm.rank)))  # the input is garbage at once
                del out
            gc.collect()
            if comm.rank == 0:
                time.sleep(0.05)
            gathers_well(gather)

    run_ranks(2, rank, timeout=60)


def test_an_error_is_raised_anew_each_time():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=0.2)
        if comm.rank == 0:
            gather(to_device(part(0)))
            synchronise()
        comm.Barrier()
        depths = []
        for _ in range(5):
            with pytest.raises(PeerTimeout) as caught:
                gather.check()
            depths.append(len(caught.traceback))
        gather.close()
        return len(set(depths[1:]))  # the first one waits for late reports

    assert run_ranks(2, rank, timeout=60) == [1, 1]
