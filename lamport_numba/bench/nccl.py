"""NCCL through nccl4py: buffers as they come, and buffers of NCCL's own registered as symmetric windows."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from .contenders import Bound, Contender, Setting
from .rig import address_of

__all__ = ["Nccl", "nccl"]


class _View:
    """Memory at an address as an array that others can wrap."""

    def __init__(self, address: int, elements: int, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (elements,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


def _tensor(address: int, nbytes: int, setting: Setting) -> Any:
    """Memory as a torch tensor, which nccl4py takes fastest; as a cupy array where torch is missing."""
    view = _View(address, nbytes // setting.dtype.itemsize, setting.dtype.str)
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return importlib.import_module("cupy").asarray(view)
    return torch.as_tensor(view, device=f"cuda:{setting.rig.device}")


def nccl(setting: Setting) -> list[Contender]:
    """One communicator, used with plain buffers and with registered ones. Collective."""
    from cuda.core import Device
    from nccl import core

    Device(setting.rig.device).set_current()
    mine = bytes(core.get_unique_id()) if setting.host.rank == 0 else b""
    shared = setting.host.all_gather(mine, "share NCCL's id")[0]
    comm = core.Communicator.init(setting.host.size, setting.host.rank, core.UniqueId.from_bytes(shared))
    return [Nccl(setting, comm, symmetric=False), Nccl(setting, comm, symmetric=True)]


class Nccl(Contender):
    """ncclAllGather. The registered one closes the communicator, as it comes last."""

    def __init__(self, setting: Setting, comm: Any, *, symmetric: bool) -> None:
        super().__init__(setting)
        self.name = "nccl-symmetric" if symmetric else "nccl"
        self.comm = comm
        self.symmetric = symmetric
        self.held: tuple[Any, ...] = ()
        self.windows: tuple[Any, ...] = ()
        if symmetric:
            from nccl import core

            sizes = setting.capacity, setting.capacity * self.world
            self.held = tuple(core.mem_alloc(max(nbytes, 1 << 21)) for nbytes in sizes)
            flag = core.WindowFlag.COLL_SYMMETRIC
            self.windows = tuple(comm.register_window(buffer, flag) for buffer in self.held)
            if not all(window.is_valid for window in self.windows):
                raise RuntimeError("NCCL gave no window: symmetric memory is not supported here")

    def bind(self, nbytes: int) -> Bound:
        if self.symmetric:
            source, target = (int(buffer.handle) for buffer in self.held)
            held: tuple[Any, ...] = self.held
        else:
            held = tuple(self.rig.array(n, self.setting.dtype) for n in (nbytes, nbytes * self.world))
            source, target = map(address_of, held)
        tensors = _tensor(source, nbytes, self.setting), _tensor(target, nbytes * self.world, self.setting)
        call = partial(self.comm.allgather, *tensors, stream=self.rig.stream)
        return Bound(source, target, call, call, (*held, *tensors))

    def close(self) -> None:
        if not self.symmetric:
            return
        for window in self.windows:
            window.close()
        self.comm.destroy()
        for buffer in self.held:
            buffer.close()
