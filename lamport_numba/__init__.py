"""Low-latency collectives for MPI programs: raw PTX kernels, on NVIDIA GPUs and on an emulated device.

Names are imported on first use, so that ``import lamport_numba`` loads neither CUDA nor numba.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ._version import __version__

if sys.platform != "linux":
    raise ImportError(f"lamport_numba runs on Linux only (x86-64 and aarch64), and this is {sys.platform}")

if TYPE_CHECKING:
    from .emulator.ranks import run_ranks as run_ranks

# public name -> module that defines it; the imports above tell type checkers the same
_PUBLIC: dict[str, str] = {
    "run_ranks": ".emulator.ranks",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
