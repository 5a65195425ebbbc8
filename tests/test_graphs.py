"""Streams and graphs of a program's own, on whatever device there is."""

import gc
import weakref

import numpy as np
import pytest
from helpers import mpirun, ranks

from lamport_numba import LamportAllGather, Stream, device_array, emulator, run_ranks, to_device
from lamport_numba.errors import ClosedError, DriverError
from lamport_numba.streams import as_stream


def part(rank, call=0):
    return (np.arange(8) + 100 * rank + 1000 * call).astype(np.float32)


def replay(comm):
    """Eager, then in a graph of three calls that is launched twice with other input."""
    with Stream() as stream, LamportAllGather(comm, 64, transport="peer") as gather:
        x, outs = to_device(part(comm.rank)), [device_array(8 * comm.size, np.float32) for _ in range(3)]
        gather(x, out=outs[0], stream=stream)
        stream.synchronize()
        with stream.graph(lambda: [gather(x, out=out, stream=stream) for out in outs]) as graph:
            for call in (1, 2):
                comm.Barrier()
                x.copy_to_device(part(comm.rank, call))
                graph.launch()
                stream.synchronize()
                gather.check()
                whole = np.concatenate([part(rank, call) for rank in range(comm.size)])
                for out in outs:
                    np.testing.assert_array_equal(out.copy_to_host(), whole)
    return True


@pytest.mark.parametrize("world", [1, 3])
def test_calls_in_a_graph_are_replayed(world):
    assert all(ranks.each(replay, world))


def test_the_example_under_mpirun():
    done = mpirun.command([str(mpirun.ROOT / "examples" / "power_iteration.py")], 4, timeout=100)
    assert "4 ranks: " in done.stdout
    assert "they agree" in done.stdout


def test_a_stream_is_taken_by_its_protocol_and_is_none_of_the_default_ones():
    with Stream() as stream:
        assert as_stream(stream) == stream.handle > 2
        assert repr(stream) == f"<Stream {stream.handle:#x} of device {stream.device}>"
    stream.close()  # idempotent
    assert repr(stream).endswith(", closed>")
    for use in (stream.synchronize, stream.__cuda_stream__, lambda: stream.graph(list)):
        with pytest.raises(ClosedError, match=r"stream 0x[0-9a-f]+ is closed"):
            use()


def test_a_closed_graph_is_not_launched():
    with Stream() as stream:
        graph = stream.graph(list)
        graph.close()
        graph.close()
        with pytest.raises(ClosedError, match="this graph is closed"):
            graph.launch()


def test_what_no_capture_allows_breaks_it_and_the_stream_goes_on():
    with Stream() as stream:
        with pytest.raises(DriverError, match="CAPTURE"):
            stream.graph(stream.synchronize)
        with pytest.raises(KeyError):
            stream.graph(lambda: {}["missing"])
        stream.synchronize()
        stream.graph(list).close()


def test_a_device_that_does_not_exist():
    with pytest.raises(ValueError, match="device"):
        Stream(device=999)


@pytest.mark.skipif(ranks.on_gpu(), reason="counts the emulated driver's calls")
def test_a_stream_lives_as_long_as_the_object_that_uses_it():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer")
        stream = Stream()
        gather(to_device(part(comm.rank)), stream=stream)
        gone, before = weakref.ref(stream), emulator.calls().get("cuStreamDestroy", 0)
        del stream
        gc.collect()
        assert gone() is not None
        gather.close()
        del gather
        gc.collect()
        assert gone() is None
        return emulator.calls()["cuStreamDestroy"] - before

    assert run_ranks(1, rank, timeout=30)[0] >= 2  # the all-gather's own, and ours
