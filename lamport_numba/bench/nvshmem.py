"""NVSHMEM through nvshmem4py: fcollect on a stream, between buffers of its symmetric heap."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .contenders import Bound, Contender, Setting

__all__ = ["Nvshmem"]

_TYPES = {
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
}


class Nvshmem(Contender):
    """nvshmemx_<type>_fcollect_on_stream over all ranks."""

    name = "nvshmem"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from cuda.core import Device, Stream
        from nvshmem import core

        if setting.dtype.name not in _TYPES:
            raise RuntimeError(f"no fcollect for {setting.dtype.name}")
        self.core: Any = core
        device = Device(setting.rig.device)
        device.set_current()
        uid = core.get_unique_id(empty=setting.host.rank != 0)
        raw = uid._data.view(np.uint8)  # as nvshmem4py's own broadcast of it does
        shared = setting.host.all_gather(raw.tobytes(), "share NVSHMEM's id")[0]
        raw[...] = np.frombuffer(shared, np.uint8).reshape(raw.shape)
        core.init(device=device, uid=uid, rank=self.rank, nranks=self.world, initializer_method="uid")
        self.stream = Stream.from_handle(setting.rig.stream)

    def bind(self, nbytes: int) -> Bound:
        core = self.core
        source, target = core.buffer(nbytes), core.buffer(nbytes * self.world)
        call = partial(
            core.collective_on_buffer,
            "fcollect",
            core.Teams.TEAM_WORLD,
            target,
            source,
            dtype=_TYPES[self.setting.dtype.name],
            stream=self.stream,
        )

        def close() -> None:
            self.rig.synchronize()
            core.free(target)
            core.free(source)

        return Bound(int(source.handle), int(target.handle), call, call, (source, target), close)

    def close(self) -> None:
        self.core.finalize()
