"""The machine: devices, their primary contexts, and which context each host thread has current."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver as cuda

from . import faults
from .config import CONFIG
from .core import address_of, api, handle, refuse, result
from .grid import AddressTable, Fabric

if TYPE_CHECKING:
    from .memory import Region
    from .streams import Stream

__all__ = ["MACHINE", "Context", "Device", "Machine", "current", "device_of"]

sequence = itertools.count(1)  # numbers operations in the order they were queued
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"


class Device:
    """One emulated GPU as this process sees it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = _uuid(index)
        self.table = AddressTable(index)
        self.context: Context | None = None
        self.retained = 0
        self.used = 0  # bytes of memory made by this process
        self.serial = 0  # physical objects made here: their number names them in every process
        self.grids: list[Any] = []  # launches that have started and not ended, oldest first
        self.busy: dict[Stream, None] = {}  # streams with work, in the order they got it
        self.held = 0  # shares of multiprocessors that resident CTAs hold
        self.multicasts: list[Any] = []  # multicast mappings that the table must follow

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors; with a residency set, one for each CTA that fits."""
        return CONFIG.multiprocessors if CONFIG.residency is None else CONFIG.residency


class Context:
    """A primary context while it is active."""

    def __init__(self, device: Device) -> None:
        from .streams import Stream

        self.device = device
        self.handle = cuda.CUcontext(handle())
        self.number = int(self.handle)
        self.error: Any = None  # sticky: every later call answers it
        self.streams: dict[int, Stream] = {}
        self.regions: set[Region] = set()
        self.peers: set[int] = set()
        self.legacy = Stream(self, 0, 0, legacy=True)
        self.idle_work: list[Any] = []  # frees that wait until nothing runs

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running on any of its streams."""
        return not any(stream.context is self for stream in list(self.device.busy))


class _Local(threading.local):
    """What each host thread has of its own, made when it is first asked for.

    There is no ``__init__``: a garbage collection inside of it would run finalisers that find the object half-built.
    """

    stack: list[Context]
    streams: dict[Context, Stream]
    capture_mode = int(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def __getattr__(self, name: str) -> Any:
        if name not in ("stack", "streams"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, [] if name == "stack" else {})


class Machine:
    """Everything that this process has of the emulated machine."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        self.working: dict[Device, None] = {}  # devices with busy streams
        self.contexts: dict[int, Context] = {}
        self.local = _Local()
        self.lock = threading.RLock()  # tables of handles; taken after the engine's turn, never before it
        self.initialised = False
        self.fabric = Fabric.immediate()
        self._fabric_of: tuple[str, int] = ("immediate", 0)

    def configured(self, changed: set[str]) -> None:
        """Follow a change of the configuration."""
        if changed & {"fabric", "seed"}:
            self.fabric_anew()
        if self.initialised:
            self.grow(CONFIG.devices)

    def fabric_anew(self) -> None:
        """Start the fabric that the configuration asks for; words still in flight land first."""
        self.fabric.drain()
        adversarial = CONFIG.fabric == "adversarial"
        seed = CONFIG.seed + 1_000_003 * (faults.current_rank() or 0) if adversarial else 0
        self.fabric = Fabric.adversarial(seed) if adversarial else Fabric.immediate()
        self.fabric.hasten(True)

    def grow(self, count: int) -> None:
        """Have at least ``count`` devices."""
        with self.lock:
            CONFIG.devices = max(CONFIG.devices, count)
            while len(self.devices) < CONFIG.devices:
                from .memory import MEMORY

                device = Device(len(self.devices))
                MEMORY.welcome(device)
                self.devices.append(device)

    def device(self, number: Any) -> Device:
        """The device of an ordinal; refuses one that is not there."""
        if not self.initialised:
            refuse(result.CUDA_ERROR_NOT_INITIALIZED, "cuInit has not been called")
        index = int(number)
        if not 0 <= index < len(self.devices):
            refuse(result.CUDA_ERROR_INVALID_DEVICE, f"device {index} of {len(self.devices)}")
        return self.devices[index]

    def context(self, number: Any) -> Context:
        """The active context of a handle."""
        context = self.contexts.get(int(number))
        if context is None:
            refuse(result.CUDA_ERROR_INVALID_CONTEXT, f"no context {int(number):#x} (released?)")
        return context


MACHINE: Final = Machine()


def current() -> Context:
    """The calling thread's context; refuses if there is none, or if a kernel has ruined it."""
    stack = MACHINE.local.stack
    if not stack:
        if not MACHINE.initialised:
            refuse(result.CUDA_ERROR_NOT_INITIALIZED, "cuInit has not been called")
        refuse(result.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    context = stack[-1]
    if context.error is not None:
        refuse(context.error, "an earlier kernel ruined the context")
    if context.number not in MACHINE.contexts:
        refuse(result.CUDA_ERROR_CONTEXT_IS_DESTROYED, "the current context was released")
    return context


def device_of(number: Any) -> Device:
    """The device of an ordinal."""
    return MACHINE.device(number)


def _uuid(index: int) -> bytes:
    """The same in every process of this user on this host, so that ranks on one device recognise each other."""
    try:
        with open(_BOOT_ID, "rb") as file:
            boot = file.read().strip()
    except OSError:
        boot = os.uname().nodename.encode()
    return hashlib.blake2b(b"%s %d %d" % (boot, os.getuid(), index), digest_size=16).digest()


# Devices


@api()
def cuInit(flags: int) -> None:
    if flags != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {flags}; only 0 is defined")
    if not MACHINE.initialised:
        with MACHINE.lock:
            MACHINE.fabric_anew()
            MACHINE.initialised = True
            MACHINE.grow(CONFIG.devices)
            atexit.register(_shut_down)


def _shut_down() -> None:
    """At exit: tell what was not given back, and let nothing run while the interpreter takes itself apart."""
    from .engine import ENGINE
    from .leaks import report

    if os.getpid() != _home:
        return
    if CONFIG.leak_report:
        report()
    ENGINE.shut_down()
    faults.answer_everything(result.CUDA_ERROR_DEINITIALIZED)


_home: Final = os.getpid()


@api(1)
def cuDriverGetVersion() -> int:
    return 13050


@api(1)
def cuDeviceGetCount() -> int:
    if not MACHINE.initialised:
        refuse(result.CUDA_ERROR_NOT_INITIALIZED)
    return len(MACHINE.devices)


@api(1)
def cuDeviceGet(ordinal: int) -> Any:
    return cuda.CUdevice(device_of(ordinal).index)


@api(1)
def cuDeviceGetName(length: int, dev: Any) -> bytes:
    name = b"Emulated H200 (CPU)"
    device_of(dev)
    return name[: max(length - 1, 0)].ljust(length, b"\0")


@api(1)
def cuDeviceGetUuid(dev: Any) -> Any:
    import ctypes

    uuid = cuda.CUuuid()
    ctypes.memmove(uuid.getPtr(), device_of(dev).uuid, 16)
    return uuid


@api(1)
def cuDeviceGetPCIBusId(length: int, dev: Any) -> bytes:
    text = b"0000:%02X:00.0" % device_of(dev).index
    return text[: max(length - 1, 0)].ljust(length, b"\0")


@api(1)
def cuDeviceTotalMem(dev: Any) -> int:
    device_of(dev)
    return CONFIG.memory


_ATTRIBUTES: Final[dict[str, int]] = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1 << 10,
    "TOTAL_CONSTANT_MEMORY": 64 << 10,
    "WARP_SIZE": 32,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "CLOCK_RATE": 1980000,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "L2_CACHE_SIZE": 60 << 20,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "CONCURRENT_KERNELS": 1,
    "ASYNC_ENGINE_COUNT": 3,
    "GPU_OVERLAP": 1,
    "UNIFIED_ADDRESSING": 1,
    "CAN_MAP_HOST_MEMORY": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "COMPUTE_MODE": 0,
    "PCI_DOMAIN_ID": 0,
    "PCI_DEVICE_ID": 0,
    "INTEGRATED": 0,
    "KERNEL_EXEC_TIMEOUT": 0,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 1,  # says 1 whether or not a fabric handle can be made, as hardware does
    "COOPERATIVE_LAUNCH": 0,
    "CLUSTER_LAUNCH": 0,
    "MEMORY_POOLS_SUPPORTED": 0,
    "MANAGED_MEMORY": 0,
}


@api(1)
def cuDeviceGetAttribute(attrib: Any, dev: Any) -> int:
    device = device_of(dev)
    try:
        name = cuda.CUdevice_attribute(int(attrib)).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
    except ValueError:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"attribute {int(attrib)} is not known")
    if name == "MULTIPROCESSOR_COUNT":
        return device.multiprocessors
    if name == "MULTICAST_SUPPORTED":
        return int(CONFIG.multicast_supported)
    if name == "PCI_BUS_ID":
        return device.index
    return _ATTRIBUTES.get(name, 0)


@api(1)
def cuDeviceCanAccessPeer(dev: Any, peerDev: Any) -> int:
    return int(device_of(dev) is not device_of(peerDev))


# Contexts: only the primary one of each device


@api(1)
def cuDevicePrimaryCtxRetain(dev: Any) -> Any:
    device = device_of(dev)
    with MACHINE.lock:
        if device.context is None:
            device.context = Context(device)
            MACHINE.contexts[device.context.number] = device.context
        device.retained += 1
        return device.context.handle


@api()
def cuDevicePrimaryCtxRelease(dev: Any) -> None:
    device = device_of(dev)
    if device.retained == 0:
        refuse(result.CUDA_ERROR_INVALID_CONTEXT, f"the primary context of device {device.index} is not retained")
    with MACHINE.lock:
        device.retained -= 1
        last = device.retained == 0
    if last:
        _destroy(device)


@api()
def cuDevicePrimaryCtxReset(dev: Any) -> None:
    """Frees what the context holds and clears a sticky error.  # undocumented: whether one survives a reset"""
    device = device_of(dev)
    if device.context is not None:
        retained, context = device.retained, device.context
        _destroy(device)
        if retained:
            fresh = Context(device)
            fresh.handle, fresh.number = context.handle, context.number
            device.context, device.retained = fresh, retained
            MACHINE.contexts[fresh.number] = fresh
            stack = MACHINE.local.stack
            stack[:] = [fresh if entry is context else entry for entry in stack]


def _destroy(device: Device) -> None:
    """End the context: wait for its work, free what it holds."""
    from .engine import ENGINE
    from .memory import MEMORY

    context = device.context
    if context is None:
        return
    ENGINE.wait(lambda: context.error is not None or context.idle)
    with ENGINE.turn:
        ENGINE.drop(context)
        MEMORY.release_all(context)
    device.context, device.retained = None, 0
    MACHINE.contexts.pop(context.number, None)
    MACHINE.local.streams.pop(context, None)


@api(2)
def cuDevicePrimaryCtxGetState(dev: Any) -> tuple[int, int]:
    return 0, int(device_of(dev).context is not None)


@api()
def cuDevicePrimaryCtxSetFlags(dev: Any, flags: int) -> None:
    device_of(dev)


@api(1)
def cuCtxGetCurrent() -> Any:
    if not MACHINE.initialised:
        refuse(result.CUDA_ERROR_NOT_INITIALIZED)
    stack = MACHINE.local.stack
    return stack[-1].handle if stack else _NO_CONTEXT


_NO_CONTEXT: Final = cuda.CUcontext(0)


@api()
def cuCtxSetCurrent(ctx: Any) -> None:
    number = address_of(ctx)
    stack = MACHINE.local.stack
    if number == 0:
        if stack:
            stack.pop()
        return
    context = MACHINE.context(number)
    if stack:
        stack[-1] = context
    else:
        stack.append(context)


@api()
def cuCtxPushCurrent(ctx: Any) -> None:
    MACHINE.local.stack.append(MACHINE.context(address_of(ctx)))


@api(1)
def cuCtxPopCurrent() -> Any:
    stack = MACHINE.local.stack
    if not stack:
        refuse(result.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    return stack.pop().handle


@api(1)
def cuCtxGetDevice() -> Any:
    stack = MACHINE.local.stack
    if not stack:
        refuse(result.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    return cuda.CUdevice(stack[-1].device.index)


@api(1)
def cuCtxGetApiVersion(ctx: Any) -> int:
    return 3020


@api(1)
def cuCtxGetFlags() -> int:
    current()
    return 0


@api(1)
def cuCtxGetId(ctx: Any) -> int:
    return (MACHINE.context(ctx) if address_of(ctx) else current()).number


@api(2)
def cuCtxGetStreamPriorityRange() -> tuple[int, int]:
    current()
    return 0, -5


@api(1)
def cuCtxGetLimit(limit: Any) -> int:
    current()
    return 0


@api()
def cuCtxSynchronize() -> None:
    from . import graphs
    from .engine import ENGINE

    context = current()
    if graphs.CAPTURES:
        graphs.forbid_wait(context)
    if context.device.busy:
        ENGINE.wait(lambda: context.error is not None or context.idle)
    if context.error is not None:
        refuse(context.error)


@api()
def cuCtxEnablePeerAccess(peerContext: Any, flags: int) -> None:
    from .memory import MEMORY

    context, peer = current(), MACHINE.context(peerContext)
    if flags != 0:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"flags {flags}; only 0 is defined")
    if peer is context:
        refuse(result.CUDA_ERROR_INVALID_DEVICE, "a device is no peer of itself")
    if peer.device.index in context.peers:
        refuse(result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    context.peers.add(peer.device.index)
    MEMORY.peer_access(context.device, peer.device, True)


@api()
def cuCtxDisablePeerAccess(peerContext: Any) -> None:
    from .memory import MEMORY

    context, peer = current(), MACHINE.context(peerContext)
    if peer.device.index not in context.peers:
        refuse(result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
    context.peers.discard(peer.device.index)
    MEMORY.peer_access(context.device, peer.device, False)


# Errors


@api(1)
def cuGetErrorName(error: Any) -> bytes:
    try:
        return bytes(result(int(error)).name.encode())
    except ValueError:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"no error has the number {int(error)}")


@api(1)
def cuGetErrorString(error: Any) -> bytes:
    try:
        name = result(int(error)).name
    except ValueError:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"no error has the number {int(error)}")
    return bytes(name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_").lower().replace("_", " ").encode())
