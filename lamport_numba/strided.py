"""Copies of strided or misaligned views into contiguous memory, on the stream and inside graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

from .driver import Driver
from .intake import Buffer, contiguous_strides

__all__ = ["ALIGNMENT", "StridedCopy", "needs_copy", "plan"]

ALIGNMENT: Final = 16
_AXES: Final = 8  # of one launch
_BLOCK: Final = 256
_GRID: Final = 4096


def needs_copy(buffer: Buffer) -> bool:
    """Whether a kernel of 16-byte packs cannot read the buffer as it lies."""
    return buffer.strides is not None or buffer.address % ALIGNMENT != 0


def plan(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, list[tuple[int, int]]]:
    """(bytes of a unit, axes as (length in units, stride in bytes), innermost first) that copy the view in C order."""
    axes = [(itemsize, 1)]  # the bytes of an item are an axis too, so that neighbouring items merge into one run
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        inner, step = axes[-1]
        if length == 1:
            continue
        if stride == inner * step:
            axes[-1] = (inner * length, step)
        else:
            axes.append((length, stride))
    run = axes[0][0]
    unit = math.gcd(ALIGNMENT, run, address, *(stride for _, stride in axes[1:]))
    return unit, [*([(run // unit, unit)] if run > unit else []), *axes[1:]]


class StridedCopy:
    """The copy; ``function`` is the kernel of ptx/copy_strided.ptx, loaded into the primary context of the device."""

    def __init__(self, drv: Driver, function: Any) -> None:
        self._drv = drv
        self._function = function

    def __call__(self, buffer: Buffer, target: int, stream: int) -> None:
        """Enqueue a copy of the elements of ``buffer``, in C order, to the address ``target`` (16-byte aligned).

        The caller keeps both memories alive until the copy has passed, and makes the device's context current.
        """
        if target % ALIGNMENT:
            raise ValueError(f"target is {target:#x}; expected a multiple of {ALIGNMENT}")
        if not buffer.nbytes:
            return
        itemsize = buffer.dtype.itemsize
        strides = buffer.strides if buffer.strides is not None else contiguous_strides(buffer.shape, itemsize)
        unit, axes = plan(buffer.address, buffer.shape, strides, itemsize)
        inner, outer = axes[:_AXES], axes[_AXES:]
        units = math.prod(length for length, _ in inner)
        # axes beyond the kernel's eight, outermost first: a launch for each of their positions
        for place, index in enumerate(product(*(range(length) for length, _ in reversed(outer)))):
            offset = sum(i * stride for i, (_, stride) in zip(index, reversed(outer), strict=True))
            self._launch(buffer.address + offset, target + place * units * unit, units, unit, inner, stream)

    def _launch(
        self, source: int, target: int, units: int, unit: int, axes: Sequence[tuple[int, int]], stream: int
    ) -> None:
        padded = [*axes, *[(1, 0)] * (_AXES - len(axes))]
        values = (
            ctypes.c_uint64(source),
            ctypes.c_uint64(target),
            ctypes.c_uint64(units),
            ctypes.c_uint32(unit),
            (ctypes.c_uint64 * _AXES)(*(length for length, _ in padded)),
            (ctypes.c_int64 * _AXES)(*(stride for _, stride in padded)),
        )
        block = min(_BLOCK, -(-units // 32) * 32)
        grid = min(_GRID, -(-units // block))
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        # the driver copies the values before it returns
        launch = (self._function, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
        self._drv.call("cuLaunchKernel", *launch)
