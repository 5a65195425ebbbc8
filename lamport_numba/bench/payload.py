"""Payloads that encode (call, rank, word): in numpy, and made and checked on the device by ptx/stress_*.ptx."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collectives.launch import Block
from .rig import Rig, address_of
from .sizes import PACK_BYTES

__all__ = ["Mismatch", "Payloads", "State", "expected", "origin", "words"]

SENTINEL = 0x80000000
STATE_BYTES = 64
_CALL, _RANK, _MULTIPLIER = 0x9E3779B9, 0xB7E15163, 0x243F6A89
_MASK = 0xFFFFFFFF
_MOST_CTAS = 32  # these kernels share the device with grids that spin, and must leave them room
_CTA = 256

Words = np.ndarray[Any, np.dtype[np.uint32]]


def mix(call: int, rank: int) -> int:
    """Word 0 of a rank's payload in a call."""
    h = (call * _CALL + (rank + 1) * _RANK) & _MASK
    h ^= h >> 16
    h = h * _MULTIPLIER & _MASK
    return h ^ h >> 15


def words(call: int, rank: int, nbytes: int) -> Words:
    """The words that ``rank`` sends in ``call``."""
    index = np.arange(nbytes // 4, dtype=np.uint32)
    return np.uint32(mix(call, rank)) + index * np.uint32(_CALL)


def expected(call: int, world: int, nbytes: int) -> Words:
    """The words that every rank receives in ``call``: all payloads in rank order, 0 in place of the sentinel."""
    found = np.concatenate([words(call, rank, nbytes) for rank in range(world)])
    found[found == SENTINEL] = 0
    return found


def origin(word: int, around: int, world: int, nbytes: int, *, reach: int = 64) -> tuple[int, int, int] | None:
    """Which (call, rank, word) a word is, among the calls within ``reach`` of ``around``; None if none of them."""
    if word == 0:
        return None
    inverse = pow(_CALL, -1, 1 << 32)
    for distance in range(reach + 1):
        for call in {around - distance, around + distance}:
            for rank in range(world if call >= 0 else 0):
                index = (word - mix(call, rank)) * inverse & _MASK
                if index < nbytes // 4:
                    return call, rank, index
    return None


@dataclass(frozen=True)
class Mismatch:
    """A word of an output that was not what its source sent. ``rank`` is the source, ``word`` the index in its part."""

    call: int
    rank: int
    word: int
    expected: int
    got: int

    def story(self, world: int, capacity: int) -> str:
        """The mismatch in full, and what the word is if it is any payload."""
        what = (
            "the sentinel" if self.got == SENTINEL else "0" if self.got == 0 else "no payload of a call near this one"
        )
        found = origin(self.got, self.call, world, capacity)
        if found is not None:
            call, rank, word = found
            when = "earlier" if call < self.call else "later"
            what = f"word {word} of rank {rank} in call {call}, {abs(self.call - call)} calls {when}"
            if call == self.call:
                what = f"word {word} of rank {rank} in the same call"
        return (
            f"call {self.call}, source rank {self.rank}, word {self.word}: "
            f"expected {self.expected:#010x}, got {self.got:#010x} ({what})"
        )


@dataclass(frozen=True)
class State:
    """What the device has counted."""

    calls: int
    bad_words: int
    bad_calls: int
    first: Mismatch | None

    @classmethod
    def of(cls, raw: Words) -> State:
        """Read the 64 bytes that ptx/stress_check.ptx describes."""
        first = Mismatch(*(int(word) for word in raw[8:13])) if raw[4] else None
        return cls(int(raw[0]), int(raw[2]) | int(raw[3]) << 32, int(raw[6]), first)


class Payloads:
    """Queues the kernels that make a call's payload, check its output, and count calls, on the rig's stream.

    ``offset`` is the number of a call within what is queued together; ``advance`` ends that.
    """

    def __init__(self, rig: Rig, rank: int, world: int, *, pdl: bool) -> None:
        self._rig, self._rank, self._world, self._pdl = rig, rank, world, pdl
        self._held = rig.array(STATE_BYTES)
        self.state = address_of(self._held)
        for kernel in ("stress_fill", "stress_check", "stress_advance"):
            rig.kernel(kernel)  # not while a graph is captured
        rig.zero(self.state, STATE_BYTES)
        rig.synchronize()
        self._blocks: dict[tuple[str, int, int], Block] = {}

    def fill(self, address: int, nbytes: int, offset: int) -> None:
        """Make this rank's payload of the call at ``address``."""
        self._launch("stress_fill", address, nbytes // PACK_BYTES, self._rank, nbytes // PACK_BYTES, offset)

    def check(self, address: int, nbytes: int, offset: int) -> None:
        """Compare the call's output at ``address``; ``nbytes`` are those of one rank."""
        packs = nbytes // PACK_BYTES
        self._launch("stress_check", address, packs, self._world, packs * self._world, offset)

    def advance(self, calls: int) -> None:
        """Move the device's count of calls on."""
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        key = ("stress_advance", 0, 0)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._block(key[0], [u64(self.state), u32(0)], 1)
        block.parameters[1].value = calls
        block.launch()

    def read(self) -> State:
        """What the device has counted when the stream's present work is done."""
        return State.of(self._rig.read(self.state, STATE_BYTES))

    def _launch(self, kernel: str, address: int, packs: int, number: int, items: int, offset: int) -> None:
        key = (kernel, address, packs)
        block = self._blocks.get(key)
        if block is None:
            u32, u64 = ctypes.c_uint32, ctypes.c_uint64
            parameters = [u64(address), u32(packs), u32(number), u32(0), u64(self.state)]
            block = self._blocks[key] = self._block(kernel, parameters, items)
        block.parameters[3].value = offset
        block.launch()

    def _block(self, kernel: str, parameters: list[Any], items: int) -> Block:
        threads = 1 if items == 1 else min(_CTA, -(-items // 32) * 32)
        grid = (min(-(-items // threads), _MOST_CTAS), 1)
        rig = self._rig
        return Block(rig.kernel(kernel), parameters, grid=grid, threads=threads, stream=rig.stream, pdl=self._pdl)
