"""What the emulated machine is like: one table of values, from the environment, from ``configure``, or the defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from .. import settings
from ..launcher import launched

__all__ = ["CONFIG", "Config", "configure", "from_environment"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20


@dataclass
class Config:
    """Values of the emulated machine. Sizes in bytes, times in seconds."""

    devices: int = 1
    """Devices that a process sees; may grow while the process runs, never shrink."""
    multiprocessors: int = 132
    """Streaming multiprocessors of a device, where ``residency`` is not set."""
    residency: int | None = None
    """CTAs that a device holds at once, of any size: then a device has this many multiprocessors of one CTA each."""
    fabric: str = "immediate"
    """"immediate" or "adversarial": how stores travel to other ranks and in which order threads run."""
    seed: int = 0
    """What every random choice of the adversarial fabric is drawn from."""
    memory: int = 64 << 30
    """Memory of a device. Pages that nobody touches cost nothing."""
    granularity: int = 64 * KIB
    """Of physical memory. Not the 2 MiB of today's GPUs: what a program must not take for granted is made different."""
    multicast_granularity: int = 128 * KIB
    """The minimum one of multicast objects; likewise."""
    multicast_recommended: int = 512 * MIB
    """The recommended one, which can be huge."""
    multicast_supported: bool = True
    """What CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED says; the calls answer 801 if not."""
    multicast_slots: int = 128
    """Multicast objects with memory bound, per device; the next bind answers 2."""
    multicast_wait: float = 60.0
    """A bind or map blocks until all devices are added; after this long it answers 909 instead of hanging."""
    fabric_handles: bool = False
    """Whether FABRIC handles can be made (an IMEX channel is there). The device attribute says 1 either way."""
    ptx_version: tuple[int, int] = (9, 9)
    """The newest PTX .version that the driver takes; newer text answers 222."""
    quantum: int = 4096
    """Scheduler passes a grid may run before the engine looks at the other grids."""
    leak_report: bool = True
    """Whether handles, mappings, reservations and descriptors that are left at exit are reported."""


def from_environment() -> Config:
    """The defaults, changed by the LAMPORT_NUMBA_* variables that concern the emulated device."""
    return Config(
        devices=settings.get("EMULATED_DEVICES") or launched().local_size or 1,
        residency=settings.get("RESIDENCY"),
        fabric=settings.get("FABRIC"),
        seed=settings.get("SEED"),
    )


CONFIG: Final = from_environment()


def configure(**changes: Any) -> None:
    """Change the emulated machine from now on; ``configure(residency=None)`` gives a value back to its default.

    Names are the fields of ``Config``. ``devices`` can only grow. ``fabric`` and ``seed`` start the fabric anew, and
    want a machine with no work in flight.
    """
    from .machine import MACHINE

    fields = {field.name: field for field in dataclasses.fields(Config)}
    for name, value in changes.items():
        if name not in fields:
            raise TypeError(f"configure() has no {name!r}; it takes {', '.join(fields)}")
        if name == "residency" and value is not None and value < 1:
            raise ValueError(f"residency is {value}; expected at least 1 CTA, or None")
        if name == "fabric" and value not in ("immediate", "adversarial"):
            raise ValueError(f"fabric is {value!r}; expected 'immediate' or 'adversarial'")
        if name == "devices" and value < len(MACHINE.devices):
            raise ValueError(f"devices is {value}; {len(MACHINE.devices)} are there already and cannot go")
    for name, value in changes.items():
        setattr(CONFIG, name, value)
    MACHINE.configured(set(changes))
