"""Streams: every spelling of one as a handle, order between two of them, and what must live until work has passed."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any, Final

from .driver import Driver, structs
from .errors import DriverError, LamportError

__all__ = ["LEGACY", "PER_THREAD", "InFlight", "StreamOrder", "as_stream", "is_broken", "is_capturing"]

LEGACY: Final = 1  # the legacy default stream, as handle 0 is too
PER_THREAD: Final = 2
_HIGHEST: Final = 2**64 - 1


def as_stream(stream: Any) -> int:
    """The handle of a stream: 0 for None, else of an int, a CUstream, a numba or cuda.core stream, or any
    __cuda_stream__.

    Raises TypeError for anything else (a bool too), ValueError for a number that is no handle.
    """
    if stream is None:
        return 0
    if type(stream) is not int:
        stream = _handle(stream)
    if not 0 <= stream <= _HIGHEST:
        raise ValueError(f"stream is {stream}; expected a handle from 0 to 2**64 - 1")
    return int(stream)


def _handle(stream: Any) -> int:
    kind = type(stream)
    if isinstance(stream, bool) or kind.__name__ in ("bool_", "bool"):
        raise TypeError(f"stream is {stream!r}, a bool; expected None, an int handle or a stream object")
    if isinstance(stream, structs.CUstream):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None and not isinstance(stream, type):
        answer = protocol() if callable(protocol) else protocol  # early cuda.core had a property
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"__cuda_stream__ of {kind.__name__} gave {answer!r}; expected (0, handle)")
        version, handle = answer
        if version != 0:
            raise TypeError(f"__cuda_stream__ of {kind.__name__} has version {version!r}; expected 0")
        return int(handle)
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(
            f"stream is of type {kind.__name__}; expected None, an int handle, a numba or cuda.core stream, or an "
            "object with __cuda_stream__ (of older libraries pass the int: torch's cuda_stream, cupy's ptr)"
        ) from None


def is_capturing(drv: Driver, stream: int, name: str = "stream") -> bool:
    """Whether the stream is being captured into a graph. ValueError if the driver knows no such stream.

    ``name``: what the stream is called in the message.
    """
    try:
        status = drv.call("cuStreamIsCapturing", stream)
    except DriverError as error:
        if error.code != structs.CUresult.CUDA_ERROR_INVALID_HANDLE:
            raise
        raise ValueError(
            f"{name} is {stream} ({stream:#x}), which is no stream of this device ({error.code_name}); expected None, "
            "or a handle or an object of a stream that was made on it and is not destroyed"
        ) from error
    return bool(status != structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def is_broken(drv: Driver, stream: int) -> bool:
    """Whether the stream's capture has come to nothing: something was done that breaks it."""
    code, *status = drv.api.cuStreamIsCapturing(stream)
    return not code and status[0] == structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED


class StreamOrder:
    """Makes one stream wait for what another has now, by an event, without the host waiting.

    One object serves one device and one thread at a time; it holds a single event, since a wait keeps what was
    recorded when it was enqueued.
    """

    def __init__(self, drv: Driver) -> None:
        self._drv = drv
        self._event: Any = None

    def after(self, producer: int | None, consumer: int) -> None:
        """Later work of ``consumer`` starts after the present work of ``producer`` (None: nothing to wait for).

        While ``consumer`` is captured, a producer outside of the capture is not waited for: the graph is replayed
        later, and its launches are the caller's to order. Raises LamportError if only the producer is being captured,
        ValueError for a stream that does not exist.
        """
        if producer is None or (producer or LEGACY) == (consumer or LEGACY):
            return
        drv = self._drv
        captured = is_capturing(drv, producer, "the array's own stream")
        if is_capturing(drv, consumer) != captured:
            if captured:
                raise LamportError(
                    f"the array's own stream {producer:#x} is captured into a graph and stream {consumer:#x} is not: "
                    "pass the captured stream as stream="
                )
            return
        if self._event is None:
            self._event = drv.call("cuEventCreate", structs.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        drv.call("cuEventRecord", self._event, producer)
        drv.call("cuStreamWaitEvent", consumer, self._event, 0)

    def close(self) -> None:
        """Destroy the event; idempotent."""
        event, self._event = self._event, None
        if event is not None:
            self._drv.call("cuEventDestroy", event)


class _Group:
    """Some calls on one stream that share an event, recorded anew after each of them."""

    __slots__ = ("calls", "event", "objects", "stream")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.stream = -1
        self.calls = 0
        self.objects: list[Any] = []


class InFlight:
    """Holds objects until the work that was enqueued before ``hold`` has passed on the device.

    ``hold`` records one event; every ``group`` calls one older event is asked whether it has passed, and what it
    guarded is let go. Groups and events are used again, so that a steady program allocates nothing. Objects of calls
    that are captured into a graph are kept until ``close``, because the graph may be replayed at any time.
    """

    def __init__(self, drv: Driver, group: int = 16) -> None:
        self._drv = drv
        self._record = drv.api.cuEventRecord
        self._size = group
        self._waiting: deque[_Group] = deque()  # oldest first; the last is the open one
        self._free: list[_Group] = []
        self._captured: dict[int, Any] = {}
        self._open: _Group | None = None

    def __len__(self) -> int:
        """How many references are held now, captured ones included."""
        waiting = sum(item is not None for group in self._waiting for item in group.objects)
        return waiting + len(self._captured)

    def hold(self, stream: int, first: Any, second: Any = None) -> None:
        """Keep one or two objects until the work that ``stream`` has now is done. Call it right after the launch."""
        group = self._open
        if group is None or group.stream != stream or group.calls >= self._size:
            group = self._turn(stream)
        group.calls += 1
        objects = group.objects
        if not objects or objects[-1] is not second or objects[-2] is not first:  # the same buffers call after call
            objects.append(first)
            objects.append(second)
        answer = self._record(group.event, stream)
        if answer[0] != 0:
            raise self._drv.error("cuEventRecord", answer[0])

    def hold_captured(self, *objects: Any) -> None:
        """Keep objects of a call that was captured into a graph; nothing is recorded."""
        for item in objects:
            self._captured[id(item)] = item

    def collect(self) -> None:
        """Let go of what has passed by now."""
        with self._drv.relaxed():
            while self._waiting and self._passed(self._waiting[0]):
                group = self._waiting.popleft()
                if group is self._open:
                    self._open = None
                group.objects.clear()
                group.calls = 0
                self._free.append(group)

    def close(self, *, wait: bool = True) -> None:
        """Wait for everything held (unless ``wait`` is false), let it go, destroy the events; idempotent."""
        groups = [*self._waiting, *self._free]
        if wait:
            with self._drv.relaxed():
                for group in self._waiting:
                    self._drv.call("cuEventSynchronize", group.event)
        self._waiting.clear()
        self._free.clear()
        self._captured.clear()
        self._open = None
        for group in groups:
            self._drv.call("cuEventDestroy", group.event)

    def _turn(self, stream: int) -> _Group:
        """Open another group for ``stream``, after letting go of what has passed."""
        self._open = None
        self.collect()
        if self._free:
            group = self._free.pop()
        else:
            group = _Group(self._drv.call("cuEventCreate", structs.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        group.stream = stream
        self._waiting.append(group)
        self._open = group
        return group

    def _passed(self, group: _Group) -> bool:
        code = self._drv.api.cuEventQuery(group.event)[0]
        if code == structs.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code != 0:
            raise self._drv.error("cuEventQuery", code)
        return True
