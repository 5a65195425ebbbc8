"""What a program has not given back."""

from __future__ import annotations

import sys

__all__ = ["leaks", "report"]


def leaks() -> list[str]:
    """One line for each handle, mapping, reservation, binding and exported descriptor that this process still holds.

    Memory of cuMemAlloc and the like goes with its context and is not counted.
    """
    from .memory import MEMORY
    from .multicast import live_binds

    return MEMORY.outstanding() + live_binds()


def report() -> None:
    """Print ``leaks()`` to stderr, in one short block; nothing if there are none, or none could be given back."""
    from .machine import MACHINE

    if any(context.error is not None for context in MACHINE.contexts.values()):
        return  # what a ruined context had goes with the process
    found = leaks()
    if found:
        shown = found[:8] + ([f"... and {len(found) - 8} more"] if len(found) > 8 else [])
        print("emulated device: not given back at exit: " + "; ".join(shown), file=sys.stderr)
