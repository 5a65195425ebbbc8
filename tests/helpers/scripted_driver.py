"""A driver without a device: answers are scripted by call name, and every call is written down."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lamport_numba.driver import Driver, structs

SUCCESS = structs.CUresult.CUDA_SUCCESS


class ScriptedApi:
    """Answers ``(SUCCESS, next number)`` to calls that make something, ``answers[name]`` where that is set.

    ``answers[name]`` is a tuple, or a function of the call's arguments that returns one.
    """

    MAKES = ("cuEventCreate", "cuDevicePrimaryCtxRetain", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemAlloc")

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []
        self.context = 0
        self._next = 1000

    def count(self) -> Counter[str]:
        return Counter(name for name, *_ in self.calls)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if name in self.answers:
                answer = self.answers[name]
                return answer(*args) if callable(answer) else answer
            return self._answer(name, *args)

        return call

    def _answer(self, name: str, *args: Any) -> tuple[Any, ...]:
        if name in self.MAKES:
            self._next += 1
            return SUCCESS, self._next
        if name == "cuCtxGetCurrent":
            return SUCCESS, self.context
        if name == "cuCtxSetCurrent":
            self.context = int(args[0])
            return (SUCCESS,)
        if name == "cuDeviceGet":
            return SUCCESS, args[0]
        if name == "cuStreamIsCapturing":
            return SUCCESS, structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        if name == "cuThreadExchangeStreamCaptureMode":
            return SUCCESS, structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        return (SUCCESS,)


def scripted(kind: str = "emulated", **answers: Any) -> tuple[Driver, ScriptedApi]:
    """A Driver on a ScriptedApi, and that."""
    api = ScriptedApi(**answers)
    return Driver(kind, api), api  # type: ignore[arg-type]
