"""The multicast address: a store to it lands in every rank's memory at the same offset.

Off switches come first: while one is set on any rank, no call of the driver that begins with cuMulticast is made. A
bind and the mapping of a multicast object block until every device is added, and cannot be cancelled; so every rank's
success is known before any rank goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .. import driver as seam
from .. import settings
from ..driver import structs
from ..errors import DriverError, MulticastUnavailable
from . import handles
from .communicator import Communicator
from .ledger import Ledger, Turn

if TYPE_CHECKING:
    from .survey import Survey

__all__ = ["attach", "granularity", "multicast_disabled"]

log = logging.getLogger("lamport_numba")

_MINIMUM: Final = structs.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
_NOT_READY: Final = 802  # CUDA_ERROR_SYSTEM_NOT_READY: the fabric is still starting
_TRIES: Final = 12
_FIRST_PAUSE: Final = 0.05  # seconds; doubles up to
_LONGEST_PAUSE: Final = 2.0  # so that all tries together take about 15 seconds


def multicast_disabled() -> str | None:
    """The variable, as "NAME=value", that forbids multicast in this process; None if none does.

    LAMPORT_NUMBA_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 and NVSHMEM_DISABLE_NVLS=1
    each do, on either device.
    """
    return settings.multicast_switched_off()


def granularity(drv: seam.Driver, nbytes: int, world_size: int, kind: str) -> int:
    """What sizes of a multicast object are multiples of. Raises MulticastUnavailable."""
    return int(_typed(lambda: drv.call("cuMulticastGetGranularity", _properties(nbytes, world_size, kind), _MINIMUM)))


def attach(
    communicator: Communicator,
    found: Survey,
    drv: seam.Driver,
    device: int,
    ledger: Ledger,
    memory: int,
    nbytes: int,
    kind: str,
    alignment: int,
) -> int:
    """Bind ``memory`` (a handle, ``nbytes`` of it) of all ranks to one multicast object; return the address.
    Collective.

    Raises MulticastUnavailable, the same on all ranks; what was made then is owed to ``ledger``.
    """
    handle = _share_object(communicator, found, drv, ledger, nbytes, kind)
    _lockstep(communicator, "add device", lambda: drv.call("cuMulticastAddDevice", handle, device))

    # All devices are added: nobody blocks from here on.
    def bind() -> None:
        drv.call("cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0)
        ledger.owe(Turn.UNBIND, "cuMulticastUnbind", handle, device, 0, nbytes)

    _lockstep(communicator, "bind memory", bind)
    with communicator.step("map multicast"):
        address: int = _typed(lambda: _map(drv, device, ledger, handle, nbytes, alignment))
    return address


def _share_object(
    communicator: Communicator, found: Survey, drv: seam.Driver, ledger: Ledger, nbytes: int, kind: str
) -> int:
    """Rank 0 makes the object, the others import it; this rank's handle."""
    held: list[int] = []

    def keep(_: int, handle: int) -> None:
        ledger.owe(Turn.MULTICAST_RELEASE, "cuMemRelease", handle)
        held.append(handle)

    def create() -> None:
        if communicator.rank == 0:
            keep(0, int(drv.call("cuMulticastCreate", _properties(nbytes, communicator.size, kind))))

    _lockstep(communicator, "create multicast", create)
    parcel = None
    try:
        with communicator.step("export multicast") as step:
            parcel = _typed(lambda: handles.Parcel(drv, kind, held[0] if held else None))
            step.value = parcel.address
        assert parcel is not None
        error = parcel.exchange(communicator, found, step.values, [0], keep, "import multicast")
        # rank 0 keeps its own reference: with the last one gone an import would find an empty object
        communicator.vote("import multicast", None if error is None else _type_of(error))
    finally:
        if parcel is not None:
            parcel.close()
    return held[0]


def _map(drv: seam.Driver, device: int, ledger: Ledger, handle: int, nbytes: int, alignment: int) -> int:
    address = int(drv.call("cuMemAddressReserve", nbytes, alignment, 0, 0))
    ledger.owe(Turn.MULTICAST_ADDRESS, "cuMemAddressFree", address, nbytes)
    drv.call("cuMemMap", address, nbytes, 0, handle, 0)
    ledger.owe(Turn.MULTICAST_UNMAP, "cuMemUnmap", address, nbytes)
    drv.call("cuMemSetAccess", address, nbytes, [handles.read_write(device)], 1)
    return address


def _lockstep(communicator: Communicator, stage: str, action: Callable[[], Any]) -> None:
    """Do ``action`` on every rank and vote; while the only failures are 802, those that had it try again together."""
    done = False
    pause = _FIRST_PAUSE
    for attempt in range(_TRIES):
        failure: Exception | None = None
        if not done:
            try:
                action()
                done = True
            except Exception as error:
                failure = error
        waiting = getattr(failure, "code", None) == _NOT_READY and attempt < _TRIES - 1
        states = communicator.agree(
            stage, "again" if waiting else "done", None if failure is None or waiting else _type_of(failure)
        )
        ranks = [rank for rank, state in enumerate(states) if state == "again"]
        if not ranks:
            return
        if communicator.rank == 0:
            log.info("%s: the fabric is not ready on rank(s) %s; trying again", stage, ", ".join(map(str, ranks)))
        communicator.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _typed(action: Callable[[], Any]) -> Any:
    """Do ``action``; a driver's error becomes a MulticastUnavailable."""
    try:
        return action()
    except DriverError as error:
        raise _type_of(error) from error


def _type_of(error: Exception) -> Exception:
    """What a failure means for whoever wants multicast."""
    if not isinstance(error, DriverError):
        return error
    bind = error.call.startswith("cuMulticastBind")
    reason = {
        1: "fabric-manager" if error.call == "cuMulticastAddDevice" else "driver",
        2: "slots" if bind else "memory",
        47: "slots" if bind else "memory",
        401: "fabric-manager",
        800: "permission",
        801: "nvswitch",
        _NOT_READY: "fabric-manager",
        919: "fabric-manager",
    }.get(error.code, "driver")
    typed = MulticastUnavailable(str(error), reason=reason, rank=error.rank, call=error.call, code=error.code)
    typed.__cause__ = error
    return typed


def _properties(nbytes: int, world_size: int, kind: str) -> Any:
    prop = structs.CUmulticastObjectProp()
    prop.numDevices = world_size
    prop.size = nbytes
    prop.handleTypes = int(handles.handle_type(kind))
    prop.flags = 0
    return prop
