"""Faults on demand, counts of calls, and what the machine has said: for tests, and for whoever debugs one.

``inject`` makes a call answer an error, sleep, or end the process, on one rank or device. ``calls`` counts every call
by name, which is how a test proves that a call was *not* made.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from cuda.bindings import driver as cuda

from ..launcher import launched

__all__ = ["Injection", "calls", "clear", "inject", "injected", "last_fault", "last_refusal", "strike"]

log = logging.getLogger("lamport_numba.emulator")

counts: Final[dict[str, int]] = {}
armed = False  # the one test on the path of every call: some injection, poison or end is to be looked at
_injections: list[Injection] = []
_poison: list[tuple[Any, str]] = []
_gone: Any = None
_lock = threading.Lock()
_last: dict[str, Any] = {"refusal": "", "fault": None}


@dataclass
class Injection:
    """One fault to come; see ``inject``. ``hits`` counts how often it struck."""

    call: str
    code: Any = None
    rank: int | None = None
    device: int | None = None
    times: int | None = 1
    skip: int = 0
    delay: float = 0.0
    die: bool = False
    hits: int = field(default=0, compare=False)

    def remove(self) -> None:
        """Take it back; nothing happens if it is spent already."""
        with _lock:
            if self in _injections:
                _injections.remove(self)
            _rearm()


def inject(
    call: str,
    *,
    code: Any = None,
    rank: int | None = None,
    device: int | None = None,
    times: int | None = 1,
    skip: int = 0,
    delay: float = 0.0,
    die: bool = False,
) -> Injection:
    """Make the driver call ``call`` fail, be slow, or be the last thing this process does.

    ``code``: what it answers instead of running (a number or CUresult; None lets it run). ``rank``, ``device``: only on
    that rank (under run_ranks that thread's, else the launcher's), only with that device current; None is any.
    ``times``: how often, None for ever. ``skip``: how many calls pass first. ``delay``: seconds it sleeps before.
    ``die``: the process is killed there, as by ``kill -9``.
    """
    from . import driver  # noqa: F401  (it fills the registry)
    from .core import registry

    if call not in registry:
        raise ValueError(f"the emulated driver has no call {call!r}")
    answer = None if code is None else cuda.CUresult(int(code))
    injection = Injection(call, answer, rank, device, times, skip, delay, die)
    with _lock:
        _injections.append(injection)
        _rearm()
    return injection


@contextmanager
def injected(call: str, **how: Any) -> Iterator[Injection]:
    """``inject`` for the length of a ``with`` block."""
    injection = inject(call, **how)
    try:
        yield injection
    finally:
        injection.remove()


def clear() -> None:
    """Take back every injection and forget a poisoned call."""
    with _lock:
        _injections.clear()
        _poison.clear()
        _rearm()


def calls() -> dict[str, int]:
    """How often each driver call was made in this process, without those that never were."""
    return {name: count for name, count in sorted(counts.items()) if count}


def strike(name: str) -> Any:
    """What an injection makes of call ``name`` now: the code to answer, or None to run it."""
    if _gone is not None:
        return _gone
    rank, device = current_rank(), None
    chosen: Injection | None = None
    with _lock:
        if _poison and not name.startswith(("cuGetError", "cuCtxGet", "cuCtxSet", "cuDevice", "cuInit")):
            code, text = _poison.pop()
            _rearm()
            remember(name, code, text)
            return code
        for injection in _injections:
            if injection.call != name or (injection.rank is not None and injection.rank != rank):
                continue
            if injection.device is not None:
                device = current_device() if device is None else device
                if injection.device != device:
                    continue
            if injection.skip > 0:
                injection.skip -= 1
                continue
            if injection.times is not None:
                injection.times -= 1
                if injection.times <= 0:
                    _injections.remove(injection)
                    _rearm()
            injection.hits += 1
            chosen = injection
            break
    if chosen is None:
        return None
    if chosen.delay:
        time.sleep(chosen.delay)
    if chosen.die:
        os.kill(os.getpid(), signal.SIGKILL)
    if chosen.code is not None:
        remember(name, chosen.code, "injected")
    return chosen.code


def current_rank() -> int | None:
    """The rank that this thread stands for under run_ranks, else the launcher's rank of this process."""
    from .. import driver as seam

    rank = seam._thread.rank
    return rank if rank is not None else launched().rank


def current_device() -> int | None:
    """The device of this thread's current context, or None."""
    from .machine import MACHINE

    context = MACHINE.local.stack[-1] if MACHINE.local.stack else None
    return None if context is None else int(context.device.index)


def poison(code: Any, text: str) -> None:
    """Make the next call that does work answer ``code``: what a swallowed failure of an unbind does to a process."""
    with _lock:
        _poison.append((code, text))
        _rearm()


def answer_everything(code: Any) -> None:
    """From now on every call answers ``code``: in a child of a fork, and once the interpreter is shutting down."""
    global _gone, _lock
    _lock = threading.Lock()  # nobody is left who could give the old one back
    _gone = code
    _rearm()


def remember(name: str, code: Any, text: str) -> None:
    """Keep why a call was refused, for ``last_refusal`` and the log."""
    _last["refusal"] = f"{name}: {code.name} ({int(code)}){': ' + text if text else ''}"
    if text and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", _last["refusal"])


def last_refusal() -> str:
    """Why the last refused call was refused, in words; empty if none was."""
    return str(_last["refusal"])


def set_last_fault(report: Any) -> None:
    """Keep the report of a kernel's fault, or None."""
    _last["fault"] = report


def last_fault() -> Any:
    """The report of the last kernel that did what hardware would not allow, or None; its text names the PTX line."""
    return _last["fault"]


def _rearm() -> None:
    global armed
    armed = bool(_injections or _poison or _gone is not None)
