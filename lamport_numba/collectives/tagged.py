"""The tagged all-gather: every word travels beside the number of its call, so that all its bits are payload."""

from __future__ import annotations

from typing import Any

from .base import AllGather
from .channel import RowChannel
from .reports import CONTROL_BYTES

__all__ = ["TaggedAllGather"]


class TaggedChannel(RowChannel):
    """The pairs of ptx/tagged_peer.ptx and ptx/tagged_multicast.ptx: no sentinel, no reset, any number of bytes."""

    protocol = "tagged"
    unit = 1
    generations = 2  # the parities
    slot_bytes = 32  # four pairs
    words_a_warp = 2  # its last tag, and its parity

    def fill(self) -> None:
        mailbox = self.memory.local + CONTROL_BYTES
        self.drv.call("cuMemsetD32Async", mailbox, 0, self.mailbox_bytes() // 4, self._side)  # 0 is never a tag


class TaggedAllGather(AllGather):
    """An all-gather that is exact for every bit pattern of every dtype, and takes any number of bytes.

    Take it for float64, integers, bytes, fp8, and for floats whose -0.0 matters. It sends twice the bytes of
    ``LamportAllGather``: each 32-bit word travels beside a 32-bit tag, the number of the call, and is there when the
    tag is. For 2- and 4-byte floats of more than a few KiB a rank, ``LamportAllGather`` is the faster one; below, the
    two take about the same time.

    The arguments, the call, the errors and the transports are those of ``AllGather``, with two differences: an array
    may have any size from 1 byte to the capacity (a multiple of 16 is fastest), and no dtype is warned about. Over
    multicast a pair is a store of its own, because ``multimem.st`` has no wider integer form.

    Protocol: ptx/tagged_peer.ptx and ptx/tagged_multicast.ptx say what each call does and why it is safe.
    """

    _channel = TaggedChannel

    def __init__(self, comm: Any, rank_capacity_bytes: int, **options: Any) -> None:
        super().__init__(comm, rank_capacity_bytes, **options)
