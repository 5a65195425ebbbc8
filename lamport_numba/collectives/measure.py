"""transport="measure": time both transports at three sizes during construction, and keep the faster for each size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from ..arrays import device_array
from ..driver import Driver, structs
from ..errors import DriverError
from ..intake import as_buffer
from ..symmetric.communicator import Communicator
from .channel import PACK_BYTES, Channel

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Table", "measure"]

_CALLS: Final = 20
_ROUNDS: Final = 3  # the first one warms up; of the others the faster counts

# The largest size in bytes -> the transport for it and for what is smaller, in ascending order.
Table = Mapping[int, str]


def measure(comm: Communicator, drv: Driver, device: int, channels: Mapping[str, Channel], capacity: int) -> Table:
    """The faster of the channels by size, the same on all ranks. Collective. ``capacity`` is in bytes.

    Sizes are 16 bytes, the capacity, and their geometric mean; a size between two of them goes by the nearer one. What
    counts is the slowest rank's time.
    """
    middle = max(int((PACK_BYTES * capacity) ** 0.5) // PACK_BYTES, 1) * PACK_BYTES
    sizes = sorted({PACK_BYTES, middle, capacity})
    table: dict[int, str] = {}
    with ExitStack() as cleanup:
        with comm.step("allocate what is measured with"):
            clock = cleanup.enter_context(_Clock(comm, drv, device, capacity))
        for place, size in enumerate(sizes):
            every = comm.agree("measure the transports", *clock.times(channels.values(), size))
            slowest = [max(times) for times in zip(*every, strict=True)]
            fastest = min(zip(slowest, channels, strict=True))[1]
            last = place == len(sizes) - 1
            limit = capacity if last else int((size * sizes[place + 1]) ** 0.5) // PACK_BYTES * PACK_BYTES
            table[limit] = fastest
    return table


class _Clock:
    """A stream, two events and the arrays that are gathered."""

    def __init__(self, comm: Communicator, drv: Driver, device: int, capacity: int) -> None:
        self._comm = comm
        self._drv = drv
        self._source = device_array(capacity, "u1", device=device, drv=drv)
        self._target = device_array(capacity * comm.size, "u1", device=device, drv=drv)
        drv.call("cuMemsetD8", as_buffer(self._source, drv).address, 0, capacity)

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            self._stream = self._made(cleanup, "cuStream", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._start, self._end = (self._made(cleanup, "cuEvent", 0) for _ in range(2))
            self._cleanup = cleanup.pop_all()
        return self

    def _made(self, cleanup: ExitStack, kind: str, flags: int) -> Any:
        thing = self._drv.call(f"{kind}Create", flags)
        cleanup.callback(self._drv.call, f"{kind}Destroy", thing)
        return thing

    def __exit__(self, *passing: object) -> None:
        self._cleanup.close()

    def times(self, channels: Collection[Channel], size: int) -> tuple[list[float] | None, Exception | None]:
        """Microseconds a call of ``size`` bytes through each channel, back to back; or the error that came in between.

        Collective. A rank that fails goes through the rest without a call, and its peers' kernels leave at once.
        """
        found, wrong = [], None
        for channel in channels:
            rounds = []
            for _ in range(_ROUNDS):
                self._comm.barrier("measure the transports")
                try:
                    if wrong is None:
                        rounds.append(self._round(channel, size))
                except Exception as error:
                    wrong = error
                    self._leave(channels)
            if wrong is None:
                found.append(min(rounds[1:]))
        return (found, None) if wrong is None else (None, wrong)

    def _leave(self, channels: Collection[Channel]) -> None:
        """Let the peers' kernels go, and wait for those of this rank."""
        with suppress(DriverError):
            for channel in channels:
                channel.tell_left()
                channel.silence()
            self._drv.call("cuStreamSynchronize", self._stream)

    def _round(self, channel: Channel, size: int) -> float:
        call = self._drv.call
        source, target = (as_buffer(array, self._drv).address for array in (self._source, self._target))
        block = channel.block(source, target, size, 0, int(self._stream))
        call("cuEventRecord", self._start, self._stream)
        for _ in range(_CALLS):
            block.launch()
        call("cuEventRecord", self._end, self._stream)
        call("cuStreamSynchronize", self._stream)
        channel.restart_calls()
        return float(call("cuEventElapsedTime", self._start, self._end)) * 1e3 / _CALLS
