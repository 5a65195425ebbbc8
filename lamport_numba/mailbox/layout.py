"""Where the regions of a mailbox lie: offsets that a kernel can take as constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .lowering import PAIR_BYTES, region_id

_REGION_ALIGNMENT = 128  # a line of the L2 cache, so that regions do not share one


@dataclass(frozen=True)
class Region:
    """A named part of a mailbox: ``pairs`` of 8 bytes each, ``offset`` bytes from the start of its space."""

    name: str
    space: str  # "scratch" or "peer"
    pairs: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.pairs * PAIR_BYTES


class MailboxLayout:
    """Regions laid out over one scratch allocation and one symmetric allocation.

    Scratch regions serve the CTAs of one GPU and exist once: a launch ends before the next begins. Peer regions serve
    other
    ranks and exist twice: launches use the two buffers in turn, ``stride`` bytes apart, because a peer may be one
    launch ahead.

    >>> layout = MailboxLayout(scratch={"partials": 64}, peer={"inbox": 8})
    >>> layout["inbox"].offset, layout.stride
    (0, 128)

    Args:
        scratch: name -> number of pairs.
        peer: name -> number of pairs.

    Raises:
        ValueError: no region, a name twice, a number of pairs below 1, or two names with one number in reports.
    """

    def __init__(self, *, scratch: Mapping[str, int] | None = None, peer: Mapping[str, int] | None = None) -> None:
        self._regions: dict[str, Region] = {}
        self.scratch_bytes = self._place("scratch", scratch or {})
        self.stride = self._place("peer", peer or {})
        self.peer_bytes = 2 * self.stride
        if not self._regions:
            raise ValueError(
                "a mailbox needs at least one region: MailboxLayout(scratch={name: pairs}, peer={name: pairs})"
            )
        self._by_id = {region_id(name): name for name in self._regions}
        if len(self._by_id) != len(self._regions):
            raise ValueError(f"two of the names {', '.join(self._regions)} have the same number in reports: rename one")

    def _place(self, space: str, regions: Mapping[str, int]) -> int:
        """Lay out the regions of one space; returns its size in bytes."""
        at = 0
        for name, pairs in regions.items():
            if name in self._regions:
                raise ValueError(f"region {name!r} is given twice: a name is for one space")
            if pairs < 1:
                raise ValueError(f"region {name!r} has {pairs} pairs: at least 1 is needed")
            region = self._regions[name] = Region(name, space, int(pairs), at)
            at += -(-region.nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
        return at

    def __getitem__(self, name: str) -> Region:
        if name not in self._regions:
            raise KeyError(f"no region is named {name!r}; expected one of {', '.join(map(repr, self._regions))}")
        return self._regions[name]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def __repr__(self) -> str:
        return f"MailboxLayout({', '.join(f'{r.name}: {r.pairs} {r.space} pairs' for r in self._regions.values())})"

    def offset(self, name: str) -> int:
        """Bytes from the start of its space to a region; for a peer region, in the buffer of parity 0."""
        return self[name].offset

    def named(self, number: int) -> str:
        """The region that a report names by ``number``."""
        return self._by_id.get(number, f"number {number:#010x}")
