"""The multicast address: a store to it lands in every rank's memory at the same offset.

Off switches come first: while one is set on any rank, no call of the driver that begins with cuMulticast is made.
"""

from __future__ import annotations

from .. import settings

__all__ = ["multicast_disabled"]


def multicast_disabled() -> str | None:
    """The variable, as "NAME=value", that forbids multicast in this process; None if none does.

    LAMPORT_NUMBA_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 and NVSHMEM_DISABLE_NVLS=1
    each do, on either device.
    """
    return settings.multicast_switched_off()
