"""What a mailbox's memory holds of its device, and how one rank alone gives it back."""

from __future__ import annotations

from ..collectives.ends import Holdings
from ..driver import Driver, structs
from ..symmetric import SymmetricMemory
from .lowering import CONTROL_ALARM

__all__ = ["MailboxHoldings"]


class MailboxHoldings(Holdings):
    """The allocations, the symmetric memory, and the streams that launches were seen on.

    Launches follow ``Epoch.advance`` on its stream, so those streams are known; the legacy one always counts.
    """

    def __init__(self, drv: Driver, device: int) -> None:
        super().__init__(drv, device)
        self.symmetric: SymmetricMemory | None = None
        self.scratch = self.control = self.report = self.side = 0
        self.streams = {0}

    def anything(self) -> bool:
        return bool(self.symmetric or self.scratch or self.control or self.report or self.side)

    def silence(self) -> None:
        if self.control and self.side:  # on a stream of its own: the caller's may be full of kernels that wait
            self.drv.call("cuMemsetD32Async", self.control + CONTROL_ALARM, 1, 1, self.side)
            self.drv.call("cuStreamSynchronize", self.side)

    def streams_rest(self) -> bool:
        """Of a stream that was destroyed or is captured nobody knows: what ran there may still run."""
        return all(self._rests(stream) for stream in self.streams)

    def _rests(self, stream: int) -> bool:
        code, *status = self.drv.api.cuStreamIsCapturing(stream)
        if code or status[0] != structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return False
        return bool(self.drv.api.cuStreamQuery(stream)[0] == structs.CUresult.CUDA_SUCCESS)

    def give_back(self) -> None:
        symmetric, self.symmetric = self.symmetric, None
        if symmetric is not None:
            symmetric.abandon()
        self.free()

    def free(self) -> None:
        """Free what is this rank's alone."""
        for name, call in (
            ("scratch", "cuMemFree"),
            ("control", "cuMemFree"),
            ("report", "cuMemFreeHost"),
            ("side", "cuStreamDestroy"),
        ):
            owed = getattr(self, name)
            setattr(self, name, 0)
            if owed:
                self.drv.call(call, owed)

    def forget(self) -> None:
        symmetric, self.symmetric = self.symmetric, None
        if symmetric is not None:
            symmetric.keep()
        self.scratch = self.control = self.report = self.side = 0
