"""Every exception and warning of the library, and what we know to do about a driver's answer."""

from __future__ import annotations

__all__ = [
    "CallMismatch",
    "ClosedError",
    "DeviceFallbackWarning",
    "DeviceUnavailable",
    "DriverError",
    "EmulatorFault",
    "LamportError",
    "LamportWarning",
    "MailboxTimeout",
    "MulticastUnavailable",
    "PeerLeft",
    "PeerTimeout",
    "PlatformError",
    "PtxError",
    "RendezvousTimeout",
    "SentinelWarning",
    "SettingError",
    "SetupError",
    "StreamError",
    "hint_for",
]


class LamportError(RuntimeError):
    """Base of the library's errors that are not a plain mistake in an argument."""


class PlatformError(LamportError):
    """This machine cannot run the library (not Linux, or an unknown processor)."""


class DeviceUnavailable(LamportError):
    """The device that was asked for cannot be used; the message says why."""


class ClosedError(LamportError):
    """The object was closed, abandoned, or crossed a fork; it refuses to work."""


class SettingError(ValueError):
    """An environment variable holds a value that its setting does not take."""


class DriverError(LamportError):
    """A driver call answered something other than success.

    Attributes: ``call`` (name), ``code`` (int), ``code_name``, ``rank`` (or None), ``hint`` (or None), ``detail``
    (or None: for instance the JIT's log).
    """

    def __init__(
        self, call: str, code: int, *, rank: int | None = None, hint: str | None = None, detail: str | None = None
    ) -> None:
        self.call = call
        self.code = int(code)
        self.code_name = code_name(self.code)
        self.rank = rank
        self.hint = hint if hint is not None else hint_for(call, self.code)
        self.detail = detail
        text = f"{on_rank(rank)}{call} failed: {self.code_name} ({self.code})"
        if self.hint:
            text += f"; {self.hint}"
        if detail:
            text += f"\n{detail.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_driver_error, (self.call, self.code, self.rank, self.hint, self.detail)


def _rebuild_driver_error(
    call: str, code: int, rank: int | None, hint: str | None, detail: str | None
) -> DriverError:  # exceptions with keyword arguments do not copy by themselves
    return DriverError(call, code, rank=rank, hint=hint, detail=detail)


class SetupError(LamportError):
    """The construction failed on ``rank`` at ``step``; every rank raises the same error.

    ``call`` and ``code`` are those of the failed driver call, where it was one.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: str | None = None,
        call: str | None = None,
        code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.call = call
        self.code = code


class MulticastUnavailable(SetupError):
    """The multicast transport cannot be had.

    ``reason`` is one of "disabled", "attribute", "mig", "world", "nvswitch", "permission", "fabric-manager", "slots",
    "memory" and "driver"; docs/symmetric_memory.md says what each means.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        rank: int | None = None,
        step: str | None = None,
        call: str | None = None,
        code: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, step=step, call=call, code=code)
        self.reason = reason


class RendezvousTimeout(SetupError):
    """A collective step on the host passed its deadline; ``missing`` are the ranks that did not come to ``stage``."""

    def __init__(
        self,
        stage: str,
        missing: tuple[int, ...],
        seconds: float,
        *,
        rank: int | None = None,
        detail: str | None = None,
    ) -> None:
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "some rank"
        text = f"{on_rank(rank)}waited {seconds:g} s at '{stage}' for {who}"
        super().__init__(f"{text}; {detail}" if detail else text, rank=rank, step=stage)
        self.stage = stage
        self.missing = missing
        self.seconds = seconds
        self.detail = detail


class PeerTimeout(LamportError):
    """A kernel waited past its deadline for a peer's payload.

    Attributes: ``rank`` (the missing one), ``call`` (number of the call that waited), ``seconds`` (how long).
    """

    def __init__(self, rank: int, call: int | None, seconds: float, *, detail: str | None = None) -> None:
        text = f"rank {rank} was missing in call {call}: nothing came from it for {seconds:g} s"
        super().__init__(f"{text}; {detail}" if detail else text)
        self.rank = rank
        self.call = call
        self.seconds = seconds
        self.detail = detail


class PeerLeft(PeerTimeout):
    """A peer left without the others, most often because an exception was passing there.

    ``call`` is the one before which it abandoned an all-gather. Of a mailbox's memory it is None, and ``detail`` is
    that rank's reason.
    """

    def __init__(self, rank: int, call: int | None, *, cause: str | None = None) -> None:
        super().__init__(rank, call, 0.0, detail=cause)
        text = f"rank {rank} left before call {call}: it abandoned the all-gather; its own error says why"
        self.args = (text if cause is None else f"rank {rank} left: {cause}",)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_peer_left, (self.rank, self.call, self.detail)


def _rebuild_peer_left(rank: int, call: int | None, cause: str | None) -> PeerLeft:
    return PeerLeft(rank, call, cause=cause)


class MailboxTimeout(LamportError):
    """A poll of a tagged mailbox waited past its deadline.

    Attributes: ``region``, ``pair`` (the first stale one), ``expected`` (0: the epoch was never advanced) and ``seen``
    (tags; 0 is a pair that was never put), ``seconds``, ``rank`` (the one that waited).
    """

    def __init__(
        self, region: str, pair: int, expected: int, seen: int, seconds: float, *, rank: int | None = None
    ) -> None:
        what = f"waited {seconds:g} s for pair {pair} of region {region!r} with tag {expected}"
        if expected == 0:
            what = f"a poll of pair {pair} of region {region!r} was launched with tag 0, which no pair ever matches"
            had = "the epoch was never advanced: call epoch.advance(stream) before every launch, on its stream"
        elif seen == 0:
            had = (
                "nothing was ever put there. Did every rank call epoch.advance and launch, does the kernel put to this "
                "pair, and do all CTAs that wait for each other fit on the device at once?"
            )
        else:
            had = f"it held tag {seen}"
        super().__init__(f"{on_rank(rank)}{what}; {had}")
        self.region = region
        self.pair = pair
        self.expected = expected
        self.seen = seen
        self.seconds = seconds
        self.rank = rank


class StreamError(LamportError):
    """Calls of one object on two streams would overlap."""


class CallMismatch(LamportError):
    """Ranks disagree about a call (its number, bytes, or dtype and shape).

    Attributes: ``rank`` (the one that differs from this one), ``call``, ``mine``, ``theirs`` (what each side said).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        call: int | None = None,
        mine: object = None,
        theirs: object = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.call = call
        self.mine = mine
        self.theirs = theirs


class EmulatorFault(LamportError):
    """A kernel on the emulated device did what hardware would not allow: kernel, line, thread and address are named."""


class PtxError(ValueError):
    """PTX text that cannot be understood. ``line`` is its number (from 1), ``text`` the line itself."""

    def __init__(self, message: str, *, line: int | None = None, text: str | None = None) -> None:
        where = f"line {line}: " if line is not None else ""
        quoted = f"\n    {text.strip()}" if text else ""
        super().__init__(f"{where}{message}{quoted}")
        self.message = message
        self.line = line
        self.text = text


class LamportWarning(UserWarning):
    """Base of the library's warnings."""


class DeviceFallbackWarning(LamportWarning):
    """No usable GPU: the emulated device is used instead."""


class SentinelWarning(LamportWarning):
    """A dtype that the sentinel protocol can damage: a word 0x80000000 arrives as 0."""


def on_rank(rank: int | None) -> str:
    """The prefix of a message that names the rank, or nothing."""
    return "" if rank is None else f"rank {rank}: "


def code_name(code: int) -> str:
    """The driver's name of a result code, or CUDA_ERROR_<number> for one this binding does not know."""
    from cuda.bindings import driver as cuda

    try:
        return str(cuda.CUresult(code).name)
    except ValueError:
        return f"CUDA_ERROR_{code}"


_MULTICAST = "cuMulticast"
_ANY = ""

# (prefix of the call's name, code, what to do); the first that fits wins.
_HINTS: tuple[tuple[str, int, str], ...] = (
    (
        "cuMulticastBind",
        2,
        "no multicast slots are left on the switch: close other communicators of this host (NCCL's NVLS, NVSHMEM and "
        "this library share about 128), or use transport='peer'",
    ),
    (
        "cuMulticastBind",
        47,
        "no multicast slots are left on the switch: close other communicators, or use transport='peer'",
    ),
    (
        _MULTICAST,
        1,
        "the fabric manager may be unhealthy or device nodes may be missing in the container: "
        "look at 'nvidia-smi -q' (Fabric: State), or use transport='peer'",
    ),
    (
        _MULTICAST,
        401,
        "the fabric manager or IMEX daemons are not healthy: see 'systemctl status nvidia-fabricmanager nvidia-imex' "
        "and 'nvidia-smi -q' (Fabric: State), or use transport='peer'",
    ),
    (
        _MULTICAST,
        801,
        "this system does not support multicast (no NVSwitch, MIG, or a virtual machine): use transport='peer'",
    ),
    (_MULTICAST, 800, "multicast is not permitted here (an IMEX channel is missing?): use transport='peer'"),
    (_ANY, 802, "the NVLink fabric is still starting: wait for the fabric manager and try again"),
    (_ANY, 919, "the NVLink fabric is still starting: wait for the fabric manager and try again"),
    (
        "cuMem",
        401,
        "the fabric manager or IMEX daemons are not healthy: see 'systemctl status nvidia-fabricmanager nvidia-imex'",
    ),
    (
        "cuMemCreate",
        800,
        "a fabric handle needs an IMEX channel (/dev/nvidia-caps-imex-channels/channel0 in this container): "
        "without one only ranks of one host can share memory",
    ),
    ("cuMemCreate", 801, "this kind of shareable handle is not supported here"),
    ("cuMemCreate", 2, "the GPU has no room for the mailbox: a smaller capacity, or fewer processes on the device"),
    ("cuModuleLoadData", 222, "the PTX is newer than the driver takes: PTX 8.1 needs a driver of CUDA 12.1 or later"),
    ("cuModuleLoadData", 218, "the PTX was refused by the JIT compiler; its log follows"),
    ("cuModuleLoadData", 209, "the PTX is for sm_90 and later: this GPU is older"),
    ("cuModuleLoadData", 221, "libnvidia-ptxjitcompiler is missing: install the whole driver, also in the container"),
    ("cuInit", 100, "no GPU is visible: see CUDA_VISIBLE_DEVICES and, in a container, --gpus"),
    ("cuInit", 34, "libcuda is the toolkit's stub: put the driver's own libcuda first in LD_LIBRARY_PATH"),
    ("cuInit", 803, "the kernel module and libcuda differ in version: reboot, or reload the module"),
    ("cuInit", 804, "the compatibility package does not work with this GPU: use the driver's own libcuda"),
    (
        _ANY,
        3,
        "the driver is not initialised here; after a fork it cannot be used: start processes by spawn or by mpirun",
    ),
    (_ANY, 4, "the driver is shutting down: close objects before the interpreter ends"),
    (
        "cuDeviceGet",
        101,
        "there is no such device: they count from 0; CUDA_VISIBLE_DEVICES, or LAMPORT_NUMBA_EMULATED_DEVICES on "
        "the emulated device, says how many there are",
    ),
    (_ANY, 46, "another process holds the GPU exclusively: set its compute mode to DEFAULT, or start MPS"),
    (_ANY, 201, "no context is current: make the calls between `with driver.current(device)`"),
    (_ANY, 400, "a handle is not valid: of a stream, event or graph that was destroyed, or a number that is none"),
    (_ANY, 700, "a kernel touched memory it may not; this process's context is lost and must be restarted"),
    (_ANY, 716, "a kernel made a misaligned access; this process's context is lost and must be restarted"),
    (_ANY, 719, "a kernel failed; this process's context is lost and must be restarted"),
    (
        _ANY,
        702,
        "a kernel ran past the display driver's limit of time, or run_ranks ended it after a rank had failed; this "
        "process's context is lost and must be restarted",
    ),
    ("cuLaunchKernel", 701, "the launch asks for more threads, registers or shared memory than the kernel can have"),
    (_ANY, 805, "the MPS daemon does not answer: see 'nvidia-cuda-mps-control' and CUDA_MPS_PIPE_DIRECTORY"),
    (_ANY, 807, "the MPS server is not ready (it may still be recovering from a client's fault): try again"),
    (_ANY, 808, "MPS has no room for another client"),
    (_ANY, 810, "the MPS server ended this client, because another client had a fatal fault"),
    (_ANY, 900, "this call is not allowed while a stream is captured into a graph"),
    (_ANY, 906, "a call on the legacy stream would join a stream that is being captured: pass the captured stream"),
)


def hint_for(call: str, code: int) -> str | None:
    """What to do about ``code`` from ``call``, or None where we do not know."""
    for prefix, known, text in _HINTS:
        if known == code and call.startswith(prefix):
            return text
    return None
