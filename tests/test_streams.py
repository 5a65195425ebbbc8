import gc
import weakref

import numpy as np
import pytest
from helpers.scripted_driver import SUCCESS, scripted

from lamport_numba.driver import structs
from lamport_numba.errors import DriverError, LamportError
from lamport_numba.streams import InFlight, StreamOrder, as_stream, is_capturing

NOT_READY = structs.CUresult.CUDA_ERROR_NOT_READY
NONE = structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
ACTIVE = structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class CudaStream:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


class CudaStreamProperty:
    __cuda_stream__ = (0, 41)


class Indexable:
    def __index__(self):
        return 6


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        (2, 2),
        (0x7F00_1234_5678, 0x7F00_1234_5678),
        (2**64 - 1, 2**64 - 1),
        (np.int64(5), 5),
        (Indexable(), 6),
        (structs.CUstream(77), 77),
        (CudaStream((0, 42)), 42),
        (CudaStream((0, np.uint64(43))), 43),
        (CudaStream((0, structs.CUstream(44))), 44),
        (CudaStreamProperty(), 41),
    ],
)
def test_as_stream(stream, handle):
    found = as_stream(stream)
    assert found == handle
    assert type(found) is int


@pytest.mark.parametrize("stream", [True, False, np.True_, np.False_])
def test_never_a_bool(stream):
    with pytest.raises(TypeError, match="a bool"):
        as_stream(stream)


@pytest.mark.parametrize(
    "stream", ["0", 1.0, object(), [], CudaStream, CudaStream(5), CudaStream((1, 5)), CudaStream(None)]
)
def test_not_a_stream(stream):
    with pytest.raises(TypeError, match="expected"):
        as_stream(stream)


@pytest.mark.parametrize("stream", [-1, 2**64, CudaStream((0, -5))])
def test_no_handle(stream):
    with pytest.raises(ValueError, match="expected a handle"):
        as_stream(stream)


def test_streams_of_numba():
    from numba.cuda.cudadrv import driver as numba_driver

    def made(handle):
        return numba_driver.Stream(structs.CUstream(handle))

    assert as_stream(made(123)) == 123
    assert as_stream(made(0)) == 0


def test_is_capturing():
    drv, _ = scripted(cuStreamIsCapturing=(SUCCESS, ACTIVE))
    assert is_capturing(drv, 5) is True
    drv, _ = scripted()
    assert is_capturing(drv, 5) is False


# Order between streams


def captured_are(*streams):
    return lambda stream: (SUCCESS, ACTIVE if stream in streams else NONE)


def test_order_is_an_event_and_the_host_does_not_wait():
    drv, api = scripted()
    order = StreamOrder(drv)
    for _ in range(3):
        order.after(7, 9)
    event = next(args[0] for name, *args in api.calls if name == "cuEventRecord")
    names = [name for name, *_ in api.calls if name != "cuStreamIsCapturing"]
    assert names == ["cuEventCreate", *["cuEventRecord", "cuStreamWaitEvent"] * 3]
    assert ("cuEventRecord", event, 7) in api.calls
    assert ("cuStreamWaitEvent", 9, event, 0) in api.calls
    order.close()
    order.close()
    assert api.count()["cuEventDestroy"] == 1


@pytest.mark.parametrize(("producer", "consumer"), [(None, 5), (5, 5), (1, 0), (0, 1), (0, 0)])
def test_nothing_to_order(producer, consumer):
    drv, api = scripted()
    StreamOrder(drv).after(producer, consumer)
    assert not api.calls


def test_per_thread_stream_is_not_the_legacy_one():
    drv, api = scripted()
    StreamOrder(drv).after(2, 0)
    assert api.count()["cuStreamWaitEvent"] == 1


def test_capture_of_the_consumer_alone_records_nothing():
    drv, api = scripted(cuStreamIsCapturing=captured_are(9))
    StreamOrder(drv).after(7, 9)
    assert set(api.count()) == {"cuStreamIsCapturing"}


def test_capture_of_both_joins_them():
    drv, api = scripted(cuStreamIsCapturing=captured_are(7, 9))
    StreamOrder(drv).after(7, 9)
    assert api.count()["cuStreamWaitEvent"] == 1


def test_capture_of_the_producer_alone_is_refused():
    drv, api = scripted(cuStreamIsCapturing=captured_are(7))
    with pytest.raises(LamportError, match="0x7 is captured"):
        StreamOrder(drv).after(7, 9)
    assert "cuEventRecord" not in api.count()


# What must live until work has passed


class Thing:
    pass


class Clock:
    """Events that have passed: all recorded before ``now``."""

    def __init__(self):
        self.recorded = {}
        self.time = 0
        self.now = 0

    def record(self, event, stream):
        self.time += 1
        self.recorded[event] = self.time
        return (SUCCESS,)

    def query(self, event):
        return (SUCCESS if self.recorded[event] <= self.now else NOT_READY,)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def held(clock):
    drv, api = scripted(cuEventRecord=clock.record, cuEventQuery=clock.query)
    found = InFlight(drv, group=4)
    found.api = api
    return found


def test_held_until_the_event_has_passed(held, clock):
    thing = Thing()
    seen = weakref.ref(thing)
    held.hold(5, thing)
    del thing
    for _ in range(20):
        held.hold(5, Thing())
    gc.collect()
    assert seen() is not None
    clock.now = clock.time
    held.collect()
    gc.collect()
    assert seen() is None
    assert len(held) == 0


def test_an_event_recorded_before_the_launch_would_not_do(held, clock):
    first, second = Thing(), Thing()
    held.hold(5, first)
    clock.now = clock.time  # the first has passed
    held.hold(5, second)  # in the same group, not passed
    seen = weakref.ref(second)
    del second
    held.collect()
    gc.collect()
    assert seen() is not None


def test_steady_state_creates_nothing(held, clock):
    thing, other = Thing(), Thing()
    for _ in range(1000):
        held.hold(5, thing, other)
        clock.now = clock.time - 3
    assert held.api.count()["cuEventCreate"] <= 3
    assert held.api.count()["cuEventRecord"] == 1000
    assert held.api.count()["cuEventQuery"] <= 600
    assert len(held) < 10


def test_nothing_passes_and_nothing_is_let_go(held):
    things = [Thing() for _ in range(50)]
    seen = [weakref.ref(thing) for thing in things]
    while things:
        held.hold(5, things.pop())
    gc.collect()
    assert all(ref() is not None for ref in seen)


def test_another_stream_gets_an_event_of_its_own(held, clock):
    first, second = Thing(), Thing()
    held.hold(5, first)
    held.hold(6, second)
    recorded = [args for name, *args in held.api.calls if name == "cuEventRecord"]
    assert [stream for _, stream in recorded] == [5, 6]
    assert recorded[0][0] != recorded[1][0]


def test_queries_do_not_break_a_capture(held):
    for _ in range(9):
        held.hold(5, Thing())
    names = [name for name, *_ in held.api.calls]
    for place, name in enumerate(names):
        if name == "cuEventQuery":
            before = names[:place]
            assert before.count("cuThreadExchangeStreamCaptureMode") % 2 == 1


def test_captured_objects_are_kept_until_close_and_nothing_is_recorded(held, clock):
    thing = Thing()
    seen = weakref.ref(thing)
    held.hold_captured(thing, thing)
    held.hold_captured(thing)
    del thing
    assert "cuEventRecord" not in held.api.count()
    assert len(held) == 1
    clock.now = 100
    held.collect()
    gc.collect()
    assert seen() is not None
    held.close()
    gc.collect()
    assert seen() is None


def test_close_waits_and_destroys_what_it_made(held, clock):
    for stream in (5, 6, 7):
        held.hold(stream, Thing())
    held.close()
    held.close()
    count = held.api.count()
    assert count["cuEventSynchronize"] == 3
    assert count["cuEventDestroy"] == count["cuEventCreate"] == 3
    assert len(held) == 0


def test_a_lost_context_is_an_error_not_a_release(held, clock):
    thing = Thing()
    held.hold(5, thing)
    held.api.answers["cuEventQuery"] = (structs.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    with pytest.raises(DriverError, match="cuEventQuery"):
        held.collect()
    assert len(held) == 1
