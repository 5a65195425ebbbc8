"""Symmetric memory in tests: a world of threads, what it left behind, and the calls that a construction makes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from lamport_numba import driver, emulator, run_ranks
from lamport_numba.symmetric import Communicator, SymmetricMemory

from . import leaks

# asked outside any step, or by the seam itself
UNVOTED = ("cuCtxGetCurrent", "cuCtxSetCurrent")


def make(communicator: Communicator, nbytes: int = 5000, **options: Any) -> SymmetricMemory:
    """This rank's memory on its emulated device."""
    return SymmetricMemory(communicator, driver.select("emulated"), communicator.rank, nbytes, **options)


def world(n: int, program: Callable[[Communicator], Any], timeout: float = 10.0) -> list[Any]:
    """Run ``program(communicator)`` on n threads; what each returned, or the exception that it raised."""

    def body(comm: Any) -> Any:
        communicator = Communicator(comm, timeout=timeout)
        try:
            return program(communicator)
        except Exception as error:
            return error
        finally:
            if communicator._over is None:
                communicator.free()

    return run_ranks(n, body, timeout=120)


def calls_of(n: int, program: Callable[[Communicator], Any]) -> dict[str, int]:
    """The driver calls that one rank makes at most in ``program``, which must be the same on all ranks but rank 0."""
    before = emulator.calls()
    results = world(n, program)
    assert not any(isinstance(result, Exception) for result in results), results
    after = emulator.calls()
    counted = {name: after[name] - before.get(name, 0) for name in after}
    return {name: -(-count // n) for name, count in counted.items() if count}


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mappings of this process."""
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


class Fresh:
    """Asserts at its end that nothing was left behind; ``seconds`` it took."""

    def __enter__(self) -> Fresh:
        assert leaks.new() == []
        self._descriptors = descriptors()
        self._start = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.seconds = time.monotonic() - self._start
        if kind is None:
            assert leaks.new() == []
            assert descriptors() <= self._descriptors
