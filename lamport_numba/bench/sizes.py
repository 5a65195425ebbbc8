"""Sizes as people write them: 16, 4K, 1M, and ranges of them."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

__all__ = ["PACK_BYTES", "Span", "doublings", "draw", "parse", "text"]

PACK_BYTES = 16
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)(?:I?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """All multiples of 16 bytes from ``low`` to ``high``."""

    low: int
    high: int


def parse(sizes: str) -> list[Span]:
    """Read "16,1K,4K-1M": sizes in bytes of one rank, with K, M and G for powers of 1,024, and ranges of them.

    Raises ValueError for anything else and for a size that is not a positive multiple of 16.
    """
    spans = []
    for part in sizes.split(","):
        low, dash, high = part.strip().partition("-")
        span = Span(_one(low), _one(high) if dash else _one(low))
        if span.low > span.high:
            raise ValueError(f"{part.strip()!r} is not a range: {span.low} is above {span.high}")
        spans.append(span)
    return spans


def _one(size: str) -> int:
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ValueError(f"{size!r} is not a size: expected bytes as in 16, 4K or 1M")
    nbytes = int(found[1]) * _UNITS[found[2].upper()]
    if nbytes <= 0 or nbytes % PACK_BYTES:
        raise ValueError(f"{size!r} is {nbytes} bytes: expected a positive multiple of {PACK_BYTES}")
    return nbytes


def doublings(spans: list[Span]) -> list[int]:
    """The sizes to measure: each single size, and each range by doubling from its low end."""
    found = set()
    for span in spans:
        size = span.low
        while size <= span.high:
            found.add(size)
            size *= 2
    return sorted(found)


def draw(spans: list[Span], rng: random.Random) -> int:
    """A size of one of the spans: small and large ones alike, as the logarithm of a range is drawn evenly."""
    span = rng.choice(spans)
    low, high = span.low // PACK_BYTES, span.high // PACK_BYTES
    packs = int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))
    return min(max(packs, low), high) * PACK_BYTES


def text(nbytes: int) -> str:
    """A size as people write it."""
    for unit in ("M", "K"):
        if nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)
