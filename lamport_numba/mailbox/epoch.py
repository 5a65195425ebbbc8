"""The launch counter that tags come from. It lives on the device, so that a captured graph moves it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .. import ptx
from ..arrays import to_device
from ..driver import Driver
from ..streams import as_stream, is_capturing
from .holdings import MailboxHoldings

_THREADS = 256
LAST_TAG = 2**32 - 1


class Epoch:
    """Tag and parity of the present launch, on the device.

    ``advance`` before every launch that uses the mailbox, on the same stream; a captured graph replays it with the
    launch. Kernels read ``state``: element 0 is the tag (1 to 2**32 - 1), element 1 the parity of the peer buffers (0
    or 1).

    Args:
        drv, device: where it lives.
        peer: address of the two buffers of peer regions, each of ``peer_bytes``.
        scratch: address of the scratch regions, of ``scratch_bytes``. Around the wrap of the tag both are zeroed.
        holdings: who wants to know the streams of the launches, so that nothing is freed under them.
    """

    def __init__(
        self,
        drv: Driver,
        device: int,
        *,
        peer: int = 0,
        peer_bytes: int = 0,
        scratch: int = 0,
        scratch_bytes: int = 0,
        holdings: MailboxHoldings,
    ) -> None:
        self._drv = drv
        self._holdings = holdings
        self._device = device
        with drv.current(device):
            self.state = to_device(np.zeros(2, np.uint32), device=device, drv=drv)
            self._function = drv.call("cuModuleGetFunction", drv.load_module(ptx.read("epoch.ptx")), b"epoch")
        numbers = (_address(self.state), peer, peer_bytes, scratch, scratch_bytes)
        self._values = [ctypes.c_uint64(number) for number in numbers]
        self._pointers = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(value) for value in self._values))

    def advance(self, stream: Any = None) -> None:
        """Queue the step to the next launch's tag and parity. Raises DriverError, or ValueError for no stream."""
        handle = as_stream(stream)
        with self._drv.current(self._device):
            if is_capturing(self._drv, handle):
                self._holdings.captured = True
            else:
                self._holdings.streams.add(handle)
            self._drv.call(
                "cuLaunchKernel",
                *(self._function, 1, 1, 1, _THREADS, 1, 1, 0, handle),
                *(ctypes.addressof(self._pointers), 0),
            )

    def read(self) -> tuple[int, int]:
        """Tag and parity of the latest launch; waits for the legacy stream."""
        tag, parity = self.state.copy_to_host()
        return int(tag), int(parity)

    def restart(self, tag: int = 0, parity: int = 0) -> None:
        """Count on from ``tag``, for tests of the wrap. No launch may be under way, and no slot may hold a tag to
        come.
        """
        if not 0 <= tag <= LAST_TAG or parity not in (0, 1):
            raise ValueError(f"tag {tag} and parity {parity}: a tag is 0 to 2**32 - 1, a parity 0 or 1")
        self.state.copy_to_device(np.array([tag, parity], np.uint32))


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])
