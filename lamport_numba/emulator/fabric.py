"""How stores travel: at once, or as late and as disordered as the protocol allows.

The *immediate* fabric is the machine itself: a store is done when it is executed, and time is the clock's. The
*adversarial*
fabric keeps words to other devices in flight, keeps a CTA's own stores in a buffer, runs lanes in random order, and
has a virtual
clock; everything it does is drawn from one seed (`ptx.adversary` says what it does).
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from .ptx import layout

__all__ = ["Fabric"]

_I64, _I32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
_MASK = (1 << 64) - 1
_FUNCTIONS: dict[str, Any] = {}
_PROTOTYPES = {
    "fabric_random": (ctypes.c_uint64, _PTR),
    "fabric_land": (_I64, _PTR, _I64, _I32),
    "fabric_drain": (_I64, _PTR, _I32),
    "fabric_drain_range": (_I64, _PTR, ctypes.c_uint64, ctypes.c_uint64),
}


def _native(name: str) -> Any:
    found = _FUNCTIONS.get(name)
    if found is None:
        from .ptx.native import runtime_function

        found = _FUNCTIONS[name] = runtime_function(name, ctypes.CFUNCTYPE(*_PROTOTYPES[name]))
    return found


class Fabric:
    """The way between the devices of this process. One object serves all of them; use it from one thread at a time."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.is_adversarial = seed is not None
        self._state = bytearray(layout.FABRIC_BYTES if seed is not None else 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._state)) if seed is not None else 0
        if seed is not None:
            random = _mixed(seed) | 1
            salt = _mixed(seed ^ 0x5DEECE66D)
            layout.FABRIC.packer.pack_into(self._state, 0, random, 0, salt, *[0] * 8, 7, 0)

    @classmethod
    def immediate(cls) -> Fabric:
        """Stores land when they are executed; ``%globaltimer`` is the machine's clock."""
        return _IMMEDIATE

    @classmethod
    def adversarial(cls, seed: int) -> Fabric:
        """Stores land late and out of order; everything, the clock too, follows from ``seed`` (0 to 2**64 - 1)."""
        return cls(seed)

    @property
    def address(self) -> int:
        """Where native code finds the fabric's state; 0 for the immediate one."""
        return self._address

    def _field(self, name: str) -> int:
        if not self._address:
            return 0
        at = layout.FABRIC.offsets[name]
        return int.from_bytes(self._state[at : at + 8], "little")

    @property
    def in_flight(self) -> int:
        """Words that have been sent and have not landed."""
        return self._field("flying")

    @property
    def landed(self) -> int:
        """Words that have landed, since the beginning."""
        return self._field("landed")

    def land(self, words: int = 1, *, hurry: bool = False) -> int:
        """Let up to ``words`` words land, drawn at random; return how many did.

        Some may be held for a while, unless ``hurry`` says that nothing else can happen.
        """
        return int(_native("fabric_land")(self._address, words, hurry)) if self._address else 0

    def drain(self, device: int | None = None) -> int:
        """Let every word in flight (of one sending device, or of all) land; return how many did."""
        if not self._address:
            return 0
        return int(_native("fabric_drain")(self._address, -1 if device is None else device))

    def drain_range(self, base: int, size: int) -> int:
        """Let every word land that is on its way to these host addresses; return how many did.

        To be called before they are unmapped.
        """
        if not self._address:
            return 0
        return int(_native("fabric_drain_range")(self._address, base, size))

    def now(self) -> int:
        """Nanoseconds of ``%globaltimer``."""
        if not self._address:
            return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        return self._field("clock")

    def advance(self, nanoseconds: int) -> None:
        """Move the virtual clock on (nothing else can happen, say). No effect on the immediate fabric."""
        if self._address:
            at = layout.FABRIC.offsets["clock"]
            self._state[at : at + 8] = ((self.now() + nanoseconds) & _MASK).to_bytes(8, "little")

    def hasten(self, on: bool) -> None:
        """Whether a kernel that waits brings its words on their way soon: those who look for them run beside it."""
        if self._address:
            at = layout.FABRIC.offsets["hasty"]
            self._state[at : at + 4] = on.to_bytes(4, "little")

    def draw(self, n: int) -> int:
        """A random integer in [0, n) from the seed, for whoever schedules grids and devices. 0 on the immediate
        fabric."""
        return (_native("fabric_random")(self._address) >> 16) % n if self._address else 0


def _mixed(seed: int) -> int:
    """A seed spread over 64 bits (the finaliser of splitmix64)."""
    x = (seed + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_IMMEDIATE = Fabric()
