"""What every rank tells the others before anything is made, so that all reach the same decision."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from typing import Any

from .. import driver as seam
from .._version import __version__
from ..errors import SetupError
from .communicator import Communicator, boot_id
from .multicast import multicast_disabled

__all__ = ["Facts", "Survey", "survey"]


@dataclass(frozen=True)
class Facts:
    """One rank's place, device and wishes."""

    host: str
    boot: str  # tells hosts apart; containers of one host have the same
    network: int  # network namespace: abstract sockets reach no further
    processes: int  # process namespace: pids mean the same only within one
    pid: int
    uid: int
    version: str
    kind: str
    device: int
    uuid: str
    name: str
    driver: int
    multicast_attribute: bool
    multicast_off: str | None  # the variable that forbids multicast
    fds: bool  # the device shares memory by file descriptors
    fabric: bool  # the device says so; only a probe proves it
    wish: Any  # what must be equal on all ranks


class Survey:
    """All ranks' facts, in rank order, and what follows from them."""

    def __init__(self, rank: int, ranks: list[Facts]) -> None:
        self.rank = rank
        self.ranks = ranks

    @property
    def mine(self) -> Facts:
        return self.ranks[self.rank]

    def several(self, field: str) -> bool:
        """Whether the ranks differ in a field."""
        return len({getattr(facts, field) for facts in self.ranks}) > 1

    def by(self, field: str) -> str:
        """Each value of a field and who has it, for an error: "cuda (ranks 0, 1), emulated (rank 2)"."""
        groups: dict[Any, list[int]] = {}
        for rank, facts in enumerate(self.ranks):
            value = getattr(facts, field)
            groups.setdefault(str(value), []).append(rank)
        return ", ".join(f"{value} ({_ranks(ranks)})" for value, ranks in groups.items())

    def require_equal(self) -> None:
        """Raise SetupError if ranks run different versions or devices, or wish for different things."""
        for field, what in (("version", "versions of the library"), ("kind", "kinds of device")):
            if self.several(field):
                raise SetupError(f"the ranks use different {what}: {self.by(field)}", step="survey")
        wishes = [facts.wish for facts in self.ranks]
        for key in wishes[0]:
            if any(wish.get(key) != wishes[0][key] for wish in wishes):
                groups: dict[str, list[int]] = {}
                for rank, wish in enumerate(wishes):
                    groups.setdefault(str(wish.get(key)), []).append(rank)
                told = ", ".join(f"{value} ({_ranks(ranks)})" for value, ranks in groups.items())
                raise SetupError(f"the ranks ask for different values of {key}: {told}", step="survey")

    def devices(self) -> dict[str, list[int]]:
        """The ranks that use each device, by UUID."""
        users: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.ranks):
            users.setdefault(facts.uuid, []).append(rank)
        return users

    def sharing(self) -> list[int]:
        """Ranks that share one device; the first such device's, or none."""
        return next((ranks for ranks in self.devices().values() if len(ranks) > 1), [])


def survey(communicator: Communicator, drv: seam.Driver, device: int, **wish: Any) -> Survey:
    """Gather every rank's facts. Collective; a rank that cannot even tell them makes all raise the same error.

    ``wish`` are values that must be the same on all ranks; ``Survey.require_equal`` tells.
    """
    with communicator.step("survey") as step:
        step.value = dataclasses.asdict(_facts(drv, device, wish))
    return Survey(communicator.rank, [Facts(**facts) for facts in step.values])


def _facts(drv: seam.Driver, device: int, wish: dict[str, Any]) -> Facts:
    return Facts(
        host=socket.gethostname(),
        boot=boot_id(),
        network=namespace("net"),
        processes=namespace("pid"),
        pid=os.getpid(),
        uid=os.geteuid(),
        version=__version__,
        kind=drv.kind,
        device=device,
        uuid=drv.device_uuid(device).hex(),
        name=drv.device_name(device),
        driver=int(drv.call("cuDriverGetVersion")),
        multicast_attribute=bool(drv.attribute(device, "MULTICAST_SUPPORTED")),
        multicast_off=multicast_disabled(),
        fds=bool(drv.attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        fabric=bool(drv.attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED")),
        wish=wish,
    )


def namespace(kind: str) -> int:
    """The number of this process's namespace, 0 where the system does not tell."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
