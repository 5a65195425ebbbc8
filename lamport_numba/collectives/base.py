"""What the all-gathers share: collective construction, the call, errors that the device reports, reset and close."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..arrays import device_array
from ..driver import Driver, select, structs
from ..errors import CallMismatch, ClosedError, DriverError, LamportError, SetupError, StreamError
from ..intake import Buffer, as_buffer
from ..streams import LEGACY, InFlight, as_stream, is_broken, is_capturing
from ..symmetric import Communicator, OutOfStep
from .arguments import agreed, naming
from .call import Header, Lane, Packer, PreparedCall, check_out, check_size, compare, fits, has_fixed_address
from .channel import PACK_BYTES, Channel, Plan, RowChannel
from .ends import Remains, at_rest, sweep
from .launch import Block
from .measure import Table
from .meet import Standing, disagreement
from .reports import COMPARE, Report, error_of
from .transports import open_channels

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AllGather", "PreparedCall"]

log = logging.getLogger("lamport_numba")

_REMEMBERED: Final = 8  # calls whose buffers are held, so that the same call again finds itself packed
_ALARMS: Final = 1024  # words in host memory, one for each reset, so that kernels of before it are told apart
_GRACE: Final = 0.05  # seconds between two looks at the reports: other ranks may be about to report
_LOOKS: Final = 20
_LATE: Final = 3.0  # seconds that a close waits for the others after a failure: they may be dead
_SET: Final = memoryview(b"\1\0\0\0").cast("I")  # the alarm of an object that cannot be used

_alive: weakref.WeakSet[AllGather] = weakref.WeakSet()


def _after_fork() -> None:
    for gather in list(_alive):
        gather._forbid("the process forked after it was built, and a CUDA context does not survive that")


def _at_exit() -> None:
    for gather in list(_alive):
        gather._end("the interpreter is ending")
    sweep()


def _key(stream: Any) -> int:
    """The handle that calls are remembered by; -1, as which none is, for what is no stream."""
    try:
        return as_stream(stream)
    except (TypeError, ValueError):
        return -1


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


class AllGather:
    """An all-gather for small arrays; subclasses choose the protocol. Construction is collective over ``comm``.

    One object serves one thread and one stream at a time. Close it, or use it in a ``with`` block.

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
        ValueError, TypeError: an argument that is not accepted, on its rank; SetupError on the others. A capacity is a
            positive multiple of 16, such that a generation of all ranks' slots has less than 4 GiB; a timeout is
            positive; a world has up to 72 ranks.
        SetupError, and its kinds: on all ranks alike, if the set-up fails on one.
    """

    _channel: ClassVar[type[RowChannel]]
    _flags: Mapping[str, Any] = MappingProxyType({})  # of a subclass, by name: True or False
    _table: Table = MappingProxyType({})
    _alarm: memoryview = _SET
    _unusable: str | None = "its construction did not complete"
    _closed = False
    _lane: Lane | None = None
    _drv: Driver
    _remains: Remains

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
        self._comm = Communicator(comm)
        self.rank: int = self._comm.rank
        self.world_size: int = self._comm.size
        self._reports: list[Report] | None = None  # once the device has reported
        self._told = False  # the caller knows
        self._epoch = 0  # how often it was reset
        self._resettable = False
        self._start_counting()
        try:
            self._drv = self._driver()
            self._construct(
                rank_capacity_bytes=rank_capacity_bytes,
                device=device,
                transport=transport,
                timeout=timeout,
                share_device=share_device,
                pdl=pdl,
                compare_calls=compare_calls,
                **self._flags,
            )
        except BaseException as error:
            self._fail_construction(error)
            raise
        _alive.add(self)
        self._finalizer = weakref.finalize(self, Remains.leave, self._remains, 0.2)
        self._finalizer.atexit = False  # _at_exit comes first

    def _driver(self) -> Driver:
        """This rank's driver. A rank that has none tells the others, and keeps its own error."""
        wrong = None
        try:
            found = select().for_rank(self.rank)
        except Exception as error:
            wrong = error
        try:
            self._comm.vote("choose the device", wrong)
        except SetupError:
            if wrong is not None:
                raise wrong from None
            raise
        return found

    def _construct(self, **given: Any) -> None:
        arguments = agreed(self._comm, self._drv, type(self).__name__, self._channel, given)
        self.rank_capacity_bytes = arguments.rank_capacity_bytes
        self.timeout = arguments.timeout
        self.device: int = arguments.device
        self._share = arguments.share_device
        self._pdl = arguments.pdl
        self._compare = arguments.compare_calls
        self._asked = arguments.transport
        self._remembered: dict[tuple[int, int, Any], PreparedCall] = {}
        self._enter, self._leave = self._drv.enter, self._drv.leave
        self._may_capture = self._drv.capture_query()
        self._remains = Remains(self._drv, self.device)
        with self._comm.step("make the device's context current"):
            self._drv.settle(self.device)
            self._drv.primary(self.device)
        with self._drv.current(self.device), self._drv.relaxed():
            sweep()
            flags = structs.CU_MEMHOSTALLOC_PORTABLE | structs.CU_MEMHOSTALLOC_DEVICEMAP
            with self._comm.step("allocate the alarm"):
                host = self._remains.host = int(self._drv.call("cuMemHostAlloc", 4 * _ALARMS, flags))
                self._alarms = memoryview((ctypes.c_uint32 * _ALARMS).from_address(host)).cast("B").cast("I")
                self._alarms[:] = memoryview(bytes(4 * _ALARMS)).cast("I")
            self._in_flight = InFlight(self._drv)
            self._packer = Packer(self._drv, self.device, self._launch_of)
            self._open_channels()

    def _open_channels(self) -> None:
        """Build the channels and become usable."""
        word = self._epoch % _ALARMS
        plan = Plan(
            capacity=self.rank_capacity_bytes // PACK_BYTES,
            timeout=self.timeout,
            share_device=self._share,
            pdl=self._pdl,
            host_alarm=self._remains.host + 4 * word,
        )
        self._table = open_channels(
            self._channel, self._comm, self._drv, self.device, self._asked, plan, self._channels
        )
        self._unusable = None
        self._alarm = self._alarms[word : word + 1]

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._table:
            return f"<{name}, not usable: {self._unusable}>"
        state = f"not usable: {self._unusable}" if self._unusable else "usable"
        if not self._unusable and (self._reports is not None or self._alarm[0]):
            state = f"failed: {error_of(self._reports, self.rank)}" if self._reports else "failed: check() says how"
        return (
            f"<{name} rank {self.rank} of {self.world_size}, transport {self.transport!r}, "
            f"capacity {self.rank_capacity_bytes} bytes a rank, {state}>"
        )

    @property
    def _channels(self) -> dict[str, Channel]:
        return self._remains.channels

    def _fail_construction(self, error: BaseException) -> None:
        if hasattr(self, "_remains"):
            self._remains.leave()
        self._forbid("its construction did not complete")
        self._closed = True
        if isinstance(error, Exception) and self._comm.healthy:
            self._comm.free()  # all ranks know of the error, and raise too
        else:
            self._comm.give_up(f"{type(error).__name__}: {error}")

    # The call

    @property
    def transport(self) -> str | Table:
        """What carries the calls: a name, or after transport="measure" a table {largest size in bytes: name}."""
        return dict(self._table) if self._asked == "measure" else self._table[self.rank_capacity_bytes]

    def accepts(self, array: Any) -> bool:
        """Whether ``array`` has a size that can be gathered: up to the capacity, a multiple of the channel's unit."""
        return fits(as_buffer(array, self._drv).nbytes, self.rank_capacity_bytes, self._channel.unit)

    def __call__(self, array: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Gather ``array`` of every rank: dim 0 concatenated in rank order, same dtype. Asynchronous on ``stream``.

        Args:
            array: this rank's part; shape (n, ...) and dtype the same on every rank, 16 bytes to the capacity, a
                multiple of 16. Anything with ``__cuda_array_interface__`` or DLPack. One that is not contiguous or
                not aligned to 16 bytes is copied first, on the stream.
            out: a contiguous device array of shape (world * n, ...) and the same dtype, or None for a new one. It may
                hold ``array`` exactly at this rank's part.
            stream: None (the default stream), an int, or a stream object; it must live until ``close``.

        Returns:
            ``out``, or a new device array.

        Raises:
            ValueError: a size or a stream that is not accepted, or an ``out`` that does not fit. Nothing has been
                touched then, but the call counts, as it does whatever else keeps it from being queued (no memory for
                the output): the other ranks' next call shows that this one refused.
            TypeError: not a device array, or a dtype that is no plain number.
            PeerTimeout, CallMismatch: what an earlier call has reported; see ``check``.
            StreamError: a call on another stream is not over. This one does not count: make it again.
            ClosedError, DriverError.
        """
        if out is not None:
            known = self._remembered.get((id(array), id(out), stream if type(stream) is int else _key(stream)))
            if known is not None:
                return known()
        if self._alarm[0]:
            self._check_usable()
        self._drv.settle(self.device)
        with self._drv.current(self.device):
            call = self._prepare(array, out, stream)
            captured = is_capturing(self._drv, call.stream)
            try:
                return call()
            finally:  # the launch may have gone well and what comes after it not
                if captured:
                    self._hold_captured(call)
                elif out is not None and call.plain and has_fixed_address(array) and has_fixed_address(out):
                    self._remember(array, out, call)
                else:
                    self._in_flight.hold(call.stream, call)

    def prepare(self, array: Any, out: Any = None, stream: Any = None) -> PreparedCall:
        """Check and pack a call of ``array`` into ``out`` on ``stream`` without queueing it; see ``PreparedCall``.

        The arguments and what is raised are those of a call.
        """
        self._check_usable()
        self._remains.captured = True  # as far as we can know
        with self._drv.current(self.device):
            return self._prepare(array, out, stream)

    def _remember(self, array: Any, out: Any, call: PreparedCall) -> None:
        # The call holds both arrays, so their ids stay theirs for as long as it is remembered.
        if len(self._remembered) >= _REMEMBERED:
            oldest = self._remembered.pop(next(iter(self._remembered)))
            if self._captures(oldest.stream):
                self._in_flight.hold_captured(oldest)  # an event that is recorded there would be the graph's
            else:
                self._in_flight.hold(oldest.stream, oldest)
        call.watched = call.stream > LEGACY  # that one is never captured
        self._remembered[id(array), id(out), call.stream] = call

    def _hold_captured(self, call: PreparedCall) -> None:
        self._remains.captured = True
        self._in_flight.hold_captured(call)

    def _watch(self, call: PreparedCall) -> None:
        """A remembered call was made again: into a graph this time?"""
        if self._may_capture(call.stream):
            self._hold_captured(call)

    def _captures(self, stream: int) -> bool:
        return is_capturing(self._drv, stream)

    def _prepare(self, array: Any, out: Any, stream: Any) -> PreparedCall:
        known: Lane | None = None
        try:
            lane = self._lane_of(stream)
            capturing = is_capturing(self._drv, lane.stream)
            known = lane
            take = partial(as_buffer, drv=self._drv, device=self.device, stream=lane.stream, capturing=capturing)
            source = take(array)
            check_size(self.rank, source, self.rank_capacity_bytes, self._channel.unit)
            shape = (self.world_size * source.shape[0], *source.shape[1:]) if source.shape else (self.world_size,)
            if out is None:
                out = device_array(shape, source.dtype, device=self.device, drv=self._drv)
            target = take(out, writable=True, name="out")
            check_out(self.rank, source, target, shape)
            self._check_dtype(source)
            return self._packer.pack(self, lane, source, target, array, out)
        except Exception as error:  # no memory for ``out`` too: the others' call would meet our next one
            self._count_refusal(error, known)
            naming(self.rank, error)
            raise

    def _lane_of(self, stream: Any) -> Lane:
        handle = as_stream(stream)
        now = self._lane
        return now if now is not None and now.stream == handle else Lane(handle, self._epoch, stream)

    def _launch_of(self, source: int, target: int, nbytes: int, code: int, stream: int) -> Block:
        transport = next(name for limit, name in self._table.items() if nbytes <= limit)
        return self._channels[transport].block(source, target, nbytes, code, stream)

    def _check_dtype(self, source: Buffer) -> None:
        """For protocols that some dtypes do not survive."""

    def _compare_calls(self, header: Header | None, refused: str | None = None) -> None:
        """Before a call, over MPI: do all ranks mean the same? A rank that refuses its call says so here."""
        call = self._calls
        self._calls += 1
        compare(self._comm, call, header, refused)

    def _count_refusal(self, error: Exception, lane: Lane | None) -> None:
        """Let the others' next call show that this rank refused one. ``lane``: the call's, if its stream exists."""
        if self._compare:
            self._compare_calls(None, f"{type(error).__name__}: {error}")
        else:
            self._count_unmade(error, lane)

    def _count_unmade(self, error: Exception, lane: Lane | None) -> None:
        """Count on the device a call that this rank did not queue, where it would have been: in a graph, or at once.

        Never raises. If it cannot be counted, nothing can be called any more: the next call would meet the others' one.
        """
        former, stream, captured = self._lane, None, False
        lane = lane or former
        try:
            with self._drv.relaxed():
                rests = former is None or at_rest(self._drv, former.stream)
                if lane is not None and (rests or lane is former) and self._captures(lane.stream):
                    self._lane, stream, captured = lane, lane.stream, True
                    self._remains.stream, self._remains.captured = stream, True
                elif former is not None and not rests:
                    stream = former.stream  # where the calls before it are
                    if self._captures(stream):
                        raise StreamError(f"stream {stream:#x} is being captured")
                self._refusals += not captured
                for channel in self._channels.values():
                    if stream is None:
                        channel.skip_at_once()
                    else:
                        channel.skip(stream)
        except Exception as also:
            if not (captured and stream is not None and is_broken(self._drv, stream)):  # else there will be no graph
                self._forbid(f"a call was not made ({error}) and could not be counted ({also})")

    # What the device reports

    def check(self) -> None:
        """Raise what the device has reported: PeerTimeout or CallMismatch, the same on all ranks. Waits for no call.

        Synchronise the stream first to learn about all calls so far. The report is raised again until ``reset``.
        """
        self._check_usable()
        with self._drv.current(self.device):
            if self._remains.alarmed():
                raise self._reported()
            if self._remains.parked and any(self._alarms):
                raise LamportError(
                    f"rank {self.rank}: a call of before the reset was launched, by a graph perhaps, and left at once; "
                    "capture graphs anew after a reset"
                )

    def _check_usable(self) -> None:
        if self._unusable:
            raise ClosedError(f"rank {self.rank}: this {type(self).__name__} cannot be used: {self._unusable}")
        if self._reports is not None or self._alarm[0]:
            raise self._reported()

    def _ready(self, lane: Lane) -> None:
        """All that keeps a call from being queued, off the fast path."""
        self._check_usable()
        if lane.epoch != self._epoch:
            raise ClosedError(f"rank {self.rank}: this call was prepared before the reset; prepare it anew")
        former = self._lane
        if former is not None and (former.stream or LEGACY) != (lane.stream or LEGACY):
            self._check_left(former.stream, lane.stream)
        self._lane = lane
        self._remains.stream = lane.stream

    def _check_left(self, former: int, stream: int) -> None:
        """Two calls of one object never overlap: a stream is left only when its work is done."""
        with self._drv.current(self.device), self._drv.relaxed():
            if not at_rest(self._drv, former):
                raise StreamError(
                    f"rank {self.rank}: a call on stream {stream:#x} while stream {former:#x} still has work or is "
                    f"being captured; calls of one {type(self).__name__} must not overlap: end its capture and "
                    "synchronise the old stream first, or make another object for the new one"
                )

    def _reported(self) -> LamportError:
        """What the device has reported, as a new exception each time; the first time it waits for late reports.

        Each report is whole, but all ranks must go by the same ones: so it looks until nothing is added.
        """
        self._alarm[0] = 1
        if not self._reports:
            with self._drv.current(self.device):
                found = self._remains.reports()
                for _ in range(_LOOKS):
                    self._comm.sleep(_GRACE)
                    before, found = found, self._remains.reports()
                    if found and found == before:
                        break
            self._reports = found
        self._told = True
        return error_of(self._reports, self.rank)

    # Ends

    def reset(self) -> None:
        """After a report: a new start with fresh mailboxes. Collective over all ranks.

        Calls that are still queued complete or fail first. Prepared calls and graphs of before it must be made anew.
        Raises SetupError or RendezvousTimeout if the ranks do not all come.
        """
        if self._unusable and not self._resettable:
            raise ClosedError(f"rank {self.rank}: this {type(self).__name__} cannot be reset: {self._unusable}")
        self._check_capture("reset")
        with self._drv.current(self.device), self._drv.relaxed():
            if not self._resettable:
                ranks = self._come_to_rest("reset", None)
                self._forbid("its reset did not complete; call reset() again or close()")
                self._resettable = True
                self._keep_for_old_graphs = any(rank.captured for rank in ranks)
            remains = self._remains
            wrong = None
            for name in list(self._channels):
                channel = self._channels.pop(name)
                try:
                    if self._keep_for_old_graphs:
                        remains.parked.append(channel)
                        channel.silence()
                    else:
                        channel.close()
                except Exception as error:
                    wrong = error
            self._comm.vote("free the former mailboxes", wrong)
            remains.captured = False
            self._alarms[:] = memoryview(bytes(4 * _ALARMS)).cast("I")
            self._epoch += 1
            self._reports, self._told = None, False
            self._start_counting()
            self._open_channels()
            self._resettable = False

    def close(self) -> None:
        """Free everything; collective, idempotent. Waits for the calls of all ranks first.

        Raises PeerTimeout or CallMismatch if the device has reported what nobody has been told yet; CallMismatch if
        the ranks made different numbers of calls; RendezvousTimeout if a rank does not come (what is local is freed
        all the same). After a failure that was told it waits for the others for a moment only and raises nothing.
        """
        if self._closed:
            return
        if self._unusable:
            self._end(self._unusable)
            return
        self._check_capture("close")
        pending: LamportError | None = None
        told = self._told or not self._comm.healthy
        try:
            with self._drv.current(self.device):
                pending = self._verdict(self._come_to_rest("close", _LATE if told else None))
                self._remains.close()
                self._in_flight.close(wait=False)
                self._packer.close()
        except BaseException as error:
            pending = self._own_report() if not told and isinstance(error, SetupError) else None
            self._end("it closed without the others")
            if pending is not None:
                raise pending from error
            if told and isinstance(error, SetupError):
                log.info("rank %d: closed alone after a failure: %s", self.rank, error)
                return
            if self._compare and isinstance(error, OutOfStep):
                text = f"rank {self.rank} closes after {self._calls} calls, and not all ranks do: {error}"
                raise CallMismatch(text, call=self._calls) from error
            raise
        self._forget("it is closed")
        self._comm.free()
        if pending is not None and not told:
            raise pending

    def _check_capture(self, what: str) -> None:
        """Whether the calls before it are over cannot be known while their stream is captured."""
        lane = self._lane
        if lane is None:
            return
        with suppress(DriverError, ValueError), self._drv.current(self.device):
            if self._captures(lane.stream):
                raise LamportError(
                    f"rank {self.rank}: {what}() while stream {lane.stream:#x}, which this {type(self).__name__} uses, "
                    "is being captured into a graph; end the capture first"
                )

    def abandon(self) -> None:
        """Leave without the others, and tell them: their calls fail at once. Frees what can be freed; idempotent."""
        self._end("it was abandoned", tell=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the others may never come to a collective close
            self._end(f"it was abandoned while an exception was passing: {kind.__name__}: {error}", tell=True)

    def __del__(self) -> None:
        if not self._closed and self._unusable is None and not sys.is_finalizing():
            warnings.warn(f"unclosed {type(self).__name__} of rank {self.rank}", ResourceWarning, 2, self)

    def _come_to_rest(self, stage: str, timeout: float | None) -> list[Standing]:
        """Wait for all ranks' calls, which their deadlines bound, or stop them once they cannot complete."""
        ranks = self._remains.come_to_rest(self._comm, stage, self._refusals, timeout)
        self._remembered.clear()
        self._in_flight.collect()
        return ranks

    def _verdict(self, ranks: list[Standing]) -> LamportError | None:
        if any(rank.alarmed for rank in ranks):
            return self._reported()
        text = disagreement(ranks)
        if text is None:
            return None
        hint = "" if self._compare else f"; {COMPARE}"
        return CallMismatch(text + hint, call=min(rank.calls for rank in ranks))

    def _own_report(self) -> LamportError | None:
        """What this rank's device has reported, for a close that the others do not join."""
        try:
            with self._drv.current(self.device):
                return self._reported() if self._remains.alarmed() else None
        except LamportError:
            return None

    def _start_counting(self) -> None:
        self._lane = None
        self._calls = 0
        self._refusals = 0

    def _end(self, why: str, *, tell: bool = False) -> None:
        """Leave without the others; never raises."""
        if self._closed:
            return
        if tell and self._unusable is None:
            try:
                with self._drv.current(self.device), self._drv.relaxed():
                    for channel in self._channels.values():
                        channel.tell_left()
            except Exception as error:
                log.debug("rank %d could not tell the others that it leaves: %s", self.rank, error)
        self._forbid(why)
        self._remains.held = (self._remembered, self._in_flight)
        self._remains.owned = (self._in_flight, self._packer)
        self._remains.leave()
        self._forget(why)
        self._comm.give_up(why)

    def _forget(self, why: str) -> None:
        self._forbid(why)
        self._closed = True
        self._remembered = {}
        self._finalizer.detach()
        _alive.discard(self)

    def _forbid(self, why: str) -> None:
        """From now on every call raises ClosedError."""
        self._unusable = why
        self._alarm = _SET
        self._resettable = False
