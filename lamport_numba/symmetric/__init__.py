"""Symmetric memory: one buffer a rank, each mapped into every other rank, set up so that nobody is stranded.

`communicator` is the rendezvous, `survey` what the ranks know of each other, `handles` the exchange of memory handles,
`memory` the buffer, `multicast` the address that reaches every rank, `transport` the choice between them.
"""

from .communicator import Communicator, OutOfStep
from .memory import SymmetricMemory
from .multicast import multicast_disabled
from .transport import choose_transport

__all__ = ["Communicator", "OutOfStep", "SymmetricMemory", "choose_transport", "multicast_disabled"]
