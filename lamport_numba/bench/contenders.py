"""What is measured: our all-gathers and, where they are installed, others; each behind the same few names.

A contender binds a size to buffers of its own and gives calls that queue one gather on the rig's stream. The ranks
agree on which contenders there are: one that fails on a rank is left out on all, with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..collectives import AllGather, LamportAllGather
from ..collectives.channel import LamportChannel
from ..collectives.launch import load
from ..driver import structs
from . import payload
from .host import Host
from .rig import Rig, address_of

__all__ = ["KNOWN", "Bound", "Contender", "Setting", "build", "variant"]

KNOWN = ("nccl", "nvshmem", "mpi", "tagged")


@dataclass(frozen=True)
class Setting:
    """What all contenders are built from. ``capacity`` in bytes of one rank; ``shared``: ranks share a device."""

    comm: Any
    host: Host
    rig: Rig
    capacity: int
    dtype: np.dtype[Any]
    transport: str
    timeout: float
    pdl: bool
    shared: bool


@dataclass(frozen=True)
class Bound:
    """A gather of one size with its buffers. Addresses of device memory; ``held`` keeps it.

    ``queue`` queues a gather as cheaply as the contender can; ``call`` does as a program would write it.
    """

    source: int
    target: int
    queue: Callable[[], object]
    call: Callable[[], object]
    held: tuple[Any, ...] = ()
    close: Callable[[], None] | None = None


class Contender:
    """Base of the contenders. Construction and ``close`` are collective."""

    name = ""
    graphs = True  # whether its calls can be captured into a graph
    sanitises = False  # whether the word 0x80000000 arrives as 0

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rig = setting.rig
        self.rank, self.world = setting.host.rank, setting.host.size

    def bind(self, nbytes: int) -> Bound:
        """A gather of ``nbytes`` a rank. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the construction took."""

    def abandon(self) -> None:
        """Free what can be freed without the other ranks, after an error."""

    def fill(self, bound: Bound, nbytes: int, call: int) -> None:
        """Put this rank's payload of ``call`` into the input, and something else into the output."""
        self.rig.write(bound.source, payload.words(call, self.rank, nbytes))
        self.rig.zero(bound.target, nbytes * self.world)
        self.rig.synchronize()

    def wrong_words(self, bound: Bound, nbytes: int, call: int) -> int:
        """How many words of the output are not what they must be after ``call``."""
        got = self.rig.read(bound.target, nbytes * self.world)
        want = payload.expected(call, self.world, nbytes)
        if not self.sanitises:
            want = np.concatenate([payload.words(call, rank, nbytes) for rank in range(self.world)])
        return int(np.count_nonzero(got != want))


class Ours(Contender):
    """LamportAllGather, or another of our classes: both calls take the same arrays."""

    def __init__(self, setting: Setting, kind: type[AllGather], name: str, **options: Any) -> None:
        super().__init__(setting)
        self.name = name
        self.gather = kind(
            setting.comm,
            setting.capacity,
            device=setting.rig.device,
            transport=setting.transport,
            timeout=setting.timeout,
            pdl=setting.pdl,
            **options,
        )
        self.sanitises = issubclass(kind, LamportAllGather)

    def bind(self, nbytes: int) -> Bound:
        rig = self.rig
        source, target = (rig.array(n, self.setting.dtype) for n in (nbytes, nbytes * self.world))
        prepared = self.gather.prepare(source, target, rig.stream)
        call = partial(self.gather, source, target, stream=rig.stream)
        return Bound(address_of(source), address_of(target), prepared, call, (source, target, prepared))

    def close(self) -> None:
        self.gather.close()

    def abandon(self) -> None:
        self.gather.abandon()


def variant(setting: Setting, name: str, text: str) -> Contender:
    """LamportAllGather with another text of its kernel, which takes the same parameters. Collective."""

    class Channel(LamportChannel):
        def load(self) -> None:
            super().load()
            self.kernel = load(self.drv, self.device, f"lamport_{self.transport}.ptx", text=text)

    class Variant(LamportAllGather):
        _channel = Channel

    return Ours(setting, Variant, name, raw_words=True)


class Mpi(Contender):
    """MPI's own Allgather between host buffers, with the copies from and to the device that a program then needs."""

    name = "mpi"
    graphs = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if not hasattr(setting.comm, "Allgather"):
            raise RuntimeError("the communicator is not MPI's")

    def bind(self, nbytes: int) -> Bound:
        rig, comm = self.rig, self.setting.comm
        flags = structs.CU_MEMHOSTALLOC_PORTABLE
        pinned = int(rig.drv.call("cuMemHostAlloc", nbytes * (self.world + 1), flags))
        raw = np.frombuffer(_host_bytes(pinned, nbytes * (self.world + 1)), np.uint8)
        send, receive = raw[:nbytes], raw[nbytes:]
        source, target = rig.array(nbytes), rig.array(nbytes * self.world)
        addresses = address_of(source), address_of(target)

        def call() -> None:
            rig.drv.call("cuMemcpyDtoHAsync", pinned, addresses[0], nbytes, rig.stream)
            rig.synchronize()
            comm.Allgather(send, receive)
            rig.drv.call("cuMemcpyHtoDAsync", addresses[1], pinned + nbytes, receive.nbytes, rig.stream)

        def close() -> None:
            rig.drv.call("cuMemFreeHost", pinned)

        return Bound(*addresses, call, call, (source, target), close)


def _host_bytes(address: int, nbytes: int) -> Any:
    import ctypes

    return (ctypes.c_char * nbytes).from_address(address)


def _lamport(setting: Setting) -> list[Contender]:
    return [Ours(setting, LamportAllGather, "lamport", raw_words=True)]


def _tagged(setting: Setting) -> list[Contender]:
    kind = importlib.import_module("lamport_numba.collectives").TaggedAllGather
    return [Ours(setting, kind, "tagged")]


def _mpi(setting: Setting) -> list[Contender]:
    return [Mpi(setting)]


def _nccl(setting: Setting) -> list[Contender]:
    from .nccl import nccl

    return nccl(setting)


def _nvshmem(setting: Setting) -> list[Contender]:
    from .nvshmem import Nvshmem

    return [Nvshmem(setting)]


_BUILDERS = {"lamport": _lamport, "tagged": _tagged, "mpi": _mpi, "nccl": _nccl, "nvshmem": _nvshmem}
_NEEDS = {
    "nccl": ("nccl.core", "nccl4py (the extra `nccl`)"),
    "nvshmem": ("nvshmem.core", "nvshmem4py (the extra `nvshmem`)"),
}


def build(setting: Setting, others: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Ours and the ``others`` that work on all ranks, and for each that does not, why. Collective.

    Raises what our own construction raises.
    """
    found = _lamport(setting)
    missing: dict[str, str] = {}
    for name in others:
        reasons = setting.host.share(_why_not(name, setting), f"look for {name}")
        built: list[Contender] = []
        if not any(reasons):
            reason = None
            try:
                built = _BUILDERS[name](setting)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            reasons = setting.host.share(reason, f"build {name}")
        if any(reasons):
            missing[name] = next(reason for reason in reasons if reason)
        else:
            found += built
    return found, missing


def _why_not(name: str, setting: Setting) -> str | None:
    """Why this rank cannot try a contender; None if it can."""
    if name not in _NEEDS:
        return None
    module, package = _NEEDS[name]
    if setting.rig.drv.kind != "cuda":
        return "it needs NVIDIA GPUs"
    if setting.shared:
        return "it needs a GPU for each rank"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{package} cannot be imported: {error}"
    return None
