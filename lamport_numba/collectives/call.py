"""One call of an all-gather: its arguments checked, packed once, queued as often as wanted."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arrays import DeviceArray, device_array
from ..driver import Driver
from ..errors import CallMismatch
from ..intake import Buffer, as_buffer, byte_span
from ..streams import PER_THREAD, StreamOrder, is_capturing
from ..strided import StridedCopy, needs_copy
from ..symmetric import Communicator, OutOfStep
from .arguments import naming
from .channel import PACK_BYTES
from .launch import Block, load

if TYPE_CHECKING:
    from .base import AllGather

__all__ = [
    "Header",
    "Lane",
    "Packer",
    "PreparedCall",
    "check_out",
    "check_size",
    "compare",
    "fits",
    "has_fixed_address",
]


@dataclass(frozen=True, eq=False)
class Lane:
    """Where an object's calls run. Compared by identity."""

    stream: int
    epoch: int  # how many resets there had been
    owner: Any  # the stream object that the caller passed: its stream lives for as long as it does


@dataclass(frozen=True)
class Header:
    """What all ranks must agree about in a call; the kernels compare ``nbytes`` and ``code``."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def code(self) -> int:
        """31 bits that stand for dtype and shape."""
        return zlib.crc32(repr((self.dtype, self.shape)).encode()) & 0x7FFFFFFF


class PreparedCall:
    """A call with fixed buffers: ``call()`` queues it again and returns the output. It holds its buffers.

    Capture it like any launch: begin the capture of its stream, ``call()`` as often as wanted, end the capture. The
    graph holds no buffers: keep the PreparedCall for as long as the graph is launched. After a ``reset`` prepare it
    anew.
    """

    __slots__ = ("_after", "_before", "_block", "_gather", "_header", "_lane", "held", "out", "watched")

    def __init__(
        self,
        gather: AllGather,
        lane: Lane,
        block: Block,
        out: Any,
        *,
        held: tuple[Any, ...],
        header: Header,
        before: tuple[Callable[[], None], ...],
        after: tuple[Callable[[], None], ...],
    ) -> None:
        self.out = out
        self.held = held
        self.watched = False  # whether to look for a capture each time
        self._gather = gather
        self._lane = lane
        self._block = block
        self._header = header
        self._before = before
        self._after = after

    def __repr__(self) -> str:
        header, gather = self._header, self._gather
        stale = ", of before a reset: prepare it anew" if self._lane.epoch != gather._epoch else ""
        return (
            f"<PreparedCall of {header.nbytes} bytes, dtype {header.dtype}, shape {header.shape}, on stream "
            f"{self.stream:#x}{stale}, of {gather!r}>"
        )

    @property
    def stream(self) -> int:
        """The handle of the stream that the call is queued on."""
        return self._lane.stream

    @property
    def plain(self) -> bool:
        """Whether the call is its kernel alone, without copies or waits around it."""
        return not self._before and not self._after

    def __call__(self) -> Any:
        """Queue the call. Raises what ``check`` raises, ClosedError, StreamError, DriverError; ValueError if a
        stream is gone. A call that could not be queued counts, as a refused one does.
        """
        gather = self._gather
        if gather._alarm[0] or gather._lane is not self._lane:
            gather._ready(self._lane)
        former = gather._enter(gather.device)
        try:
            if gather._compare:
                gather._compare_calls(self._header)
            try:
                for step in self._before:
                    step()
                self._block.launch()
            except Exception as error:
                gather._count_unmade(error, self._lane)
                naming(gather.rank, error)
                raise
            for step in self._after:
                step()
            if self.watched:
                gather._watch(self)
        finally:
            if former is not None:
                gather._leave(former)
        return self.out


class Packer:
    """Turns checked buffers into packed launches, with the copies and waits that some arrays need around them."""

    def __init__(self, drv: Driver, device: int, launch: Callable[[int, int, int, int, int], Block]) -> None:
        self._drv = drv
        self._device = device
        self._launch = launch  # (source, target, nbytes, code, stream) -> Block
        self._order = StreamOrder(drv)
        self._strided: StridedCopy | None = None
        self._headers: dict[tuple[str, tuple[int, ...]], tuple[Header, int]] = {}

    def pack(self, gather: AllGather, lane: Lane, source: Buffer, target: Buffer, array: Any, out: Any) -> PreparedCall:
        """A call that gathers ``source`` into ``target`` on the lane; it holds ``array`` and ``out``."""
        held: list[Any] = [array, out]
        after: list[Callable[[], None]] = []
        stream = lane.stream
        before: list[Callable[[], None]] = []
        for producer, name in {target.stream: "out", source.stream: "array"}.items():
            if producer is not None and producer != stream:
                if producer > PER_THREAD:  # the others always exist
                    is_capturing(self._drv, producer, f"{name}'s own stream")
                before.append(partial(self._order.after, producer, stream))
        address, into = source.address, target.address
        if needs_copy(source):
            copy = device_array(source.nbytes, "u1", device=self._device, drv=self._drv)
            address = as_buffer(copy, self._drv).address
            before.append(partial(self._copier(), source, address, stream))
            held.append(copy)
        if into % PACK_BYTES:
            scratch = device_array(target.nbytes, "u1", device=self._device, drv=self._drv)
            into = as_buffer(scratch, self._drv).address
            after.append(partial(self._drv.call, "cuMemcpyDtoDAsync", target.address, into, target.nbytes, stream))
            held.append(scratch)
        header, code = self._header(source)
        block = self._launch(address, into, source.nbytes, code, stream)
        return PreparedCall(
            gather, lane, block, out, held=tuple(held), header=header, before=tuple(before), after=tuple(after)
        )

    def close(self) -> None:
        """Destroy the event; idempotent."""
        self._order.close()

    def _copier(self) -> StridedCopy:
        if self._strided is None:
            self._strided = StridedCopy(self._drv, load(self._drv, self._device, "copy_strided.ptx").function)
        return self._strided

    def _header(self, source: Buffer) -> tuple[Header, int]:
        key = (source.dtype.str, source.shape)
        known = self._headers.get(key)
        if known is None:
            header = Header(source.nbytes, *key)
            known = self._headers[key] = header, header.code
        return known


def compare(comm: Communicator, call: int, header: Header | None, refused: str | None) -> None:
    """Before call number ``call``, over MPI: CallMismatch unless all ranks mean the same one.

    A rank that refuses its call says why in ``refused``, and is told nothing.
    """
    mine = {"call": call, "refused": refused, **(asdict(header) if header is not None else {})}
    try:
        said = [json.loads(text) for text in comm.all_gather(json.dumps(mine).encode(), "compare a call")]
    except OutOfStep as error:
        raise CallMismatch(f"call {call} is no call of all ranks, and it was not made: {error}", call=call) from error
    if refused is None and any(one != said[0] for one in said):
        rows = "; ".join(f"rank {rank}: {_told(one)}" for rank, one in enumerate(said))
        raise CallMismatch(f"ranks disagree about a call, and it was not made: {rows}", call=call)


def _told(said: dict[str, Any]) -> str:
    if said["refused"]:
        return f"refused call {said['call']} ({said['refused']})"
    return f"call {said['call']} of {said['nbytes']} bytes, dtype {said['dtype']}, shape {tuple(said['shape'])}"


def fits(nbytes: int, limit: int, unit: int) -> bool:
    """Whether ``nbytes`` can be gathered; ``limit`` is the capacity, and sizes are multiples of ``unit``."""
    return 0 < nbytes <= limit and nbytes % unit == 0


def check_size(rank: int, source: Buffer, limit: int, unit: int) -> None:
    """Refuse a size that cannot be gathered."""
    if not fits(source.nbytes, limit, unit):
        expected = f"1 to the capacity of {limit} bytes"
        if unit > 1:
            expected = f"a multiple of {unit} from {unit} to the capacity of {limit} bytes"
        hint = "; TaggedAllGather takes any number of bytes" if 0 < source.nbytes <= limit else ""
        raise ValueError(
            f"rank {rank}: an array of {source.nbytes} bytes cannot be gathered; expected {expected}{hint}"
        )


def check_out(rank: int, source: Buffer, target: Buffer, shape: tuple[int, ...]) -> None:
    """Refuse an ``out`` that cannot hold what ``source`` becomes, ``shape``."""
    mine = f"rank {rank}: out= "
    if target.dtype != source.dtype:
        raise ValueError(f"{mine}has dtype {target.dtype}; expected {source.dtype}, that of the array")
    if target.shape != shape:
        raise ValueError(f"{mine}has shape {target.shape}; expected {shape}")
    if target.strides is not None:
        raise ValueError(f"{mine}is not contiguous (strides {target.strides}); pass a contiguous array or none")
    part = target.address + rank * source.nbytes
    low, high = byte_span(source.shape, source.strides, source.dtype.itemsize)
    apart = source.address + high <= target.address or target.address + target.nbytes <= source.address + low
    if not apart and (source.strides is not None or source.address != part):
        raise ValueError(
            f"{mine}overlaps the array; it may hold the array exactly at this rank's part, "
            f"byte {part - target.address}, or not at all"
        )


def has_fixed_address(array: Any) -> bool:
    """Whether the object can never come to mean other memory: true of our device arrays and of numba's."""
    return isinstance(array, DeviceArray) or type(array).__name__ == "DeviceNDArray"
