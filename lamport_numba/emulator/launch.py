"""Kernel launches: checking a configuration, copying the parameters, and the operation that a launch becomes.

This is the hot path. A configuration that was checked once is known again by its bytes, and so is the place of the
parameters by the bytes of the array of pointers; what is left is to copy them and to queue one object.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from cuda.bindings import driver as cuda

from . import graphs
from .config import CONFIG
from .core import address_of, api, refuse, result
from .engine import ENGINE, UNIT
from .grid import Grid
from .machine import MACHINE
from .modules import Function, function_of
from .streams import Operation, Stream, enqueue, stream_of

__all__ = ["Launch", "Plan"]

_CONFIG: Final = struct.Struct("=7I4xQQI4x")  # CUlaunchConfig
_ATTRIBUTE: Final = 72  # bytes of a CUlaunchAttribute: id, padding, 64 bytes of value
_CLOSE: Final = 4096  # bytes: between two pieces nearer than a page there is no page without one
_string_at = ctypes.string_at
_windows: Final[dict[tuple[int, int], Any]] = {}

_names = cuda.CUlaunchAttributeID
_IGNORE: Final = int(_names.CU_LAUNCH_ATTRIBUTE_IGNORE)
_PROGRAMMATIC: Final = int(_names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
_KNOWN: Final = {int(name): name.name for name in _names}


def _window(address: int, size: int) -> Any:
    """Memory of the host; its ``raw`` is a copy of what is there now."""
    window = _windows.get((address, size))
    if window is None:
        if len(_windows) > 1024:
            _windows.clear()
        window = _windows[address, size] = (ctypes.c_char * size).from_address(address)
    return window


class Plan(NamedTuple):
    """A launch configuration that has been checked."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    programmatic: bool
    occupancy: int


class Launch(Operation):
    """One launch of a kernel in a stream. ``primary``: the launch that its griddepcontrol.wait waits for; ``waits``: in
    how many rounds on end it has got nowhere."""

    __slots__ = ("cost", "function", "grid", "limit", "params", "plan", "primary", "programmatic", "waits")

    def __init__(
        self, function: Function, plan: Plan, params: bytes, programmatic: bool, after: Sequence[Operation] = ()
    ) -> None:
        super().__init__(after)
        self.function = function
        self.plan = plan
        self.params = params
        self.programmatic = programmatic
        self.primary: Operation | None = None
        self.grid: Any = None
        self.cost = UNIT // plan.occupancy
        self.limit = 0
        self.waits = 0

    def start(self) -> None:
        """Set the grid going; the engine runs it."""
        stream, function, plan = self.stream, self.function, self.plan
        assert stream is not None
        device = stream.device
        for mapping in device.multicasts:
            mapping.follow()
        released = True
        if self.programmatic and stream.running:
            previous = stream.last
            assert previous is not None
            if not previous.done:
                released = False
                self.primary = previous
        self.limit = plan.occupancy * device.multiprocessors
        self.grid = Grid(
            function.kernel,
            device.table,
            plan.grid,
            plan.block,
            plan.shared,
            self.params,
            MACHINE.fabric,
            released=released,
            variables=function.module.variables,
        )
        stream.running.append(self)
        device.grids.append(self)

    def end(self) -> None:
        """The grid is over; forget what only a running one needs."""
        self.primary = None
        self.grid = None


def _checked(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    stream: int,
    programmatic: bool,
) -> Plan:
    threads = block[0] * block[1] * block[2]
    if not all(grid) or not all(block):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"grid {grid} or block {block} has an extent of 0")
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"grid {grid} is larger than (2147483647, 65535, 65535)")
    if block[0] > 1024 or block[1] > 1024 or block[2] > 64 or threads > 1024:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"block {block} is larger than (1024, 1024, 64) or 1024 threads")
    if threads > function.kernel.max_threads:
        refuse(
            result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            f"{threads} threads a block; {function.name} takes {function.kernel.max_threads}",
        )
    if shared > max(function.dynamic_limit, 0):
        refuse(
            result.CUDA_ERROR_INVALID_VALUE,
            f"{shared} bytes of dynamic shared memory; {function.name} may have {function.dynamic_limit}",
        )
    occupancy = function.occupancy(threads, shared)
    if occupancy == 0:
        refuse(result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, f"one block of {function.name} does not fit a multiprocessor")
    return Plan(grid, block, shared, stream, programmatic, occupancy)


def _attributes(raw: bytes, count: int) -> bool:
    """Whether programmatic serialisation is asked for; anything else that would matter is refused."""
    programmatic = False
    for i in range(count):
        (kind,) = struct.unpack_from("=i", raw, i * _ATTRIBUTE)
        (value,) = struct.unpack_from("=i", raw, i * _ATTRIBUTE + 8)
        if kind == _PROGRAMMATIC:
            programmatic = value != 0
        elif kind != _IGNORE:
            if kind not in _KNOWN:
                refuse(result.CUDA_ERROR_INVALID_VALUE, f"launch attribute {kind} is not known")
            refuse(result.CUDA_ERROR_NOT_SUPPORTED, f"launch attribute {_KNOWN[kind]} is not emulated")
    return programmatic


def _plan_of(function: Function, config: Any) -> Plan:
    raw = _window(config.getPtr(), _CONFIG.size).raw
    count = raw[48]
    attributes = b""
    if count:
        pointer = int.from_bytes(raw[40:48], "little")
        attributes = _window(pointer, count * _ATTRIBUTE).raw if pointer else b""
    key = (raw[:40], attributes, CONFIG.residency)
    plan = function.plans.get(key)
    if plan is None:
        gx, gy, gz, bx, by, bz, shared, stream, pointer, count = _CONFIG.unpack(raw)
        if count and not pointer:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{count} launch attributes at a null pointer")
        if count > 64:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{count} launch attributes")
        programmatic = _attributes(attributes, count)
        plan = _checked(function, (gx, gy, gz), (bx, by, bz), shared, stream, programmatic)
        if len(function.plans) > 256:
            function.plans.clear()
        function.plans[key] = plan
    return plan


def _params_of(function: Function, given: Any) -> bytes:
    """The parameter block, copied from where ``void *params[]`` points, or made of ((values), (types))."""
    if not function.pointers:
        return b""
    if isinstance(given, tuple):
        return _params_of_tuple(function, given)
    address = given if given.__class__ is int else address_of(given)
    if not address:
        refuse(
            result.CUDA_ERROR_INVALID_VALUE,
            f"{function.name} takes {len(function.kernel.params)} parameters, none given",
        )
    pointers = _window(address, function.pointers).raw
    source = function.layouts.get(pointers)
    if source is None:
        if len(function.layouts) > 256:
            function.layouts.clear()
        runs = _runs(function, struct.unpack(f"={len(function.kernel.params)}Q", pointers))
        source = function.layouts[pointers] = _source(runs, function.kernel.param_bytes)
    return source()


def _source(runs: list[tuple[int, int, int]], total: int) -> Callable[[], bytes]:
    """A function that copies the pieces, with few reads if they lie close together."""
    if len(runs) == 1:
        return partial(_string_at, runs[0][0], total)  # they are in one piece
    reads: list[list[int]] = []  # address and bytes of what is read at once
    places: dict[int, int] = {}  # where each piece lies in all that was read, by its address
    at = 0
    for pointer, size in sorted((pointer, size) for pointer, size, _ in runs):
        if not reads or pointer - sum(reads[-1]) >= _CLOSE:
            at += reads[-1][1] if reads else 0
            reads.append([pointer, size])
        start = reads[-1][0]
        reads[-1][1] = max(reads[-1][1], pointer + size - start)
        places[pointer] = at + pointer - start
    zeros = at + reads[-1][1]
    pieces = itemgetter(*_slices([(places[pointer], size, offset) for pointer, size, offset in runs], zeros))
    padding = bytes(16)
    windows = [_window(low, span) for low, span in reads]
    if len(windows) == 1:
        (window,) = windows
        return lambda: b"".join(pieces(window.raw + padding))
    return lambda: b"".join(pieces(b"".join([*[window.raw for window in windows], padding])))


def _slices(pieces: list[tuple[int, int, int]], zeros: int) -> list[slice]:
    """Slices that make up the parameter block, gaps taken from the zeros that begin at ``zeros``."""
    slices, at = [], 0
    for start, size, offset in pieces:
        if offset > at:
            slices.append(slice(zeros, zeros + offset - at))
        slices.append(slice(start, start + size))
        at = offset + size
    return slices


def _runs(function: Function, pointers: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(address, bytes, offset) of pieces that lie in memory as they do in the parameter block."""
    runs: list[tuple[int, int, int]] = []
    for param, pointer in zip(function.kernel.params, pointers, strict=True):
        if not pointer:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"the pointer to parameter {param.name} is null")
        if runs:
            start, _, offset = runs[-1]
            if pointer - start == param.offset - offset:
                runs[-1] = (start, param.offset - offset + param.size, offset)
                continue
        runs.append((pointer, param.size, param.offset))
    return runs


def _params_of_tuple(function: Function, given: tuple[Any, ...]) -> bytes:
    params = function.kernel.params
    values, types = given if len(given) == 2 else (given[0], ())
    if len(values) != len(params):
        refuse(
            result.CUDA_ERROR_INVALID_VALUE, f"{len(values)} parameters for {function.name}, which takes {len(params)}"
        )
    block = bytearray(function.kernel.param_bytes)
    for param, value, kind in zip(params, values, types or (None,) * len(values), strict=True):
        if kind is None:
            if hasattr(value, "getPtr"):
                data = _string_at(value.getPtr(), param.size)
            elif isinstance(value, IntEnum):
                data = int(value).to_bytes(4, "little")
            else:
                data = bytes(memoryview(value).cast("B"))
        else:
            data = bytes(memoryview(kind(int(value) if hasattr(value, "getPtr") else value)).cast("B"))
        if len(data) != param.size:
            refuse(
                result.CUDA_ERROR_INVALID_VALUE,
                f"parameter {param.name} of {function.name} has {param.size} bytes; {len(data)} given",
            )
        block[param.offset : param.offset + param.size] = data
    return bytes(block)


def _launch(function: Function, plan: Plan, stream: Stream, params: bytes) -> None:
    if function.context is not stream.context:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, "the function was loaded into another context than the stream's")
    if stream.capture is None:
        if stream.legacy:
            graphs.forbid_legacy(stream.context)
        launch = Launch(function, plan, params, plan.programmatic)
        if stream.device.busy or not ENGINE.at_once(stream, launch):
            enqueue(stream, launch)
        if ENGINE.baton is not None:
            ENGINE.hesitate()
    else:
        graphs.add(
            stream,
            "KERNEL",
            lambda after, programmatic: Launch(function, plan, params, programmatic, after),
            plan.programmatic,
        )


@api()
def cuLaunchKernelEx(config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
    function = function_of(f)
    plan = _plan_of(function, config)
    stream = stream_of(plan.stream)
    if extra:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "parameters by 'extra' are not emulated")
    _launch(function, plan, stream, _params_of(function, kernelParams))


@api()
def cuLaunchKernel(
    f: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> None:
    function = function_of(f)
    key = (gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, CONFIG.residency)
    plan = function.plans.get(key)
    if plan is None:
        grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
        plan = function.plans[key] = _checked(function, grid, block, sharedMemBytes, 0, False)
    stream = stream_of(hStream)
    if extra:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "parameters by 'extra' are not emulated")
    _launch(function, plan, stream, _params_of(function, kernelParams))
