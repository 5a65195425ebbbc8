"""How a driver call is made: handles, refusals, the return tuple, and the hook where faults are injected."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Final, NoReturn

import numpy as np
from cuda.bindings import driver as cuda

from . import faults

__all__ = ["OK", "Refusal", "address_of", "api", "handle", "refuse", "registry", "result"]

result = cuda.CUresult
OK: Final = (result.CUDA_SUCCESS,)
SUCCESS: Final = result.CUDA_SUCCESS

registry: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {}
"""Every emulated call by its name."""

_handles = itertools.count(0x1000, 0x10)
_home = os.getpid()


class Refusal(Exception):
    """A driver call that answers something other than success; ``text`` says why, in our own words."""

    def __init__(self, code: Any, text: str = "") -> None:
        super().__init__(code, text)
        self.code = result(code)
        self.text = text


def refuse(code: Any, text: str = "") -> NoReturn:
    """Answer ``code`` from the call in progress."""
    raise Refusal(code, text)


def handle() -> int:
    """A number that no other handle of this process has, of any kind, dead ones included."""
    return next(_handles)


def api(outputs: int = 0) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """Make a function a driver call: count it, let faults in, and turn results and Refusals into the tuple.

    The function returns nothing, its one output, or a tuple of ``outputs`` of them.
    """
    blank = (None,) * outputs

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        name = function.__name__
        counts = faults.counts
        counts[name] = 0

        def call(*args: Any, **named: Any) -> tuple[Any, ...]:
            counts[name] += 1
            if faults.armed:
                code = faults.strike(name)
                if code is not None:
                    return (code, *blank)
            try:
                value = function(*args, **named)
            except Refusal as refusal:
                faults.remember(name, refusal.code, refusal.text)
                return (refusal.code, *blank)
            if outputs == 0:
                return OK
            return (SUCCESS, value) if outputs == 1 else (SUCCESS, *value)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = function.__doc__
        registry[name] = call
        return call

    return decorate


def address_of(thing: Any) -> int:
    """The address that a ``void *`` argument stands for: an int, a handle, None, or an object with a buffer."""
    if thing.__class__ is int:
        return int(thing)
    if thing is None:
        return 0
    if hasattr(thing, "__int__") and not isinstance(thing, np.ndarray):
        return int(thing)
    return int(np.frombuffer(thing, np.uint8).ctypes.data) if memoryview(thing).nbytes else 0


def _after_fork() -> None:
    faults.answer_everything(result.CUDA_ERROR_NOT_INITIALIZED)


os.register_at_fork(after_in_child=_after_fork)
