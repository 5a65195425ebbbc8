"""What a constructor was given: checked on each rank, agreed on by all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import numpy as np

from .. import settings
from .._version import __version__
from ..driver import Driver
from ..errors import SetupError
from ..symmetric import Communicator
from .channel import PACK_BYTES, RowChannel
from .reports import MAX_WORLD

__all__ = ["Arguments", "agreed", "naming"]

_TRANSPORTS: Final = ("auto", "peer", "multicast", "measure")
_LONGEST: Final = 1e9  # seconds; the kernels count nanoseconds in 64 bits


@dataclass(frozen=True)
class Arguments:
    """The arguments of an all-gather, checked, with what the settings say where the caller left it open."""

    rank_capacity_bytes: int
    device: int
    transport: str
    timeout: float
    share_device: bool
    pdl: bool
    compare_calls: bool


def agreed(
    comm: Communicator, drv: Driver, owner: str, channel: type[RowChannel], given: Mapping[str, Any]
) -> Arguments:
    """Check what was given; collective.

    A rank's own mistake keeps its type there (ValueError or TypeError) and is a SetupError on the others, as is a
    difference between the ranks on all. ``owner`` names the class.
    """
    wrong: Exception | None = None
    mine: Arguments | None = None
    try:
        mine = _checked(comm, drv, channel, given)
    except Exception as error:
        wrong = naming(comm.rank, error)
    try:
        comm.vote("check the arguments", wrong)
    except SetupError:
        if wrong is not None:
            raise wrong from None
        raise
    assert mine is not None
    text = (
        f"{owner} of lamport-numba {__version__}: rank_capacity_bytes={mine.rank_capacity_bytes}, "
        f"transport={mine.transport!r}, timeout={mine.timeout:g}, pdl={mine.pdl}, compare_calls={mine.compare_calls}"
    )
    said = [words.decode() for words in comm.all_gather(text.encode(), "compare the arguments")]
    if len(set(said)) > 1:
        rows = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        raise SetupError(f"ranks were constructed differently: {rows}", step="compare the arguments")
    return mine


def naming(rank: int, error: Exception) -> Exception:
    """The same exception, and where it is a plain TypeError or ValueError its message begins with the rank."""
    mine = f"rank {rank}: "
    if type(error) in (TypeError, ValueError) and not str(error).startswith(mine):
        error.args = (f"{mine}{error}",)
    return error


def _checked(comm: Communicator, drv: Driver, channel: type[RowChannel], given: Mapping[str, Any]) -> Arguments:
    options = dict(given)
    device, timeout, transport = options.pop("device"), options.pop("timeout"), options.pop("transport")
    if comm.size > MAX_WORLD:
        raise ValueError(f"the communicator has {comm.size} ranks; expected at most {MAX_WORLD}")
    capacity = _capacity(options.pop("rank_capacity_bytes"), channel.largest_capacity(comm.size), comm.size)
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(map(repr, _TRANSPORTS))}")
    flags = {name: _flag(name, value) for name, value in options.items()}
    return Arguments(
        rank_capacity_bytes=capacity,
        device=drv.default_device() if device is None else drv.checked_device(device),
        transport=settings.get("TRANSPORT") if transport == "auto" else transport,
        timeout=_timeout(settings.get("TIMEOUT") if timeout is None else timeout),
        share_device=_or_setting(flags["share_device"], "SHARE_DEVICE"),
        pdl=bool(flags["pdl"]),
        compare_calls=_or_setting(flags["compare_calls"], "COMPARE"),
    )


def _capacity(capacity: Any, most: int, world: int) -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity <= 0:
        raise ValueError(f"rank_capacity_bytes is {capacity!r}; expected a positive multiple of {PACK_BYTES}")
    if capacity % PACK_BYTES:
        raise ValueError(f"rank_capacity_bytes is {capacity}; expected a positive multiple of {PACK_BYTES}")
    if capacity > most:
        raise ValueError(
            f"rank_capacity_bytes is {capacity}; expected at most {most} in a world of {world}: the kernels count the "
            "bytes of a mailbox in 32 bits. Gather larger arrays in pieces"
        )
    return int(capacity)


def _timeout(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(
            f"timeout is {timeout!r}, of type {type(timeout).__name__}; expected None or a number of seconds"
        )
    seconds: Any = timeout
    if not 0 < seconds <= _LONGEST:  # an int may be too large for a float
        raise ValueError(f"timeout is {timeout!r}; expected seconds, above 0 and at most {_LONGEST:g}")
    return float(seconds)


def _flag(name: str, value: Any) -> bool | None:
    if value is None and name in ("share_device", "compare_calls"):
        return None
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    none = "None, " if name in ("share_device", "compare_calls") else ""
    raise TypeError(f"{name} is {value!r}, of type {type(value).__name__}; expected {none}True or False")


def _or_setting(flag: bool | None, setting: str) -> bool:
    return bool(settings.get(setting)) if flag is None else flag
