"""What the all-gathers share: collective construction, the call, errors that the device reports, reset and close."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import settings
from .._version import __version__
from ..arrays import DeviceArray, device_array
from ..driver import Driver, select, structs
from ..errors import CallMismatch, ClosedError, LamportError, MulticastUnavailable, SetupError, StreamError
from ..intake import Buffer, as_buffer, byte_span
from ..streams import InFlight, StreamOrder, as_stream, is_capturing
from ..strided import StridedCopy, needs_copy
from ..symmetric import Communicator, choose_transport
from .channel import PACK_BYTES, Channel, Plan
from .launch import Block
from .measure import Table, measure
from .reports import MAX_WORLD, error_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AllGather", "PreparedCall"]

log = logging.getLogger("lamport_numba")

_REMEMBERED = 8  # calls whose buffers are held, so that the same call again finds itself packed
_TRANSPORTS = ("auto", "peer", "multicast", "measure")
_LONGEST = 1e9  # seconds; the kernels count nanoseconds in 64 bits
_alive: weakref.WeakSet[AllGather] = weakref.WeakSet()


def _after_fork() -> None:
    for gather in _alive:
        gather._unusable = "the process forked after it was built, and a CUDA context does not survive that"


os.register_at_fork(after_in_child=_after_fork)


class PreparedCall:
    """A call with fixed buffers: ``call()`` queues it again and returns the output. It holds its buffers.

    Capture it like any launch: begin the capture of its stream, ``call()`` as often as wanted, end the capture. The
    graph holds no buffers: keep the PreparedCall for as long as the graph is launched.
    """

    __slots__ = ("_after", "_before", "_block", "_gather", "_header", "held", "out", "stream")

    def __init__(
        self,
        gather: AllGather,
        block: Block,
        out: Any,
        *,
        held: tuple[Any, ...],
        header: tuple[int, int],
        before: tuple[Callable[[], None], ...],
        after: tuple[Callable[[], None], ...],
    ) -> None:
        self.out = out
        self.held = held
        self.stream = block.stream
        self._gather = gather
        self._block = block
        self._header = header
        self._before = before
        self._after = after

    @property
    def plain(self) -> bool:
        """Whether the call is its kernel alone, without copies or waits around it."""
        return not self._before and not self._after

    def __call__(self) -> Any:
        """Queue the call. Raises what ``check`` raises, ClosedError, StreamError, DriverError."""
        gather = self._gather
        former = gather._enter(gather.device)
        try:
            if gather._unusable or gather._alarm[0] or gather._stream != self.stream:
                gather._ready(self.stream)
            if gather._compare:
                gather._compare_calls(*self._header)
            for step in self._before:
                step()
            self._block.launch()
            for step in self._after:
                step()
        finally:
            if former is not None:
                gather._leave(former)
        return self.out


class AllGather:
    """An all-gather for small arrays; subclasses choose the protocol. Construction is collective over ``comm``.

    Args:
        comm: an mpi4py intracommunicator, or one of ``run_ranks``; it is duplicated.
        rank_capacity_bytes: largest array of one rank in bytes, a positive multiple of 16.
        device: ordinal of this rank's device; None takes the current context's, else one by the rank on this host.
        transport: "peer", "multicast", "auto" (multicast where every rank can use it and the world has more than two
            ranks), or "measure" (build both, time them at three sizes, keep the faster for each).
        timeout: seconds that a call waits for its peers before it fails with PeerTimeout; None asks
            LAMPORT_NUMBA_TIMEOUT, 600 s if unset.
        share_device: whether ranks may share a device; None asks LAMPORT_NUMBA_SHARE_DEVICE.
        pdl: programmatic dependent launch. False for streams with a foreign kernel that is launched with the
            attribute and never waits: such a kernel breaks the order that the protocol stands on.
        compare_calls: compare every call's number, size, dtype and shape over MPI before it is queued; None asks
            LAMPORT_NUMBA_COMPARE. Slow, but the error names what every rank had.

    Raises:
        ValueError: a capacity that is not a positive multiple of 16, a timeout that is not positive, over 72 ranks.
        SetupError, and its kinds: on all ranks alike, if the set-up fails on one.
    """

    _channel: ClassVar[type[Channel]]

    def __init__(
        self,
        comm: Any,
        rank_capacity_bytes: int,
        *,
        device: int | None = None,
        transport: str = "auto",
        timeout: float | None = None,
        share_device: bool | None = None,
        pdl: bool = True,
        compare_calls: bool | None = None,
    ) -> None:
        self._unusable: str | None = "its construction did not complete"
        self._closed = False
        self._failure: LamportError | None = None
        self._channels: dict[str, Channel] = {}
        self._host = 0
        self._comm = Communicator(comm)
        self.rank: int = self._comm.rank
        self.world_size: int = self._comm.size
        self._drv: Driver = select().for_rank(self.rank)
        try:
            self._construct(rank_capacity_bytes, device, transport, timeout, share_device, pdl, compare_calls)
        except BaseException:
            self._release(collective=False)
            raise
        self._unusable = None
        _alive.add(self)

    def _construct(
        self,
        capacity: int,
        device: int | None,
        transport: str,
        timeout: float | None,
        share_device: bool | None,
        pdl: bool,
        compare_calls: bool | None,
    ) -> None:
        wrong: Exception | None = None
        try:
            timeout = settings.get("TIMEOUT") if timeout is None else timeout
            transport = settings.get("TRANSPORT") if transport == "auto" else transport
            _check_arguments(capacity, transport, timeout, self.world_size)
            self.device: int = self._drv.default_device() if device is None else int(device)
            self._share: bool = settings.get("SHARE_DEVICE") if share_device is None else bool(share_device)
            self._compare: bool = settings.get("COMPARE") if compare_calls is None else bool(compare_calls)
        except Exception as error:
            wrong = error
        try:
            self._comm.vote("check the arguments", wrong)
        except SetupError:
            if wrong is not None:
                raise wrong from None  # the caller's own mistake keeps its type
            raise
        self.rank_capacity_bytes = int(capacity)
        self.timeout = float(timeout or 0)
        self._pdl = bool(pdl)
        self._same_everywhere(
            f"{type(self).__name__} of lamport-numba {__version__}: rank_capacity_bytes={self.rank_capacity_bytes}, "
            f"transport={transport!r}, timeout={self.timeout:g}, pdl={self._pdl}, compare_calls={self._compare}"
        )
        self._stream: int | None = None
        self._captured = False
        self._calls = 0
        self._remembered: dict[tuple[int, int, Any], PreparedCall] = {}
        self._codes: dict[tuple[str, tuple[int, ...]], int] = {}
        self._enter, self._leave = self._drv.enter, self._drv.leave
        self._strided: StridedCopy | None = None
        self._asked = transport
        self._table: Table = {}
        with self._drv.current(self.device):
            flags = structs.CU_MEMHOSTALLOC_PORTABLE | structs.CU_MEMHOSTALLOC_DEVICEMAP
            self._host = int(self._drv.call("cuMemHostAlloc", 64, flags))
            self._alarm = memoryview((ctypes.c_uint32 * 16).from_address(self._host)).cast("B").cast("I")
            self._in_flight = InFlight(self._drv)
            self._order = StreamOrder(self._drv)
            self._open_channels()

    def _open_channels(self) -> None:
        self._alarm[0] = 0
        plan = Plan(
            capacity=self.rank_capacity_bytes // PACK_BYTES,
            timeout=self.timeout,
            share_device=self._share,
            pdl=self._pdl,
            host_alarm=self._host,
        )
        for transport in self._candidates():
            try:
                self._channels[transport] = self._channel(self._comm, self._drv, self.device, transport, plan)
            except MulticastUnavailable as reason:  # on all ranks alike
                if self._asked == "multicast":
                    raise
                self._say(f"going by peer: {reason}")
        if not self._channels:
            self._channels["peer"] = self._channel(self._comm, self._drv, self.device, "peer", plan)
        self._table = {self.rank_capacity_bytes: next(iter(self._channels))}
        if len(self._channels) > 1:
            self._table = measure(self._comm, self._drv, self.device, self._channels, self.rank_capacity_bytes)
            for unused in set(self._channels) - set(self._table.values()):
                self._channels.pop(unused).close()

    def _candidates(self) -> list[str]:
        """The transports to build, the same on all ranks."""
        if self._asked != "measure":
            return [choose_transport(self._comm, self._drv, self.device, self._asked)]
        try:
            return ["peer", choose_transport(self._comm, self._drv, self.device, "multicast")]
        except MulticastUnavailable as reason:
            self._say(f"nothing to measure, going by peer: {reason}")
            return ["peer"]

    def _say(self, what: str) -> None:
        if self.rank == 0:
            log.warning("transport %s: %s", self._asked, what)

    def _same_everywhere(self, mine: str) -> None:
        said = [text.decode() for text in self._comm.all_gather(mine.encode(), "compare the arguments")]
        if len(set(said)) > 1:
            raise SetupError(
                "ranks were constructed differently: "
                + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said)),
                step="compare the arguments",
            )

    # The call

    @property
    def transport(self) -> str | Table:
        """What carries the calls: a name, or after transport="measure" a table {largest size in bytes: name}."""
        return dict(self._table) if self._asked == "measure" else self._table[self.rank_capacity_bytes]

    def accepts(self, array: Any) -> bool:
        """Whether ``array`` has a size that can be gathered: up to the capacity, a multiple of the channel's unit."""
        return self._fits(as_buffer(array, self._drv).nbytes)

    def _fits(self, nbytes: int) -> bool:
        return 0 < nbytes <= self.rank_capacity_bytes and nbytes % self._channel.unit == 0

    def __call__(self, array: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Gather ``array`` of every rank: dim 0 concatenated in rank order, same dtype. Asynchronous on ``stream``.

        Args:
            array: this rank's part; shape (n, ...) and dtype the same on every rank, 16 bytes to the capacity, a
                multiple of 16. Anything with ``__cuda_array_interface__`` or DLPack. One that is not contiguous or
                not aligned to 16 bytes is copied first, on the stream.
            out: a contiguous device array of shape (world * n, ...) and the same dtype, or None for a new one. It may
                hold ``array`` exactly at this rank's part.
            stream: None (the default stream), an int, or a stream object.

        Returns:
            ``out``, or a new device array.

        Raises:
            ValueError: a size that is not accepted, or an ``out`` that does not fit. Nothing has been touched then,
                but the call counts: the other ranks' next call shows that this one refused.
            TypeError: not a device array, or a dtype that is no plain number.
            PeerTimeout, CallMismatch: what an earlier call has reported; see ``check``.
            ClosedError, StreamError, DriverError.
        """
        if out is not None:
            known = self._remembered.get((id(array), id(out), stream))
            if known is not None:
                return known()
        with self._drv.current(self.device):
            call = self._prepare(array, out, stream)
            result = call()
            if is_capturing(self._drv, call.stream):
                self._captured = True
                self._in_flight.hold_captured(call)
            elif out is not None and call.plain and has_fixed_address(array) and has_fixed_address(out):
                self._remember((id(array), id(out), stream), call)
            else:
                self._in_flight.hold(call.stream, call)
        return result

    def prepare(self, array: Any, out: Any = None, stream: Any = None) -> PreparedCall:
        """Check and pack a call of ``array`` into ``out`` on ``stream`` without queueing it; see ``PreparedCall``.

        The arguments and what is raised are those of a call.
        """
        with self._drv.current(self.device):
            return self._prepare(array, out, stream)

    def _remember(self, key: tuple[int, int, Any], call: PreparedCall) -> None:
        # The call holds both arrays, so their ids stay theirs for as long as it is remembered.
        if len(self._remembered) >= _REMEMBERED:
            oldest = self._remembered.pop(next(iter(self._remembered)))
            self._in_flight.hold(oldest.stream, oldest)
        self._remembered[key] = call

    def _prepare(self, array: Any, out: Any, stream: Any) -> PreparedCall:
        self._check_usable()
        handle = self._stream or 0
        try:
            handle = as_stream(stream)
            capturing = is_capturing(self._drv, handle)
            take = partial(as_buffer, drv=self._drv, device=self.device, stream=handle, capturing=capturing)
            source = take(array)
            self._check_size(source)
            shape = (self.world_size * source.shape[0], *source.shape[1:]) if source.shape else (self.world_size,)
            if out is None:
                out = device_array(shape, source.dtype, device=self.device, drv=self._drv)
            target = take(out, writable=True, name="out")
            self._check_out(source, target, shape)
        except (TypeError, ValueError):
            self._count_refusal(handle)
            raise
        self._check_dtype(source)
        return self._pack(source, target, array, out, handle)

    def _pack(self, source: Buffer, target: Buffer, array: Any, out: Any, stream: int) -> PreparedCall:
        held: list[Any] = [array, out]
        before: list[Callable[[], None]] = []
        after: list[Callable[[], None]] = []
        producers = {buffer.stream for buffer in (source, target)} - {None, stream}
        before += [partial(self._order.after, producer, stream) for producer in producers]
        address, into = source.address, target.address
        if needs_copy(source):
            copy = device_array(source.nbytes, "u1", device=self.device, drv=self._drv)
            address = as_buffer(copy, self._drv).address
            before.append(partial(self._copier(), source, address, stream))
            held.append(copy)
        if into % PACK_BYTES:
            scratch = device_array(target.nbytes, "u1", device=self.device, drv=self._drv)
            into = as_buffer(scratch, self._drv).address
            after.append(partial(self._drv.call, "cuMemcpyDtoDAsync", target.address, into, target.nbytes, stream))
            held.append(scratch)
        code = self._code(source)
        block = self._channel_for(source.nbytes).block(address, into, source.nbytes, code, stream)
        return PreparedCall(
            self, block, out, held=tuple(held), header=(source.nbytes, code), before=tuple(before), after=tuple(after)
        )

    def _copier(self) -> StridedCopy:
        if self._strided is None:
            self._strided = StridedCopy(self._drv, self.device)
        return self._strided

    def _channel_for(self, nbytes: int) -> Channel:
        return self._channels[next(transport for limit, transport in self._table.items() if nbytes <= limit)]

    def _code(self, source: Buffer) -> int:
        """31 bits that stand for dtype and shape in the header that the ranks compare."""
        key = (source.dtype.str, source.shape)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = zlib.crc32(repr(key).encode()) & 0x7FFFFFFF
        return code

    def _check_size(self, source: Buffer) -> None:
        unit = self._channel.unit
        if not self._fits(source.nbytes):
            raise ValueError(
                f"rank {self.rank}: an array of {source.nbytes} bytes cannot be gathered; "
                f"expected a multiple of {unit} from {unit} to the capacity of {self.rank_capacity_bytes} bytes"
            )

    def _check_out(self, source: Buffer, target: Buffer, shape: tuple[int, ...]) -> None:
        mine = f"rank {self.rank}: out= "
        if target.dtype != source.dtype:
            raise ValueError(f"{mine}has dtype {target.dtype}; expected {source.dtype}, that of the array")
        if target.shape != shape:
            raise ValueError(f"{mine}has shape {target.shape}; expected {shape}")
        if target.strides is not None:
            raise ValueError(f"{mine}is not contiguous (strides {target.strides}); pass a contiguous array or none")
        part = target.address + self.rank * source.nbytes
        low, high = byte_span(source.shape, source.strides, source.dtype.itemsize)
        apart = source.address + high <= target.address or target.address + target.nbytes <= source.address + low
        if not apart and (source.strides is not None or source.address != part):
            raise ValueError(
                f"{mine}overlaps the array; it may hold the array exactly at this rank's part, "
                f"byte {part - target.address}, or not at all"
            )

    def _check_dtype(self, source: Buffer) -> None:
        """For protocols that some dtypes do not survive."""

    def _compare_calls(self, nbytes: int, code: int) -> None:
        mine = struct.pack("<QQI", self._calls, nbytes, code)
        self._calls += 1
        said = [struct.unpack("<QQI", text) for text in self._comm.all_gather(mine, "compare a call")]
        if len(set(said)) > 1:
            rows = "; ".join(
                f"rank {r}: call {call} of {size} bytes, dtype and shape {key:#010x}"
                for r, (call, size, key) in enumerate(said)
            )
            raise CallMismatch(f"ranks disagree about a call, and it was not made: {rows}", call=self._calls - 1)

    def _count_refusal(self, stream: int) -> None:
        # The other ranks' next call shows by its number that this rank refused one. The count follows the calls before
        # it on their stream, and is waited for with them.
        if self._stream is None:
            self._stream = stream
        for channel in self._channels.values():
            if not is_capturing(self._drv, self._stream):
                channel.skip(self._stream)
        self._calls += 1

    # What the device reports

    def check(self) -> None:
        """Raise what the device has reported: PeerTimeout or CallMismatch, the same on all ranks. Waits for no call.

        Synchronise the stream first to learn about all calls so far. The report is raised again until ``reset``.
        """
        with self._drv.current(self.device):
            self._check_usable()
            if self._alarm[0] or any(channel.alarmed() for channel in self._channels.values()):
                self._raise_reported()

    def _check_usable(self) -> None:
        if self._unusable:
            raise ClosedError(f"rank {self.rank}: this {type(self).__name__} cannot be used: {self._unusable}")
        if self._failure is not None:
            raise self._failure
        if self._alarm[0]:
            self._raise_reported()

    def _ready(self, stream: int) -> None:
        """All that keeps a call from being queued, off the fast path."""
        self._check_usable()
        if self._stream is not None and self._stream != stream:
            self._check_left(self._stream, stream)
        self._stream = stream

    def _check_left(self, former: int, stream: int) -> None:
        """Two calls of one object never overlap: a stream is left only when its work is done."""
        code = self._drv.api.cuStreamQuery(former)[0]
        if code == structs.CUresult.CUDA_ERROR_NOT_READY:
            raise StreamError(
                f"rank {self.rank}: a call on stream {stream:#x} while stream {former:#x} still has work; calls of one "
                f"{type(self).__name__} must not overlap: synchronise the old stream first, or "
                "make another object for the new one"
            )

    def _raise_reported(self) -> None:
        self._alarm[0] = 1
        if self._failure is None:
            reports = [report for channel in self._channels.values() for report in channel.reports()]
            self._failure = error_of(sorted(reports), self.rank)
        raise self._failure

    # Ends

    def reset(self) -> None:
        """After a report: a new start with fresh mailboxes. Collective over all ranks.

        Calls that are still queued complete or fail first. Graphs captured before it must not be launched again. Raises
        SetupError or RendezvousTimeout if the ranks do not all come.
        """
        if self._unusable:
            raise ClosedError(f"rank {self.rank}: this {type(self).__name__} cannot be reset: {self._unusable}")
        with self._drv.current(self.device):
            self._forget_calls()
            self._comm.barrier("reset")
            self._unusable = "its reset did not complete"
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                channel.close()
            self._failure = None
            self._stream = None
            self._calls = 0
            self._open_channels()
            self._unusable = None

    def close(self) -> None:
        """Free everything; collective, idempotent. Waits for this rank's calls first.

        Raises PeerTimeout or CallMismatch if the device has reported what nobody has been told yet; CallMismatch if
        the ranks made different numbers of calls; RendezvousTimeout if a rank does not come (what is local is freed
        all the same).
        """
        if self._closed:
            return
        if self._unusable:
            self._release(collective=False)
            return
        told = self._failure is not None
        pending: LamportError | None = None
        with self._drv.current(self.device):
            try:
                self._forget_calls()
                self._comm.barrier("close")
                if any(channel.alarmed() for channel in self._channels.values()):
                    try:
                        self._raise_reported()
                    except LamportError as report:
                        pending = None if told else report
                else:
                    pending = self._different_numbers_of_calls()
                self._release(collective=True)
            except BaseException:
                self._release(collective=False)
                raise
        if pending is not None:
            raise pending

    def abandon(self) -> None:
        """Free what can be freed without the other ranks. They learn of it by their deadlines."""
        self._release(collective=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()  # the others may never come to a collective close

    def _different_numbers_of_calls(self) -> CallMismatch | None:
        mine = sum(channel.calls() for channel in self._channels.values())
        said = [
            int.from_bytes(text, "little")
            for text in self._comm.all_gather(mine.to_bytes(8, "little"), "compare the numbers of calls")
        ]
        if len(set(said)) == 1:
            return None
        rows = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(said))
        return CallMismatch(f"ranks made different numbers of calls ({rows})", call=min(said))

    def _forget_calls(self) -> None:
        """Wait for the calls of this rank; their deadlines bound it."""
        if self._captured:
            self._drv.call("cuCtxSynchronize")  # a graph may run on any stream
        elif self._stream is not None:
            self._drv.call("cuStreamSynchronize", self._stream)
        self._remembered.clear()
        self._in_flight.close()

    def _release(self, *, collective: bool) -> None:
        """Free everything, half-built objects included; each thing once."""
        self._closed = True
        self._unusable = self._unusable or "it is closed"
        channels, self._channels = self._channels, {}
        host, self._host = self._host, 0
        if channels or host:
            with self._drv.current(self.device):
                for channel in channels.values():
                    channel.close() if collective else channel.abandon()
                if host:
                    self._alarm = memoryview(bytearray(64)).cast("I")
                    self._drv.call("cuMemFreeHost", host)
        self._comm.free() if collective else self._comm.give_up("it closed without the others")


def has_fixed_address(array: Any) -> bool:
    """Whether the object can never come to mean other memory: true of our device arrays and of numba's."""
    return isinstance(array, DeviceArray) or type(array).__name__ == "DeviceNDArray"


def _check_arguments(capacity: Any, transport: str, timeout: Any, world_size: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)):
        raise ValueError(f"rank_capacity_bytes is {capacity!r}; expected a positive multiple of {PACK_BYTES}")
    if capacity <= 0 or capacity % PACK_BYTES:
        raise ValueError(f"rank_capacity_bytes is {capacity}; expected a positive multiple of {PACK_BYTES}")
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(_TRANSPORTS)}")
    if not 0 < timeout <= _LONGEST:
        raise ValueError(f"timeout is {timeout!r}; expected seconds, above 0 and at most {_LONGEST:g}")
    if world_size > MAX_WORLD:
        raise ValueError(f"the communicator has {world_size} ranks; expected at most {MAX_WORLD}")
