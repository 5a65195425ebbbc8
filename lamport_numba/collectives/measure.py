"""transport="measure": time both transports at three sizes during construction, and keep the faster for each size."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from ..arrays import device_array
from ..driver import Driver, structs
from ..intake import as_buffer
from ..symmetric.communicator import Communicator
from .channel import PACK_BYTES, Channel

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
    source = device_array(capacity, "u1", device=device, drv=drv)
    target = device_array(capacity * comm.size, "u1", device=device, drv=drv)
    drv.call("cuMemsetD8", as_buffer(source, drv).address, 0, capacity)
    stream = drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
    table: dict[int, str] = {}
    try:
        for place, size in enumerate(sizes):
            mine = [_time(comm, drv, channel, source, target, size, stream) for channel in channels.values()]
            shape = struct.Struct(f"<{len(mine)}d")
            every = [shape.unpack(text) for text in comm.all_gather(shape.pack(*mine), "measure the transports")]
            slowest = [max(times) for times in zip(*every, strict=True)]
            fastest = min(zip(slowest, channels, strict=True))[1]
            last = place == len(sizes) - 1
            limit = capacity if last else int((size * sizes[place + 1]) ** 0.5) // PACK_BYTES * PACK_BYTES
            table[limit] = fastest
    finally:
        drv.call("cuStreamDestroy", stream)
    return table


def _time(comm: Communicator, drv: Driver, channel: Channel, source: Any, target: Any, size: int, stream: Any) -> float:
    """Microseconds a call of ``size`` bytes through ``channel``, back to back."""
    addresses = as_buffer(source, drv).address, as_buffer(target, drv).address
    block = channel.block(*addresses, size, 0, int(stream))
    start, end = drv.call("cuEventCreate", 0), drv.call("cuEventCreate", 0)
    times = []
    try:
        for _ in range(_ROUNDS):
            comm.barrier("measure the transports")
            drv.call("cuEventRecord", start, stream)
            for _ in range(_CALLS):
                block.launch()
            drv.call("cuEventRecord", end, stream)
            drv.call("cuStreamSynchronize", stream)
            times.append(float(drv.call("cuEventElapsedTime", start, end)) * 1e3 / _CALLS)
        channel.restart_calls()
    finally:
        drv.call("cuEventDestroy", start)
        drv.call("cuEventDestroy", end)
    return min(times[1:])
