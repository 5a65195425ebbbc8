"""Which channels an all-gather has, and which of them carries a size."""

from __future__ import annotations

import logging

from ..driver import Driver
from ..errors import MulticastUnavailable
from ..symmetric import Communicator, choose_transport
from .channel import PACK_BYTES, Channel, Plan
from .measure import Table, measure

__all__ = ["open_channels"]

log = logging.getLogger("lamport_numba")


def open_channels(
    kind: type[Channel],
    comm: Communicator,
    drv: Driver,
    device: int,
    asked: str,
    plan: Plan,
    channels: dict[str, Channel],
) -> Table:
    """Build what the transport that was ``asked`` for needs, into ``channels``; collective.

    ``channels`` holds what has been built also if this raises: MulticastUnavailable only where multicast was asked
    for by name.
    """
    for transport in _candidates(comm, drv, device, asked):
        try:
            channels[transport] = kind(comm, drv, device, transport, plan)
        except MulticastUnavailable as reason:  # on all ranks alike
            if asked == "multicast":
                raise
            _say(comm, asked, f"going by peer: {reason}")
    if not channels:
        channels["peer"] = kind(comm, drv, device, "peer", plan)
    capacity = plan.capacity * PACK_BYTES
    if len(channels) == 1:
        return {capacity: next(iter(channels))}
    table = measure(comm, drv, device, channels, capacity)
    for unused in sorted(set(channels) - set(table.values())):
        channels[unused].close()
        del channels[unused]
    return table


def _candidates(comm: Communicator, drv: Driver, device: int, asked: str) -> list[str]:
    """The transports to build, the same on all ranks."""
    if asked != "measure":
        return [choose_transport(comm, drv, device, asked)]
    try:
        return ["peer", choose_transport(comm, drv, device, "multicast")]
    except MulticastUnavailable as reason:
        _say(comm, asked, f"nothing to measure, going by peer: {reason}")
        return ["peer"]


def _say(comm: Communicator, asked: str, what: str) -> None:
    if comm.rank == 0:
        log.warning("transport %s: %s", asked, what)
