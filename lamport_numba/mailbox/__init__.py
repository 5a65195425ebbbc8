"""The tagged mailbox: numba kernels that hand values over in one round trip, between the CTAs of a GPU and between
GPUs.
"""

from __future__ import annotations

from . import lowering, rules  # noqa: F401  (they register the names below with numba)
from .device import POLL_MAX, Mailbox, bf_of, float_of, int_of, preg, publish, sreg
from .layout import MailboxLayout, Region

__all__ = [
    "POLL_MAX",
    "Mailbox",
    "MailboxLayout",
    "Region",
    "bf_of",
    "float_of",
    "int_of",
    "preg",
    "publish",
    "sreg",
]
