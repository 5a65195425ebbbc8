"""Streams and events, and the operations that wait in a stream.

A stream is a queue of operations that have not started and a short list of those that run. Only kernels run for any
time: everything else is done the moment it starts.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as cuda

from .core import address_of, api, handle, refuse, result
from .machine import MACHINE, Context, current, sequence

if TYPE_CHECKING:
    from .graphs import Capture

__all__ = ["Event", "Marker", "Operation", "Stream", "Work", "enqueue", "stream_of"]

NON_BLOCKING: Final = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
LEGACY, PER_THREAD = 1, 2  # handles that stand for a default stream


class Operation:
    """Something to be done in a stream. ``after``: operations of other streams that must be done first."""

    __slots__ = ("after", "done", "number", "stream")

    programmatic = False

    def __init__(self, after: Sequence[Operation] = ()) -> None:
        self.after = after
        self.done = False
        self.number = 0
        self.stream: Stream | None = None

    def start(self) -> None:
        """Do it, or set it going; with the engine's turn held."""
        raise NotImplementedError


class Work(Operation):
    """A copy, a fill, or a host function: done when it starts."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None], after: Sequence[Operation] = ()) -> None:
        super().__init__(after)
        self.action = action

    def start(self) -> None:
        self.action()
        self.done = True


class Marker(Operation):
    """A point of a stream: an event's record, a wait for other streams, the end of a graph. Keeps its time."""

    __slots__ = ("time",)

    def __init__(self, after: Sequence[Operation] = ()) -> None:
        super().__init__(after)
        self.time = 0

    def start(self) -> None:
        self.time = MACHINE.fabric.now()
        self.done = True


class Stream:
    """A stream of one context."""

    def __init__(self, context: Context, flags: int, priority: int, *, legacy: bool = False) -> None:
        number = LEGACY if legacy else handle()
        self.handle = cuda.CUstream(number)
        self.number = number
        self.context = context
        self.device = context.device
        self.flags = flags
        self.priority = priority
        self.legacy = legacy
        self.blocking = not legacy and not flags & NON_BLOCKING
        self.queue: deque[Operation] = deque()
        self.running: list[Any] = []  # kernels that have started and not ended
        self.last: Operation | None = None  # what started last
        self.capture: Capture | None = None

    @property
    def idle(self) -> bool:
        """Whether everything that was queued is done."""
        return not self.queue and not self.running

    def oldest(self) -> int:
        """The number of the oldest operation that is not done; 0 if there is none."""
        if self.running:
            return int(self.running[0].number)
        return self.queue[0].number if self.queue else 0


def enqueue(stream: Stream, operation: Operation) -> None:
    """Queue an operation of a stream that is not being captured."""
    from .engine import ENGINE

    operation.stream = stream
    operation.number = next(sequence)
    stream.queue.append(operation)
    if stream not in stream.device.busy:
        ENGINE.busy(stream)


def stream_of(number: Any) -> Stream:
    """The stream of a handle in the current context; 0 and 1 are the legacy stream, 2 is the thread's own."""
    if number.__class__ is not int:
        number = address_of(number)
    context = current()
    if number > PER_THREAD:
        stream = context.streams.get(number)
        if stream is not None:
            return stream
        for other in list(MACHINE.contexts.values()):  # a stream brings its own context along
            if number in other.streams:
                if other.error is not None:
                    refuse(other.error, "an earlier kernel ruined the stream's context")
                return other.streams[number]
        refuse(result.CUDA_ERROR_INVALID_HANDLE, f"no stream {number:#x} (destroyed?)")
    if number < 0:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, f"no stream {number}")
    if number != PER_THREAD:
        return context.legacy
    own = MACHINE.local.streams.get(context)
    if own is None:
        own = MACHINE.local.streams[context] = Stream(context, 0, 0)
        context.streams[own.number] = own
    return own


class Event:
    """An event of one context: it stands for the record that was made last."""

    def __init__(self, context: Context, flags: int) -> None:
        self.handle = cuda.CUevent(handle())
        self.context = context
        self.timing = not flags & int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self.record: Marker | None = None
        self.captured: tuple[Any, tuple[int, ...]] | None = (
            None  # (capture, nodes) if recorded in a stream that is captured
        )

    @property
    def done(self) -> bool:
        """Whether the last record has passed; one that was never recorded counts as passed."""
        return self.record is None or self.record.done


EVENTS: Final[dict[int, Event]] = {}


def event_of(number: Any) -> Event:
    """The event of a handle."""
    event = EVENTS.get(int(number))
    if event is None:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, f"no event {int(number):#x} (destroyed?)")
    return event


# Streams


@api(1)
def cuStreamCreate(flags: int) -> Any:
    return _create(flags, 0)


@api(1)
def cuStreamCreateWithPriority(flags: int, priority: int) -> Any:
    return _create(flags, priority)


def _create(flags: int, priority: int) -> Any:
    context = current()
    if int(flags) & ~NON_BLOCKING:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"stream flags {int(flags)}; expected 0 or CU_STREAM_NON_BLOCKING")
    stream = Stream(context, int(flags), min(max(priority, -5), 0))
    context.streams[stream.number] = stream
    return stream.handle


@api()
def cuStreamDestroy(hStream: Any) -> None:
    stream = stream_of(hStream)
    if stream.number not in stream.context.streams or int(hStream) == PER_THREAD:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, "a default stream cannot be destroyed")
    if stream.capture is not None:
        stream.capture.abandon()
    del stream.context.streams[stream.number]  # what is queued still runs, as on hardware


@api()
def cuStreamSynchronize(hStream: Any) -> None:
    from .engine import ENGINE

    stream = stream_of(hStream)
    context = stream.context
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is being captured")
    if stream.legacy:
        _no_capture(context, stream)
    if stream.queue or stream.running:
        ENGINE.wait_stream(stream)
    if context.error is not None:
        refuse(context.error)


@api()
def cuStreamQuery(hStream: Any) -> None:
    from .engine import ENGINE

    stream = stream_of(hStream)
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is being captured")
    if not stream.idle:
        ENGINE.glance()
    if stream.context.error is not None:
        refuse(stream.context.error)
    if not stream.idle:
        refuse(result.CUDA_ERROR_NOT_READY)


def _no_capture(context: Context, stream: Stream) -> None:
    from . import graphs

    graphs.forbid_legacy(context)


@api(1)
def cuStreamGetPriority(hStream: Any) -> int:
    return stream_of(hStream).priority


@api(1)
def cuStreamGetFlags(hStream: Any) -> int:
    return stream_of(hStream).flags


@api(1)
def cuStreamGetId(hStream: Any) -> int:
    return stream_of(hStream).number


@api(1)
def cuStreamGetCtx(hStream: Any) -> Any:
    return stream_of(hStream).context.handle


@api(1)
def cuStreamGetDevice(hStream: Any) -> Any:
    return cuda.CUdevice(stream_of(hStream).device.index)


@api()
def cuStreamWaitEvent(hStream: Any, hEvent: Any, flags: int) -> None:
    from . import graphs

    stream, event = stream_of(hStream), event_of(hEvent)
    if int(flags) != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {int(flags)}; only 0 is supported")
    if event.captured is not None:
        graphs.join(stream, event)
        return
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "the stream would wait for work outside its capture")
    if event.record is not None and not event.record.done:
        enqueue(stream, Marker((event.record,)))


@api()
def cuLaunchHostFunc(hStream: Any, fn: Any, userData: Any) -> None:
    from . import graphs

    stream = stream_of(hStream)
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    function = prototype(int(fn)) if hasattr(fn, "__int__") else fn
    argument = address_of(userData)

    def work(after: Sequence[Operation] = ()) -> Work:
        return Work(lambda: function(argument), after)

    graphs.submit(stream, work, "HOST")


# Events


@api(1)
def cuEventCreate(flags: int) -> Any:
    if int(flags) & ~7:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"event flags {int(flags)}")
    if int(flags) & int(cuda.CUevent_flags.CU_EVENT_INTERPROCESS):
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "events between processes are not emulated")
    event = Event(current(), int(flags))
    EVENTS[int(event.handle)] = event
    return event.handle


@api()
def cuEventDestroy(hEvent: Any) -> None:
    event = event_of(hEvent)
    EVENTS.pop(int(event.handle), None)


@api()
def cuEventRecord(hEvent: Any, hStream: Any) -> None:
    _record(hEvent, hStream, 0)


@api()
def cuEventRecordWithFlags(hEvent: Any, hStream: Any, flags: int) -> None:
    _record(hEvent, hStream, int(flags))


def _record(number: Any, hStream: Any, flags: int) -> None:
    from . import graphs

    event, stream = event_of(number), stream_of(hStream)
    if flags != 0:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "external events in a capture are not emulated")
    if event.context is not stream.context:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, "the event belongs to another context than the stream")
    if stream.capture is not None:
        graphs.record(stream, event)
        return
    event.captured = None
    marker = Marker()
    event.record = marker
    enqueue(stream, marker)


@api()
def cuEventQuery(hEvent: Any) -> None:
    from . import graphs
    from .engine import ENGINE

    event = event_of(hEvent)
    _not_captured(event)
    graphs.forbid_unsafe("cuEventQuery")  # undocumented; reported in public
    if event.record is not None and not event.record.done:
        ENGINE.glance()
    if event.context.error is not None:
        refuse(event.context.error)
    if not event.done:
        refuse(result.CUDA_ERROR_NOT_READY)


@api()
def cuEventSynchronize(hEvent: Any) -> None:
    from .engine import ENGINE

    event = event_of(hEvent)
    _not_captured(event)
    record, context = event.record, event.context
    if record is not None and not record.done:
        ENGINE.wait(lambda: record.done or context.error is not None)
    if context.error is not None:
        refuse(context.error)


def _not_captured(event: Event) -> None:
    if event.captured is not None:
        event.captured[0].invalidate()
        refuse(result.CUDA_ERROR_CAPTURED_EVENT, "the event was last recorded in a stream that is captured")


@api(1)
def cuEventElapsedTime(hStart: Any, hEnd: Any) -> float:
    start, end = event_of(hStart), event_of(hEnd)
    if not (start.timing and end.timing) or start.record is None or end.record is None:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, "an event has no timing or was never recorded")
    if not (start.record.done and end.record.done):
        refuse(result.CUDA_ERROR_NOT_READY)
    return (end.record.time - start.record.time) / 1e6
