"""Kernels written as Python generators, in place of PTX: for tests of the engine that orders and runs grids.

A kernel is a generator function of its CTA's number. It yields ``GO`` after a step, ``SPIN`` while what it waits for
has not come, ``TRIGGER`` to launch its dependents, ``WAIT`` to wait for its predecessor, ``TRAP`` to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lamport_numba.emulator.grid import Fault, Status
from lamport_numba.emulator.ptx import Kernel

GO, SPIN, TRIGGER, WAIT, TRAP = "go", "spin", "trigger", "wait", "trap"

Body = Callable[[int], Iterator[str]]


class ScriptedModule:
    """What ``ptx.load`` returns: the kernels whose names the text holds."""

    def __init__(self, bodies: dict[str, Body]) -> None:
        self.variables: dict[str, Any] = {}
        self.kernels: dict[str, Kernel] = {}
        for name, body in bodies.items():
            kernel = Kernel(name, [], 0, 0, 0, 32, 1024)
            kernel.body = body  # type: ignore[attr-defined]
            self.kernels[name] = kernel


class ScriptedGrid:
    """Runs the generators of as many CTAs as may be resident, one step each a pass."""

    def __init__(
        self, kernel: Any, table: Any, grid: Any, block: Any, shared: int, params: bytes, fabric: Any, *,
        released: bool = True, variables: Any = None,
    ) -> None:  # fmt: skip
        self.name, self.body = kernel.name, kernel.body
        self.total = grid[0] * grid[1] * grid[2]
        self.next = 0
        self.running: dict[int, Iterator[str]] = {}
        self.waiting: set[int] = set()
        self.released = released
        self.pulled: set[int] = set()
        self.aborted = False
        self.fault: Fault | None = None

    @property
    def resident(self) -> int:
        return len(self.running)

    @property
    def triggered(self) -> bool:
        return len(self.pulled) == self.total

    def release(self) -> None:
        self.released = True

    def abort(self) -> None:
        self.aborted = True

    def run(self, ctas: int, quantum: int) -> Status:
        if self.aborted:
            return Status.FAULTED
        moved = False
        while self.next < self.total and len(self.running) < ctas:
            self.running[self.next] = self.body(self.next)
            self.next += 1
            moved = True
        for number, steps in list(self.running.items()):
            if number in self.waiting:
                if not self.released:
                    continue
                self.waiting.discard(number)
            step = next(steps, None)
            if step == TRAP:
                self.fault = Fault("trap", self.name, 1, "trap;", (number, 0, 0), (0, 0, 0), None, 0)
                return Status.FAULTED
            if step is None:
                del self.running[number]
            if step == WAIT and not self.released:
                self.waiting.add(number)
            if step in (TRIGGER, None):
                self.pulled.add(number)
            moved = moved or step != SPIN
        if self.next == self.total and not self.running:
            return Status.FINISHED
        return Status.RUNNING if moved else Status.STALLED


def install(monkeypatch: Any, **bodies: Body) -> None:
    """Let every module that is loaded from now on have these kernels, whatever its text says."""
    from lamport_numba.emulator import launch, modules

    monkeypatch.setattr(launch, "Grid", ScriptedGrid)
    monkeypatch.setattr(modules.ptx, "load", lambda text: ScriptedModule(bodies))
