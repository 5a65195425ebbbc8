"""A stream of one's own, and a piece of work as a graph: captured once, launched as often as wanted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from .driver import Driver, select, structs
from .errors import ClosedError, DriverError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Graph", "Stream"]

_MODE = structs.CUstreamCaptureMode


class Stream:
    """A stream of this rank's device, a GPU or the emulated one, for ``stream=``. It does not wait for the default one.

        with Stream() as stream:
            call = gather.prepare(x, y, stream)
            with stream.graph(lambda: [call() for _ in range(100)]) as graph:
                graph.launch()
                stream.synchronize()

    Close it after whatever was given it; an all-gather wants its stream until its own ``close``.

    Args:
        device: ordinal; None takes the current context's, else this rank's.

    Raises DriverError; ValueError if there is no such device.
    """

    def __init__(self, device: int | None = None) -> None:
        drv = self._drv = select()
        self.device = drv.default_device() if device is None else drv.checked_device(device)
        with drv.current(self.device):
            self._handle = int(drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._finalizer = weakref.finalize(self, _destroy, drv, self.device, self._handle)
        self._finalizer.atexit = False

    @property
    def handle(self) -> int:
        """The CUstream as a number. Raises ClosedError once it is closed."""
        if not self._finalizer.alive:
            raise ClosedError(f"stream {self._handle:#x} is closed")
        return self._handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """(0, handle): the protocol by which libraries take each other's streams."""
        return 0, self.handle

    def __repr__(self) -> str:
        return f"<Stream {self._handle:#x} of device {self.device}{'' if self._finalizer.alive else ', closed'}>"

    def graph(self, work: Callable[[], object]) -> Graph:
        """What ``work()`` queues on this stream, as a graph. Nothing runs before its ``launch``.

        Raises what ``work`` raises, and DriverError, if it did what no capture allows (to synchronise, for instance).
        """
        return Graph(self._drv, self.handle, work, device=self.device)

    def synchronize(self) -> None:
        """Wait for all that was queued. Raises DriverError."""
        with self._drv.current(self.device):
            self._drv.call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Wait for all that was queued, then destroy it; idempotent."""
        if self._finalizer.alive:
            self.synchronize()
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *passing: object) -> None:
        self.close()


def _destroy(drv: Driver, device: int, handle: int) -> None:
    with suppress(DriverError), drv.current(device):
        drv.call("cuStreamDestroy", handle)


class Graph:
    """What ``work()`` queues on ``stream``. Keep what the work uses for as long as it is launched.

    The capture is thread-local: a call that may not be made during a capture breaks it. ``relaxed``: it does not.
    Without ``device`` the caller keeps the device's context current.
    """

    def __init__(
        self,
        drv: Driver,
        stream: int,
        work: Callable[[], object],
        *,
        relaxed: bool = False,
        device: int | None = None,
    ) -> None:
        self._drv = drv
        self._stream = stream
        self._device = device
        mode = _MODE.CU_STREAM_CAPTURE_MODE_RELAXED if relaxed else _MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with self._context():
            drv.call("cuStreamBeginCapture", stream, mode)
            try:
                work()
            except BaseException:
                _, *graph = drv.api.cuStreamEndCapture(stream)
                if graph and graph[0]:
                    drv.call("cuGraphDestroy", graph[0])
                raise
            graph = drv.call("cuStreamEndCapture", stream)
            try:
                self._exec: Any = drv.call("cuGraphInstantiate", graph, 0)
            finally:
                drv.call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Queue it on its stream. Raises DriverError, or ClosedError once it is closed."""
        if self._exec is None:
            raise ClosedError("this graph is closed")
        with self._context():
            self._drv.call("cuGraphLaunch", self._exec, self._stream)

    def close(self) -> None:
        """Destroy it; nothing of it may be running. Idempotent."""
        mine, self._exec = self._exec, None
        if mine is not None:
            with self._context():
                self._drv.call("cuGraphExecDestroy", mine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *passing: object) -> None:
        """Wait for its stream, then destroy it."""
        try:
            with self._context():
                self._drv.call("cuStreamSynchronize", self._stream)
        finally:
            self.close()

    def _context(self) -> Any:
        return nullcontext() if self._device is None else self._drv.current(self._device)
