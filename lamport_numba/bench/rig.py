"""A rig for measurements: one rank's stream, events, graphs and buffers, on either device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import device_array
from ..collectives.launch import Kernel, load
from ..driver import Driver, structs
from ..graphs import Graph

__all__ = ["Rig", "address_of", "name_of"]


def address_of(array: Any) -> int:
    """The device address of an array's first element."""
    return int(array.__cuda_array_interface__["data"][0])


def name_of(transport: Any) -> str:
    """A transport in words, also where the size decides."""
    if isinstance(transport, str):
        return transport
    return ", ".join(f"{name} up to {limit} bytes" for limit, name in transport.items())


class Rig:
    """One stream of one device, its events, kernels by name. The caller keeps the device's context current."""

    def __init__(self, drv: Driver, device: int) -> None:
        self.drv = drv
        self.device = device
        self._kernels: dict[str, Kernel] = {}
        self._events: list[Any] = []
        with drv.current(device):
            self.handle = drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(self.handle)

    def kernel(self, name: str) -> Kernel:
        """The kernel of ``ptx/<name>.ptx``."""
        if name not in self._kernels:
            self._kernels[name] = load(self.drv, self.device, f"{name}.ptx")
        return self._kernels[name]

    def array(self, nbytes: int, dtype: Any = np.float32) -> Any:
        """A new one-dimensional device array of ``nbytes`` bytes."""
        return device_array(nbytes // np.dtype(dtype).itemsize, dtype, device=self.device, drv=self.drv)

    def event(self) -> Any:
        """A new event with a time."""
        event = self.drv.call("cuEventCreate", structs.CUevent_flags.CU_EVENT_DEFAULT)
        self._events.append(event)
        return event

    def record(self, event: Any) -> None:
        """Record ``event`` on the stream."""
        self.drv.call("cuEventRecord", event, self.stream)

    def wait(self, event: Any) -> None:
        """Wait until ``event`` has passed."""
        self.drv.call("cuEventSynchronize", event)

    def microseconds(self, start: Any, end: Any) -> float:
        """Time between two events that have passed."""
        return float(self.drv.call("cuEventElapsedTime", start, end)) * 1e3

    def capture(self, work: Callable[[], object]) -> Graph:
        """What ``work`` queues on the stream, as a graph."""
        return Graph(self.drv, self.stream, work, relaxed=True)

    def repeated(self, call: Callable[[], object], times: int) -> Graph:
        """``call`` so many times, as a graph."""

        def work() -> None:
            for _ in range(times):
                call()

        return self.capture(work)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.drv.call("cuStreamSynchronize", self.stream)

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros, on the stream; ``nbytes`` is a multiple of 4."""
        self.drv.call("cuMemsetD32Async", address, 0, nbytes // 4, self.stream)

    def read(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Copy device memory to the host as 32-bit words, after what the stream has now."""
        into = np.empty(nbytes // 4, np.uint32)
        self.drv.call("cuMemcpyDtoHAsync", into.ctypes.data, address, nbytes, self.stream)
        self.synchronize()
        return into

    def write(self, address: int, words: np.ndarray[Any, Any]) -> None:
        """Copy host memory to the device, on the stream; done on return."""
        held = np.ascontiguousarray(words)
        self.drv.call("cuMemcpyHtoDAsync", address, held.ctypes.data, held.nbytes, self.stream)
        self.synchronize()

    def close(self) -> None:
        """Destroy stream and events; idempotent."""
        events, self._events = self._events, []
        handle, self.handle = self.handle, None
        if handle is not None:
            with self.drv.current(self.device):
                for event in events:
                    self.drv.call("cuEventDestroy", event)
                self.drv.call("cuStreamDestroy", handle)
