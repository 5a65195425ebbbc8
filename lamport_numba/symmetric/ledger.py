"""What a rank owes the driver, paid back in the order that the driver wants, by plain numbers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from .. import driver as seam
from ..errors import DriverError

__all__ = ["Ledger", "Turn"]

log = logging.getLogger("lamport_numba")

_DEINITIALIZED: Final = 4


class Turn(IntEnum):
    """The order of teardown: a bind goes before the mapping, the multicast object before the memory."""

    UNBIND = 0
    MULTICAST_UNMAP = 1
    MULTICAST_ADDRESS = 2
    MULTICAST_RELEASE = 3
    UNMAP = 4
    ADDRESS = 5
    RELEASE = 6


class Ledger:
    """Debts: driver calls with integer arguments, each struck out once it has succeeded.

    It holds no reference to the objects it cleans up after, so a finaliser can own it.
    """

    def __init__(self, drv: seam.Driver, device: int) -> None:
        self._drv = drv
        self._device = device
        self._pid = os.getpid()
        self._debts: list[tuple[Turn, int, str, tuple[int, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._debts)

    def owe(self, turn: Turn, call: str, *args: int) -> Callable[[], None]:
        """Note a debt; call what is returned to pay it early."""
        self._count += 1
        debt = (turn, -self._count, call, args)  # within a turn the last made goes first
        self._debts.append(debt)
        self._debts.sort()
        return lambda: self._pay(debt)

    def settle(self) -> None:
        """Pay everything, in order; raises at the first failure, and can be called again."""
        if self._debts:
            with self._drv.current(self._device):
                while self._debts:
                    self._pay(self._debts[0])

    def abandon(self) -> None:
        """Pay what can be paid, locally and without raising. A finaliser calls it: the interpreter may be ending."""
        try:
            if os.getpid() != self._pid:
                self._debts.clear()  # a fork's child has nothing of this
            while self._debts:
                try:
                    self._pay(self._debts[0])
                except DriverError as error:
                    del self._debts[0]
                    if error.code != _DEINITIALIZED:  # then the driver has taken everything back by itself
                        log.warning("not given back: %s", error)
        except Exception as error:
            log.debug("not everything was given back: %s", error)

    def _pay(self, debt: tuple[Turn, int, str, tuple[int, ...]]) -> None:
        if debt in self._debts:
            _, _, call, args = debt
            self._drv.call(call, *args)
            self._debts.remove(debt)
