"""Copies and fills, at once or in a stream.

Host memory that was not allocated or registered through the driver is read before an asynchronous call returns, and
written before it returns, as drivers do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import graphs
from .core import address_of, api, refuse, result
from .engine import ENGINE
from .grid import Access, Kind
from .machine import MACHINE, Context, current
from .memory import MEMORY
from .streams import Operation, Stream, Work, stream_of

__all__ = ["copy", "fill"]

_DEVICE, _HOST, _EITHER = "device", "host", "either"
_move: Final = ctypes.memmove


def _device_range(context: Context, address: int, size: int, access: Access) -> None:
    device = context.device
    problem = device.table.check(address, size, access)
    if problem is not None and _through_peer(address, size, access) is not None:
        for mapping in device.multicasts:
            mapping.follow()
        problem = device.table.check(address, size, access) or problem
        why = MEMORY.explain(device, address)
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes at {address:#x}: {problem}{why}")


def _through_peer(address: int, size: int, access: Access) -> str | None:
    """Plain memory of another device can be copied without peer access: None if it is that, else what is wrong."""
    region = MEMORY.region(address)
    if region is None or region.device is None or region.mapping is not None:
        return "not memory of a device"
    return region.device.table.check(address, size, access)


def _checked(context: Context, address: int, size: int, kind: str, access: Access) -> bool:
    """Check one side of a copy; whether it is memory of the driver (so that the copy may run later)."""
    if kind == _HOST:
        region = MEMORY.region(address)
        if region is None:
            return False
        if not region.host and kind == _HOST:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is memory of a device; a host address is expected")
        return True
    if kind == _EITHER and MEMORY.region(address) is None and not _multicast(context, address):
        return False
    _device_range(context, address, size, access)
    return True


def _multicast(context: Context, address: int) -> bool:
    entry = context.device.table.find(address)
    return entry is not None and entry.kind == Kind.MULTICAST


def copy(stream: Stream, target: Any, source: Any, size: int, to: str, of: str, wait: bool) -> None:
    """Copy ``size`` bytes in a stream; ``to`` and ``of`` say what the addresses are."""
    context = stream.context
    into, out = address_of(target), address_of(source)
    if size < 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{size} bytes")
    if size == 0:
        return
    if not into or not out:
        refuse(result.CUDA_ERROR_INVALID_VALUE, "a null pointer")
    lasting_target = _checked(context, into, size, to, Access.WRITE)
    lasting_source = _checked(context, out, size, of, Access.READ)
    if stream.capture is None:
        if not lasting_source:
            data = ctypes.string_at(out, size)
            _do(stream, lambda: _move(into, data, size), wait or not lasting_target, "MEMCPY")
            return
        wait = wait or not lasting_target
    _do(stream, lambda: _move(into, out, size), wait, "MEMCPY", source if of == _HOST else None)


def fill(stream: Stream, target: Any, value: int, width: int, count: int, wait: bool) -> None:
    """Set ``count`` elements of ``width`` bytes to ``value`` in a stream."""
    base = address_of(target)
    if count < 0 or base % width:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"{count} elements of {width} bytes at {base:#x}")
    if count == 0:
        return
    _device_range(stream.context, base, count * width, Access.WRITE)
    pattern = int(value & ((1 << 8 * width) - 1)).to_bytes(width, "little")

    def action() -> None:
        if len(set(pattern)) == 1:
            ctypes.memset(base, pattern[0], count * width)
            return
        done = min(count, 4096)
        _move(base, pattern * done, done * width)
        while done < count:  # double what is there
            more = min(done, count - done)
            _move(base + done * width, base, more * width)
            done += more

    _do(stream, action, wait, "MEMSET")


def _do(stream: Stream, action: Callable[[], object], wait: bool, kind: str, keep: Any = None) -> None:
    def run(kept: Any = keep) -> None:  # a host buffer lives as long as the operation that uses it
        action()

    def work(after: Sequence[Operation] = ()) -> Work:
        return Work(run, after)

    if stream.capture is not None:
        if wait:
            stream.capture.invalidate()
            refuse(
                result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a call that waits, on a stream that is being captured"
            )
        graphs.submit(stream, work, kind)
        return
    context = stream.context
    if context.idle:
        if stream.legacy:
            graphs.forbid_legacy(context)
        with ENGINE.turn:
            action()
        return
    graphs.submit(stream, work, kind)
    if wait:
        ENGINE.wait_stream(stream)
        if context.error is not None:
            refuse(context.error)


def _sync(target: Any, source: Any, size: int, to: str, of: str) -> None:
    stream = current().legacy
    graphs.forbid_unsafe("a synchronous copy")
    copy(stream, target, source, size, to, of, True)


@api()
def cuMemcpyHtoD(dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    _sync(dstDevice, srcHost, ByteCount, _DEVICE, _HOST)


@api()
def cuMemcpyDtoH(dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    _sync(dstHost, srcDevice, ByteCount, _HOST, _DEVICE)


@api()
def cuMemcpyDtoD(dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
    _sync(dstDevice, srcDevice, ByteCount, _DEVICE, _DEVICE)


@api()
def cuMemcpy(dst: Any, src: Any, ByteCount: int) -> None:
    _sync(dst, src, ByteCount, _EITHER, _EITHER)


@api()
def cuMemcpyHtoDAsync(dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    copy(stream_of(hStream), dstDevice, srcHost, ByteCount, _DEVICE, _HOST, False)


@api()
def cuMemcpyDtoHAsync(dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    copy(stream_of(hStream), dstHost, srcDevice, ByteCount, _HOST, _DEVICE, False)


@api()
def cuMemcpyDtoDAsync(dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    copy(stream_of(hStream), dstDevice, srcDevice, ByteCount, _DEVICE, _DEVICE, False)


@api()
def cuMemcpyAsync(dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    copy(stream_of(hStream), dst, src, ByteCount, _EITHER, _EITHER, False)


@api()
def cuMemcpyPeer(dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int) -> None:
    MACHINE.context(dstContext)
    MACHINE.context(srcContext)
    _sync(dstDevice, srcDevice, ByteCount, _DEVICE, _DEVICE)


@api()
def cuMemcpyPeerAsync(
    dstDevice: Any, dstContext: Any, srcDevice: Any, srcContext: Any, ByteCount: int, hStream: Any
) -> None:
    MACHINE.context(dstContext)
    MACHINE.context(srcContext)
    copy(stream_of(hStream), dstDevice, srcDevice, ByteCount, _DEVICE, _DEVICE, False)


def _fill_sync(target: Any, value: int, width: int, count: int) -> None:
    stream = current().legacy
    graphs.forbid_unsafe("a synchronous fill")
    fill(stream, target, value, width, count, True)


@api()
def cuMemsetD8(dstDevice: Any, uc: int, N: int) -> None:
    _fill_sync(dstDevice, uc, 1, N)


@api()
def cuMemsetD16(dstDevice: Any, us: int, N: int) -> None:
    _fill_sync(dstDevice, us, 2, N)


@api()
def cuMemsetD32(dstDevice: Any, ui: int, N: int) -> None:
    _fill_sync(dstDevice, ui, 4, N)


@api()
def cuMemsetD8Async(dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    fill(stream_of(hStream), dstDevice, uc, 1, N, False)


@api()
def cuMemsetD16Async(dstDevice: Any, us: int, N: int, hStream: Any) -> None:
    fill(stream_of(hStream), dstDevice, us, 2, N, False)


@api()
def cuMemsetD32Async(dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
    fill(stream_of(hStream), dstDevice, ui, 4, N, False)
