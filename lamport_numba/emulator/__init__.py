"""The emulated device: the same PTX text, run on the CPU, behind a driver that refuses misuse.

``configure`` sets what the machine is like, ``inject`` makes calls fail, ``calls`` counts them, ``leaks`` tells what
was not given back, ``last_fault`` and ``last_refusal`` say in words what went wrong.
"""

from .config import CONFIG, Config, configure
from .faults import Injection, calls, clear, inject, injected, last_fault, last_refusal
from .leaks import leaks

__all__ = [
    "CONFIG",
    "Config",
    "Injection",
    "calls",
    "clear",
    "configure",
    "inject",
    "injected",
    "last_fault",
    "last_refusal",
    "leaks",
]
