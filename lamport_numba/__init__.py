"""Low-latency collectives for MPI programs: raw PTX kernels, on NVIDIA GPUs and on an emulated device.

Names are imported on first use, so that ``import lamport_numba`` loads neither CUDA nor numba.
"""

from __future__ import annotations

import importlib
import platform
import sys
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import PlatformError

if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
    raise PlatformError(
        f"lamport_numba runs on Linux on x86-64 and aarch64; this is {sys.platform} on {platform.machine()}"
    )

if TYPE_CHECKING:
    from .arrays import DeviceArray as DeviceArray
    from .arrays import device_array as device_array
    from .arrays import to_device as to_device
    from .collectives import LamportAllGather as LamportAllGather
    from .collectives import PreparedCall as PreparedCall
    from .collectives import TaggedAllGather as TaggedAllGather
    from .emulator.ranks import run_ranks as run_ranks
    from .errors import CallMismatch as CallMismatch
    from .errors import ClosedError as ClosedError
    from .errors import DeviceFallbackWarning as DeviceFallbackWarning
    from .errors import DeviceUnavailable as DeviceUnavailable
    from .errors import DriverError as DriverError
    from .errors import EmulatorFault as EmulatorFault
    from .errors import LamportError as LamportError
    from .errors import LamportWarning as LamportWarning
    from .errors import MailboxTimeout as MailboxTimeout
    from .errors import MulticastUnavailable as MulticastUnavailable
    from .errors import PeerLeft as PeerLeft
    from .errors import PeerTimeout as PeerTimeout
    from .errors import PlatformError as PlatformError
    from .errors import PtxError as PtxError
    from .errors import RendezvousTimeout as RendezvousTimeout
    from .errors import SentinelWarning as SentinelWarning
    from .errors import SettingError as SettingError
    from .errors import SetupError as SetupError
    from .errors import StreamError as StreamError
    from .graphs import Graph as Graph
    from .graphs import Stream as Stream

# public name -> module that defines it; the imports above tell type checkers the same
_PUBLIC: dict[str, str] = {
    "DeviceArray": ".arrays",
    "device_array": ".arrays",
    "to_device": ".arrays",
    "LamportAllGather": ".collectives",
    "PreparedCall": ".collectives",
    "TaggedAllGather": ".collectives",
    "CallMismatch": ".errors",
    "ClosedError": ".errors",
    "DeviceFallbackWarning": ".errors",
    "DeviceUnavailable": ".errors",
    "DriverError": ".errors",
    "EmulatorFault": ".errors",
    "LamportError": ".errors",
    "LamportWarning": ".errors",
    "MailboxTimeout": ".errors",
    "MulticastUnavailable": ".errors",
    "PeerLeft": ".errors",
    "PeerTimeout": ".errors",
    "PlatformError": ".errors",
    "PtxError": ".errors",
    "RendezvousTimeout": ".errors",
    "SentinelWarning": ".errors",
    "SettingError": ".errors",
    "SetupError": ".errors",
    "StreamError": ".errors",
    "Graph": ".graphs",
    "Stream": ".graphs",
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
