"""A grid in flight on one emulated device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from .addresses import Access, AddressTable, Entry, Kind, Member
from .fabric import Fabric
from .ptx import layout

if TYPE_CHECKING:
    from .ptx import Kernel

__all__ = ["Access", "AddressTable", "Entry", "Fabric", "Fault", "Grid", "Kind", "Member", "Status"]


class Status(IntEnum):
    """What `Grid.run` came back with."""

    RUNNING = layout.RUNNING  # the quantum is used up
    STALLED = layout.STALLED  # a whole pass in which no lane got anywhere
    FINISHED = layout.FINISHED
    FAULTED = layout.FAULTED


@dataclass(frozen=True)
class Fault:
    """What a thread did that the hardware would not allow."""

    kind: str
    kernel: str
    line: int
    text: str  # the PTX line
    ctaid: tuple[int, int, int]
    tid: tuple[int, int, int]
    address: int | None
    size: int

    def __str__(self) -> str:
        where = f" {self.address:#x} ({self.size} bytes)" if self.address is not None else ""
        return (
            f"{self.kind}{where}: kernel {self.kernel}, CTA {self.ctaid}, thread {self.tid}, "
            f"PTX line {self.line}: {self.text.strip()}"
        )


class Grid:
    """One launch of a kernel.

    Args:
        kernel: from `ptx.load`.
        table: the device's addresses.
        grid, block: extents (x, y, z).
        shared_bytes: dynamic shared memory of a CTA; the kernel's static part comes on top.
        params: the parameter block as `Kernel.params` lays it out.
        fabric: how its stores travel.
        released: whether ``griddepcontrol.wait`` passes from the start.
        variables: addresses of the module's variables, from `Module.place`; needed only where there are any.
    """

    def __init__(
        self,
        kernel: Kernel,
        table: AddressTable,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        fabric: Fabric,
        *,
        released: bool = True,
        variables: ctypes.Array[ctypes.c_uint64] | None = None,
    ) -> None:
        raise NotImplementedError

    def run(self, ctas: int, quantum: int) -> Status:
        """Run natively, without the GIL.

        Args:
            ctas: how many CTAs may be resident now; those that already are stay.
            quantum: about how many lane steps to take before coming back.
        """
        raise NotImplementedError

    @property
    def resident(self) -> int:
        """CTAs that hold a slot now."""
        raise NotImplementedError

    @property
    def triggered(self) -> bool:
        """Whether every CTA has called ``griddepcontrol.launch_dependents`` or exited."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Lane steps taken so far."""
        raise NotImplementedError

    def release(self) -> None:
        """Let ``griddepcontrol.wait`` pass from now on."""
        raise NotImplementedError

    @property
    def fault(self) -> Fault | None:
        """What went wrong, after FAULTED."""
        raise NotImplementedError

    def abort(self) -> None:
        """Give the grid up: nothing of it runs again. From another thread it ends a `run` within a pass (answer
        FAULTED, fault "stopped")."""
        raise NotImplementedError
