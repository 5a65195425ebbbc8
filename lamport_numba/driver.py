"""The seam: one place decides which CUDA driver is used, calls it, and checks every answer.

Above it everything speaks the names and return tuples of ``cuda.bindings.driver``. Enums and structs are always the
real ones (``structs``: the module imports without libcuda); only the functions come from the GPU's driver or from the
emulated one.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from cuda.bindings import driver as structs

from . import settings
from .errors import DeviceFallbackWarning, DeviceUnavailable, DriverError, LamportWarning
from .launcher import launched

__all__ = ["Driver", "select", "structs", "thread_defaults", "why_not_cuda"]

MINIMUM_CAPABILITY: Final = (9, 0)  # .target sm_90
MINIMUM_DRIVER: Final = 12010  # the first CUDA version that takes PTX 8.1
_JIT_LOG_BYTES: Final = 16384


class _ThreadDefaults(threading.local):
    """What a thread that stands for a rank has instead of a process of its own."""

    kind: str | None = None
    device: int | None = None
    rank: int | None = None


_thread = _ThreadDefaults()
_lock = threading.Lock()
_chosen: dict[str, Driver] = {}


class Driver:
    """One CUDA driver, real or emulated, with every answer checked.

    Attributes: ``kind`` ("cuda" or "emulated"), ``api`` (names and return tuples of cuda.bindings.driver), ``rank``
    (named in errors; None where the caller has none).
    """

    def __init__(self, kind: str, api: ModuleType, rank: int | None = None) -> None:
        self.kind = kind
        self.api: Any = api
        self.rank = rank
        self._primary: dict[int, _Primary] = {}  # shared by all siblings of for_rank

    def __repr__(self) -> str:
        return f"<Driver {self.kind}{'' if self.rank is None else f' rank {self.rank}'}>"

    def for_rank(self, rank: int) -> Driver:
        """The same driver, whose errors name ``rank``."""
        sibling = Driver(self.kind, self.api, rank)
        sibling._primary = self._primary
        return sibling

    # Calls

    def call(self, name: str, *args: Any) -> Any:
        """Call ``name``; return its results without the code: None, the one result, or a tuple. Raises DriverError."""
        answer = getattr(self.api, name)(*args)
        if answer[0] != 0:
            raise self.error(name, answer[0])
        if len(answer) == 2:
            return answer[1]
        return answer[1:] or None

    def allocate(self, name: str, nbytes: int, *args: Any) -> int:
        """Call ``name`` for so many bytes. Raises DriverError, which says how many if there is no memory."""
        try:
            return int(self.call(name, nbytes, *args))
        except DriverError as error:
            if error.code != structs.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            hint = f"{nbytes} bytes were asked for" + (f"; {error.hint}" if error.hint else "")
            raise DriverError(error.call, error.code, rank=error.rank, hint=hint) from error

    def check(self, name: str, answer: tuple[Any, ...]) -> None:
        """Raise DriverError if ``answer`` of ``name`` is not success: for callers that hold the function itself."""
        if answer[0] != 0:
            raise self.error(name, answer[0])

    def capture_query(self) -> Callable[[int], bool]:
        """A function for hot paths: whether a stream may be being captured into a graph."""
        if self.kind == "cuda":
            with suppress(OSError):  # the binding has found it elsewhere
                return _libcuda_captures()
        return self._captures

    def _captures(self, stream: int) -> bool:
        code, status = self.api.cuStreamIsCapturing(stream)
        return bool(code or status != structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def error(self, name: str, code: int, detail: str | None = None) -> DriverError:
        """The exception for ``code`` from call ``name``, with this driver's or this thread's rank."""
        return DriverError(name, code, rank=self.rank if self.rank is not None else _thread.rank, detail=detail)

    def load_module(self, text: str) -> Any:
        """Load PTX text into the current context and return the CUmodule; a DriverError carries the JIT's log."""
        log = bytearray(_JIT_LOG_BYTES)
        option = structs.CUjit_option
        names = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        answer = self.api.cuModuleLoadDataEx(text.encode() + b"\0", len(names), names, [log, len(log)])
        if answer[0] != 0:
            said = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip()
            raise self.error("cuModuleLoadDataEx", answer[0], detail=said or None)
        return answer[1]

    # Devices

    def device_count(self) -> int:
        """Number of devices this process sees."""
        return int(self.call("cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        """The name of the device, for people."""
        raw: bytes = self.call("cuDeviceGetName", 256, self.call("cuDeviceGet", device))
        return bytes(raw).split(b"\0", 1)[0].decode(errors="replace")

    def device_uuid(self, device: int) -> bytes:
        """The 16 bytes that tell devices apart in all processes; ordinals do not."""
        return bytes(self.call("cuDeviceGetUuid", self.call("cuDeviceGet", device)).bytes)

    def attribute(self, device: int, name: str) -> int:
        """A device attribute by its name, without the prefix CU_DEVICE_ATTRIBUTE_."""
        attribute = getattr(structs.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self.call("cuDeviceGet", device)))

    def compute_capability(self, device: int) -> tuple[int, int]:
        """(major, minor) of the device."""
        return (self.attribute(device, "COMPUTE_CAPABILITY_MAJOR"), self.attribute(device, "COMPUTE_CAPABILITY_MINOR"))

    def current_device(self) -> int | None:
        """The ordinal of the device whose context is current on this thread, or None."""
        if not int(self.call("cuCtxGetCurrent")):
            return None
        return int(self.call("cuCtxGetDevice"))

    def default_device(self) -> int:
        """The device of a caller who names none.

        The one whose context is current; else the one of this thread's rank under run_ranks; else the launcher's rank
        on this host modulo the number of devices.
        """
        current = self.current_device()
        if current is not None:
            return current
        if _thread.device is not None:
            return _thread.device
        return (launched().local_rank or 0) % max(self.device_count(), 1)

    def checked_device(self, device: Any) -> int:
        """``device`` as an ordinal. Raises TypeError for what is no integer, ValueError if there is no such device."""
        if type(device) is int and device in self._primary:
            return device
        try:
            number = None if isinstance(device, bool) else operator.index(device)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(
                f"device is {device!r}, of type {type(device).__name__}; expected None or the ordinal of a device, an "
                "integer (LAMPORT_NUMBA_DEVICE chooses between cuda and emulated)"
            )
        count = self.device_count()
        if not 0 <= number < count:
            raise ValueError(
                f"device is {number}; expected None or an ordinal from 0 to {count - 1}: CUDA_VISIBLE_DEVICES, or "
                "LAMPORT_NUMBA_EMULATED_DEVICES on the emulated device, says how many there are"
            )
        return number

    # Contexts: only ever the primary one, which stays retained for the life of the process.

    def primary(self, device: int) -> Any:
        """The primary context of ``device``, retained once per process."""
        return self._primary_of(device).context

    def current(self, device: int) -> _Current:
        """``with drv.current(device):`` has the primary context current inside and the former one after."""
        return _Current(self, device)

    def settle(self, device: int) -> None:
        """On a GPU: a thread that has no context gets the primary one of ``device``, and keeps it.

        A numba array's methods would else take GPU 0's, whose streams know nothing of the work on ``device``.
        """
        if self.kind == "cuda" and not int(self.call("cuCtxGetCurrent")):
            self.enter(device)

    def device_of(self, context: Any) -> int:
        """The ordinal of the device that a context belongs to."""
        former = self.call("cuCtxGetCurrent")
        self.call("cuCtxSetCurrent", context)
        try:
            return int(self.call("cuCtxGetDevice"))
        finally:
            self.call("cuCtxSetCurrent", former)

    def enter(self, device: int) -> Any:
        """Make the primary context of ``device`` current; return what ``leave`` takes: None if it was current already.

        For hot paths: two calls without an object between them.
        """
        primary = self._primary.get(device) or self._primary_of(device)
        code, former = self.api.cuCtxGetCurrent()
        if code == 0 and int(former) == primary.handle:
            return None
        if code != 0:
            raise self.error("cuCtxGetCurrent", code)
        self.call("cuCtxSetCurrent", primary.context)
        return former

    def leave(self, former: Any) -> None:
        """Restore what ``enter`` returned."""
        if former is not None:
            self.call("cuCtxSetCurrent", former)

    def relaxed(self) -> _Relaxed:
        """``with drv.relaxed():`` lets this thread allocate and query events while some stream is being captured.

        A capture in the global or thread-local mode is broken by such calls, though ours have nothing to do with it.
        """
        return _Relaxed(self)

    def _primary_of(self, device: int) -> _Primary:
        with _lock:
            known = self._primary.get(device)
            if known is None:
                context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
                known = self._primary[device] = _Primary(context, int(context))
            return known


@dataclass(frozen=True)
class _Primary:
    context: Any
    handle: int


class _Current:
    """Context manager of ``Driver.current``; one object an entry, so that entries nest and threads do not meet."""

    __slots__ = ("_device", "_driver", "_former")

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._former: Any = None

    def __enter__(self) -> Driver:
        self._former = self._driver.enter(self._device)
        return self._driver

    def __exit__(self, *passing: object) -> None:
        self._driver.leave(self._former)


class _Relaxed:
    """Context manager of ``Driver.relaxed``."""

    __slots__ = ("_driver", "_former")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._former: Any = None

    def __enter__(self) -> None:
        relaxed = structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._former = self._driver.call("cuThreadExchangeStreamCaptureMode", relaxed)

    def __exit__(self, *passing: object) -> None:
        self._driver.call("cuThreadExchangeStreamCaptureMode", self._former)


@cache
def _libcuda_captures() -> Callable[[int], bool]:
    """Through ctypes: the binding makes objects of the handle and of the answer, which took 2 us a call."""
    ask = ctypes.PyDLL("libcuda.so.1").cuStreamIsCapturing
    ask.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def captures(stream: int) -> bool:
        status = ctypes.c_int()
        return bool(ask(stream, ctypes.byref(status)) or status.value)

    return captures


def why_not_cuda() -> str | None:
    """Why no real GPU can be used, in a clause that reads after "because"; None if one can."""
    try:
        (code,) = structs.cuInit(0)
    except Exception as error:  # the binding raises what its version likes when libcuda is not there
        missing = type(error).__name__ == "DynamicLibNotFoundError" or "dlopen" in str(error)
        return f"libcuda, the driver's library, was not found{'' if missing else f' ({error})'}"
    if code != 0:
        return str(DriverError("cuInit", code))
    code, version = structs.cuDriverGetVersion()
    if code != 0:
        return str(DriverError("cuDriverGetVersion", code))
    if version < MINIMUM_DRIVER:
        return (
            f"the driver is for CUDA {version // 1000}.{version % 1000 // 10} "
            f"and PTX 8.1 needs {MINIMUM_DRIVER // 1000}.{MINIMUM_DRIVER % 1000 // 10} or newer"
        )
    cuda = Driver("cuda", structs)
    try:
        found = [cuda.compute_capability(device) for device in range(cuda.device_count())]
    except DriverError as error:
        return str(error)
    if not found:
        return "no GPU is visible"
    if max(found) < MINIMUM_CAPABILITY:
        have = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(found)))
        return f"no GPU has compute capability 9.0 or newer (found {have})"
    return None


def select(device: str | None = None) -> Driver:
    """The driver of this process: "cuda", "emulated" or "auto" (None: what LAMPORT_NUMBA_DEVICE says, else auto).

    auto is cuda where a usable GPU is there, else the emulated device with one DeviceFallbackWarning that says why, on
    the first rank of a host; "cuda" raises DeviceUnavailable with the same reason. In a thread of run_ranks, None and
    auto are the emulated device.
    """
    asked = settings.get("DEVICE") if device is None else device
    if asked not in ("auto", "cuda", "emulated"):
        raise ValueError(f"device is {device!r}; expected 'auto', 'cuda' or 'emulated'")
    if _thread.kind is not None and (device is None or asked == "auto"):
        asked = _thread.kind
    with _lock:
        found = _chosen.get(asked)
        if found is None:
            found = _chosen[asked] = _find(asked)
        return found


def _find(asked: str) -> Driver:
    _warn_of_unknown_settings()
    reason = None if asked == "emulated" else why_not_cuda()
    if reason is None and asked != "emulated":
        return _chosen.setdefault("cuda", Driver("cuda", structs))
    if asked == "cuda":
        raise DeviceUnavailable(f"device 'cuda' cannot be used because {reason}; 'emulated' runs on the CPU")
    if asked == "auto" and not launched().local_rank:  # once a host; ranks on other kinds of device are refused later
        warnings.warn(
            f"using the emulated device (on the CPU) because {reason}; LAMPORT_NUMBA_DEVICE=emulated silences this",
            DeviceFallbackWarning,
            stacklevel=_caller(),
        )
    if "emulated" not in _chosen:
        emulated = Driver("emulated", import_module("lamport_numba.emulator.driver"))  # a real GPU needs none of it
        emulated.call("cuInit", 0)
        _chosen["emulated"] = emulated
    return _chosen["emulated"]


def _warn_of_unknown_settings() -> None:
    for name in settings.unknown():
        text = f"{name} is not a setting of this library and does nothing"
        warnings.warn(text, LamportWarning, stacklevel=_caller())


def _caller() -> int:
    """The stacklevel of a warning, given by our caller, that blames the first frame outside of the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


def forget() -> None:
    """Forget what ``select`` chose, so that it looks again. For tests."""
    with _lock:
        _chosen.clear()


@contextmanager
def thread_defaults(*, kind: str | None = None, device: int | None = None, rank: int | None = None) -> Iterator[None]:
    """Inside, this thread stands for a rank: its driver, its default device, and the rank that its errors name."""
    former = (_thread.kind, _thread.device, _thread.rank)
    _thread.kind, _thread.device, _thread.rank = kind, device, rank
    try:
        yield
    finally:
        _thread.kind, _thread.device, _thread.rank = former
