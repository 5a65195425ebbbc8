"""Which transport a collective takes: the wish, the off switches, what the devices have; the same on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .. import driver as seam
from .. import settings
from ..errors import MulticastUnavailable
from .communicator import Communicator
from .survey import Survey, survey

__all__ = ["TRANSPORTS", "Transport", "choose_transport", "why_no_multicast"]

log = logging.getLogger("lamport_numba")

TRANSPORTS = ("auto", "peer", "multicast", "measure")


@dataclass(frozen=True)
class Transport:
    """A decision that is the same on all ranks.

    ``name`` is "peer", "multicast" or "measure" (both, to be timed). ``required``: multicast was asked for by name, so
    that a failure to set it up is an error and no reason to go by ``peer``. ``reason`` is for people.
    """

    name: str
    reason: str
    required: bool = False

    @property
    def multicast(self) -> bool:
        """Whether a multicast address is to be made."""
        return self.name != "peer"


def choose_transport(
    communicator: Communicator, drv: seam.Driver, device: int, requested: str | None = None
) -> Transport:
    """Decide between ``peer`` and ``multicast``. Collective; not one multicast call is made.

    ``requested``: "peer"; "multicast", which raises MulticastUnavailable if it cannot be had; "auto" (or None: what
    LAMPORT_NUMBA_TRANSPORT says), multicast where every rank can and there are more than two; "measure", both where
    both can be had. Raises ValueError for anything else, SetupError if the ranks ask for different ones.
    """
    wish = requested
    if requested in (None, "auto"):
        wish = settings.get("TRANSPORT")
    if wish not in TRANSPORTS:
        raise ValueError(f"transport is {requested!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")
    found = survey(communicator, drv, device, transport=wish)
    found.require_equal()
    if wish == "peer":
        return Transport("peer", "peer was asked for")
    missing = why_no_multicast(found)
    if wish == "multicast":
        if missing is not None:
            raise missing
        return Transport("multicast", "multicast was asked for", required=True)
    if missing is not None:
        return _told(communicator, Transport("peer", str(missing)))
    if wish == "measure":
        return Transport("measure", "the faster is measured for each size")
    if communicator.size <= 2:
        return _told(communicator, Transport("peer", f"multicast gains nothing with {communicator.size} ranks"))
    return _told(communicator, Transport("multicast", "every rank has it"))


def _told(communicator: Communicator, transport: Transport) -> Transport:
    if communicator.rank == 0:
        log.info("transport %s: %s", transport.name, transport.reason)
    return transport


def why_no_multicast(found: Survey) -> MulticastUnavailable | None:
    """What stands against multicast as far as can be told without making it; None if nothing does."""
    for rank, facts in enumerate(found.ranks):
        if facts.multicast_off is not None:
            return MulticastUnavailable(
                f"multicast is switched off on rank {rank} by {facts.multicast_off}",
                reason="disabled",
                rank=rank,
                step="survey",
            )
    for rank, facts in enumerate(found.ranks):
        if not facts.multicast_attribute:
            mig = " MIG " in f"{facts.name} "
            why = "it is a MIG slice" if mig else "no NVSwitch, MIG, a virtual machine, or confidential computing"
            return MulticastUnavailable(
                f"rank {rank}'s device ({facts.name}) has CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=0: {why}",
                reason="mig" if mig else "attribute",
                rank=rank,
                step="survey",
            )
    sharing = found.sharing()
    if sharing:
        names = " and ".join(map(str, sharing))
        return MulticastUnavailable(
            f"multicast needs a device for each rank, and ranks {names} share one",
            reason="world",
            rank=sharing[1],
            step="survey",
        )
    return None
