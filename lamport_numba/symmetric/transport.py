"""Which transport a collective takes: the wish, the off switches, what the devices have; the same on all ranks."""

from __future__ import annotations

import logging

from .. import driver as seam
from ..errors import MulticastUnavailable
from .communicator import Communicator
from .survey import Survey, survey

__all__ = ["choose_transport", "why_no_multicast"]

log = logging.getLogger("lamport_numba")


def choose_transport(communicator: Communicator, drv: seam.Driver, device: int, requested: str) -> str:
    """Decide between "peer" and "multicast". Collective, the same on all ranks; not one multicast call is made.

    ``requested``: "peer"; "multicast", which raises MulticastUnavailable if it cannot be had; "auto": multicast where
    every rank can and there are more than two. Raises SetupError if the ranks ask for different ones. That multicast
    really works only a bind can prove: SymmetricMemory raises MulticastUnavailable on all ranks where it does not.
    """
    if requested not in ("auto", "peer", "multicast"):
        raise ValueError(f"transport is {requested!r}; expected 'auto', 'peer' or 'multicast'")
    found = survey(communicator, drv, device, transport=requested)
    found.require_equal()
    if requested == "peer":
        return "peer"
    missing = why_no_multicast(found)
    if requested == "multicast":
        if missing is not None:
            raise missing
        return "multicast"
    chosen, reason = "multicast", "every rank has multicast"
    if missing is not None:
        chosen, reason = "peer", str(missing)
    elif communicator.size <= 2:
        chosen, reason = "peer", f"multicast gains nothing with {communicator.size} ranks"
    if communicator.rank == 0:
        log.info("transport %s: %s", chosen, reason)
    return chosen


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
