"""The tagged mailbox: numba kernels that hand values over in one round trip, between the CTAs of a GPU and between
GPUs.

In kernels: ``Mailbox``, ``sreg``, ``preg``, ``publish``, ``float_of``, ``int_of``, ``bf_of``. On the host:
``MailboxLayout``, ``MailboxMemory``, ``Epoch``, and ``kernel``, which compiles and launches a numba kernel on either
device.
"""

from __future__ import annotations

from . import lowering, rules  # noqa: F401  (they register the names below with numba)
from .device import POLL_MAX, Mailbox, bf_of, float_of, int_of, preg, publish, sreg
from .epoch import Epoch
from .kernels import Kernel, kernel
from .layout import MailboxLayout, Region
from .memory import MailboxMemory

__all__ = [
    "POLL_MAX",
    "Epoch",
    "Kernel",
    "Mailbox",
    "MailboxLayout",
    "MailboxMemory",
    "Region",
    "bf_of",
    "float_of",
    "int_of",
    "kernel",
    "preg",
    "publish",
    "sreg",
]
