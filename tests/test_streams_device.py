"""Order and retention on real streams. Runs on the device that the environment names."""

import gc
import weakref

import numpy as np
import pytest

from lamport_numba import driver
from lamport_numba.arrays import device_array, to_device
from lamport_numba.driver import structs
from lamport_numba.errors import LamportError
from lamport_numba.intake import as_buffer
from lamport_numba.streams import InFlight, StreamOrder, as_stream, is_capturing

THREAD_LOCAL = structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
GLOBAL = structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def at(array):
    """The address of an array."""
    return int(array.__cuda_array_interface__["data"][0])


@pytest.fixture(scope="module")
def drv():
    found = driver.select()
    with found.current(0):
        yield found


@pytest.fixture
def streams(drv):
    flags = structs.CUstream_flags.CU_STREAM_NON_BLOCKING
    made = [drv.call("cuStreamCreate", flags) for _ in range(2)]
    yield [as_stream(stream) for stream in made]
    for stream in made:
        drv.call("cuStreamDestroy", stream)


def test_a_copy_ordered_after_another_stream_sees_its_work(drv, streams):
    producer, consumer = streams
    order = StreamOrder(drv)
    source, target = device_array(4096, "u4", drv=drv), device_array(4096, "u4", drv=drv)
    for value in range(1, 20):
        drv.call("cuMemsetD32Async", at(source), value, 4096, producer)
        order.after(producer, consumer)
        drv.call("cuMemcpyDtoDAsync", at(target), at(source), 4 * 4096, consumer)
        drv.call("cuStreamSynchronize", consumer)
        assert np.all(target.copy_to_host() == value)
    order.close()


def test_capture_of_the_consumer_survives_a_producer_outside(drv, streams):
    producer, consumer = streams
    order = StreamOrder(drv)
    array = to_device(np.zeros(8, "u4"), drv=drv)
    drv.call("cuStreamBeginCapture", consumer, GLOBAL)
    assert is_capturing(drv, consumer)
    order.after(producer, consumer)
    order.after(1, consumer)
    drv.call("cuMemsetD32Async", at(array), 7, 8, consumer)
    graph = drv.call("cuStreamEndCapture", consumer)
    runnable = drv.call("cuGraphInstantiate", graph, 0)
    drv.call("cuGraphLaunch", runnable, consumer)
    drv.call("cuStreamSynchronize", consumer)
    assert np.all(array.copy_to_host() == 7)
    drv.call("cuGraphExecDestroy", runnable)
    drv.call("cuGraphDestroy", graph)


def test_capture_of_the_producer_alone_is_refused_and_survives(drv, streams):
    producer, consumer = streams
    drv.call("cuStreamBeginCapture", producer, THREAD_LOCAL)
    with pytest.raises(LamportError, match="pass the captured stream"):
        StreamOrder(drv).after(producer, consumer)
    drv.call("cuGraphDestroy", drv.call("cuStreamEndCapture", producer))


def test_buffers_live_until_their_work_is_done(drv, streams):
    stream, _ = streams
    held = InFlight(drv, group=4)
    seen = []
    for turn in range(50):
        array = device_array(1024, "u4", drv=drv)
        seen.append(weakref.ref(array))
        drv.call("cuMemsetD32Async", at(array), turn, 1024, stream)
        held.hold(stream, array)
        del array
    drv.call("cuStreamSynchronize", stream)
    held.collect()
    gc.collect()
    assert len(held) == 0
    assert all(ref() is None for ref in seen)
    held.close()


def test_holding_does_not_break_the_capture_of_another_stream(drv, streams):
    eager, captured = streams
    held = InFlight(drv, group=2)
    drv.call("cuStreamBeginCapture", captured, GLOBAL)
    for _ in range(9):
        held.hold(eager, device_array(16, "u4", drv=drv))
    held.collect()
    drv.call("cuGraphDestroy", drv.call("cuStreamEndCapture", captured))  # 901 if the capture had been broken
    held.close()


def test_without_the_relaxed_mode_a_capture_is_broken(drv, streams):
    """The control: the same allocation as ``device_array`` makes, in the capture's own mode."""
    _, captured = streams
    drv.call("cuStreamBeginCapture", captured, GLOBAL)
    assert drv.api.cuMemAlloc(64)[0] == structs.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert drv.api.cuStreamEndCapture(captured)[0] == structs.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_a_query_breaks_a_capture_too(drv, streams):
    eager, captured = streams
    event = drv.call("cuEventCreate", 0)
    drv.call("cuEventRecord", event, eager)
    drv.call("cuStreamBeginCapture", captured, GLOBAL)
    assert drv.api.cuEventQuery(event)[0] == structs.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert drv.api.cuStreamEndCapture(captured)[0] == structs.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    drv.call("cuEventDestroy", event)


def test_interface_stream_of_a_producer(drv, streams):
    producer, consumer = streams
    array = device_array(8, "u4", drv=drv)

    class Bound:
        @property
        def __cuda_array_interface__(self):
            return {**array.__cuda_array_interface__, "stream": producer}

    drv.call("cuMemsetD32Async", at(array), 3, 8, producer)
    buffer = as_buffer(Bound(), drv, 0, stream=consumer)
    order = StreamOrder(drv)
    order.after(buffer.stream, consumer)
    target = device_array(8, "u4", drv=drv)
    drv.call("cuMemcpyDtoDAsync", at(target), buffer.address, 32, consumer)
    drv.call("cuStreamSynchronize", consumer)
    assert np.all(target.copy_to_host() == 3)
    order.close()
