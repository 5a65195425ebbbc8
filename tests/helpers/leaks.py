"""What a test has left behind on the emulated device.

Memory that an earlier test left on purpose (an object that was abandoned while something might still use it keeps its
memory until the process ends) is not counted.
"""

from lamport_numba import emulator
from lamport_numba.emulator.multicast import MulticastObject

_known: set[str] = set()


def forgive() -> None:
    """From now on what is there is not counted, nor are the multicast slots that it takes."""
    _known.update(emulator.leaks())
    for thing in MulticastObject.known.values():
        thing.binds.clear()


def new() -> list[str]:
    """What is there now and was not when ``forgive`` was called last."""
    return [line for line in emulator.leaks() if line not in _known]
