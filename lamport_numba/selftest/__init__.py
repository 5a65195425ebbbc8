"""Cases that every machine, device and transport must pass: run by ``python -m lamport_numba selftest`` and by the
project's own tests.
"""

from .cases import CASES
from .world import Result, World, run_case

__all__ = ["CASES", "Result", "World", "run_case"]
