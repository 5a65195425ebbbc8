"""Kernels of ours: loaded once a device, launched with a parameter block that is packed once.

A parameter block is a ctypes value for each parameter and an array of their addresses, which is what cuLaunchKernelEx
takes. A launch then rewrites the two or three values that changed and makes one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import ptx
from ..driver import Driver, structs
from ..errors import DriverError

__all__ = ["Block", "Kernel", "load", "wide"]

_modules: dict[tuple[str, int, str], Any] = {}


class Kernel:
    """One entry of a PTX file, loaded on one device. The device's context is current when it is made and launched."""

    def __init__(self, drv: Driver, device: int, module: Any, name: str) -> None:
        self.drv = drv
        self.name = name
        self.module = module
        self.function = drv.call("cuModuleGetFunction", module, name.encode())
        self.multiprocessors = drv.attribute(device, "MULTIPROCESSOR_COUNT")

    def resident_ctas(self, threads: int, shared_bytes: int = 0) -> int:
        """How many CTAs of ``threads`` threads the device holds at once: a grid of spinning threads may not be
        larger.
        """
        each = self.drv.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.function, threads, shared_bytes)
        return int(each) * self.multiprocessors


def load(drv: Driver, device: int, file: str, *, text: str | None = None) -> Kernel:
    """Load ``file`` of the ptx folder, whose entry has the file's name; ``text`` stands in for the file's own.

    A text is loaded once a device and stays for the life of the process, so that instances by the hundred do not add
    up. A module that a reset of the context has taken away is loaded anew.
    """
    name, text = file.removesuffix(".ptx"), ptx.read(file) if text is None else text
    key = drv.kind, device, text
    if key in _modules:
        with suppress(DriverError):
            return Kernel(drv, device, _modules[key], name)
    module = _modules[key] = drv.load_module(text)
    return Kernel(drv, device, module, name)


def wide(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """A parameter of 64-bit words."""
    return (ctypes.c_uint64 * len(values))(*values)


class Block:
    """A launch with everything packed: parameters in the kernel's order, grid, block, stream, attributes."""

    def __init__(
        self,
        kernel: Kernel,
        parameters: Sequence[Any],
        *,
        grid: tuple[int, int],
        threads: int | tuple[int, int],
        stream: int,
        pdl: bool,
    ) -> None:
        self.kernel = kernel
        self.parameters = tuple(parameters)
        self._pointers = (ctypes.c_void_p * len(self.parameters))(*(ctypes.addressof(p) for p in self.parameters))
        config = structs.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        wide, high = (threads, 1) if isinstance(threads, int) else threads
        config.blockDimX, config.blockDimY, config.blockDimZ = wide, high, 1
        config.sharedMemBytes = 0
        config.hStream = structs.CUstream(stream)
        if pdl:
            attribute = structs.CUlaunchAttribute()
            attribute.id = structs.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self.config = config
        self.stream = stream
        self.arguments = (config, kernel.function, ctypes.addressof(self._pointers), 0)
        self._enqueue = kernel.drv.api.cuLaunchKernelEx

    def launch(self) -> None:
        """Queue the kernel on the block's stream. Raises DriverError."""
        answer = self._enqueue(*self.arguments)
        if answer[0]:
            raise self.kernel.drv.error("cuLaunchKernelEx", answer[0])
