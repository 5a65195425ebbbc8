"""How stores travel: at once, or as late and as disordered as the protocol allows.

The *immediate* fabric is the machine itself: a store is done when it is executed, and time is the clock's. The
*adversarial* fabric
keeps words to other devices in flight, keeps a CTA's own stores in a buffer, runs lanes in random order, and has a
virtual clock;
everything it does is drawn from one seed.
"""

from __future__ import annotations

import time

__all__ = ["Fabric"]


class Fabric:
    """The way between the devices of this process. One object serves all of them."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    @classmethod
    def immediate(cls) -> Fabric:
        """Stores land when they are executed; ``%globaltimer`` is the machine's clock."""
        return _IMMEDIATE

    @classmethod
    def adversarial(cls, seed: int) -> Fabric:
        """Stores land late and out of order; everything, the clock too, follows from ``seed``."""
        return cls(seed)

    @property
    def is_adversarial(self) -> bool:
        return self.seed is not None

    @property
    def address(self) -> int:
        """Where native code finds the fabric's state; 0 for the immediate one."""
        return 0

    @property
    def in_flight(self) -> int:
        """Words that have been sent and have not landed."""
        return 0

    def land(self, words: int = 1) -> int:
        """Let up to ``words`` words land, drawn at random; return how many did."""
        return 0

    def drain(self, device: int | None = None) -> int:
        """Let every word in flight (of one sending device, or of all) land; return how many did."""
        return 0

    def drain_range(self, base: int, size: int) -> int:
        """Let every word land that is on its way to these host addresses (before they are unmapped); return how many
        did."""
        return 0

    def now(self) -> int:
        """Nanoseconds of ``%globaltimer``."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)

    def advance(self, nanoseconds: int) -> None:
        """Move the virtual clock on (nothing else can happen, say). No effect on the immediate fabric."""

    def draw(self, n: int) -> int:
        """A random integer in [0, n) from the seed, for whoever schedules grids and devices. 0 on the immediate
        fabric."""
        return 0


_IMMEDIATE = Fabric()
