"""A piece of work as a graph: captured once, launched as often as wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .driver import Driver, structs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Graph"]

_MODE = structs.CUstreamCaptureMode


class Graph:
    """What ``work()`` queues on ``stream``. The caller keeps the device's context current, and what the work uses.

    The capture is thread-local: a call that may not be made during a capture breaks it. ``relaxed``: it does not.
    """

    def __init__(self, drv: Driver, stream: int, work: Callable[[], object], *, relaxed: bool = False) -> None:
        self._drv = drv
        self._stream = stream
        mode = _MODE.CU_STREAM_CAPTURE_MODE_RELAXED if relaxed else _MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
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
        """Queue it on its stream."""
        self._drv.call("cuGraphLaunch", self._exec, self._stream)

    def close(self) -> None:
        """Destroy it; nothing of it may be running. Idempotent."""
        mine, self._exec = self._exec, None
        if mine is not None:
            self._drv.call("cuGraphExecDestroy", mine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *passing: object) -> None:
        """Wait for its stream, then destroy it."""
        try:
            self._drv.call("cuStreamSynchronize", self._stream)
        finally:
            self.close()
