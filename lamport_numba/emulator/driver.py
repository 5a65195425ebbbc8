"""The emulated driver: names and return tuples of ``cuda.bindings.driver``, on the CPU.

Enums and structs are the binding's own. A call that is not emulated is an AttributeError that names it, never a guess.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from . import allocations, copies, graphs, launch, machine, modules, multicast, streams, vmm  # noqa: F401  (they fill it)
from .core import registry

globals().update(registry)

__all__ = sorted(registry)


def __getattr__(name: str) -> Any:
    if name.startswith("cu") and name[2:3].isupper() and callable(getattr(cuda, name, None)):
        raise AttributeError(f"{name} is not emulated")
    return getattr(cuda, name)
