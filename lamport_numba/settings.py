"""All environment variables of the library: one table with types, defaults and meanings.

A value is read from the environment each time it is asked for, so that a test or a program may set it late; ``get``
checks it and says what is wrong with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import SettingError

PREFIX: Final = "LAMPORT_NUMBA_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Setting:
    """One variable: ``parse`` gives the value of a text or raises ValueError; ``takes`` says what it takes."""

    name: str
    takes: str
    default: Any
    meaning: str
    parse: Callable[[str], Any]
    default_text: str | None = None

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in ``environ``; unset or empty is the default."""
        text = environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise SettingError(f"{self.name}={text!r} is not valid: it takes {self.takes}") from None

    def shown_default(self) -> str:
        """The default as the documentation prints it."""
        if self.default_text is not None:
            return self.default_text
        if isinstance(self.default, bool):
            return "1" if self.default else "0"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(text)
        return text.lower()

    return parse


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text, 0)
        if value < low or (high is not None and value > high):
            raise ValueError(text)
        return value

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


_BOOLEAN = "0 or 1"


def _named(name: str) -> str:
    return PREFIX + name


# Names below are without the prefix.
_TABLE: tuple[tuple[str, str, Any, str, Callable[[str], Any], str | None], ...] = (
    (
        "DEVICE",
        "auto, cuda or emulated",
        "auto",
        "Which device is used. auto: a GPU of compute capability 9.0 or newer whose driver takes PTX 8.1, else the "
        "emulated device with a warning that says why.",
        _choice("auto", "cuda", "emulated"),
        None,
    ),
    (
        "TRANSPORT",
        "auto, peer, multicast or measure",
        "auto",
        "The transport where the constructor is given none or auto.",
        _choice("auto", "peer", "multicast", "measure"),
        None,
    ),
    (
        "DISABLE_MULTICAST",
        _BOOLEAN,
        False,
        "1: not one multicast call of the driver is made, probes included. Obeyed on every rank if set on any, as are "
        "NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 and NVSHMEM_DISABLE_NVLS=1.",
        _flag,
        None,
    ),
    (
        "SHARE_DEVICE",
        _BOOLEAN,
        False,
        "1: several ranks may use one GPU (under MPS, or time-sliced and slow), if all their grids fit together.",
        _flag,
        None,
    ),
    (
        "TIMEOUT",
        "a positive number of seconds",
        600.0,
        "Deadline of a kernel that waits for a peer, where the constructor is given none.",
        _seconds,
        None,
    ),
    (
        "SETUP_TIMEOUT",
        "a positive number of seconds",
        120.0,
        "Deadline of each collective step on the host: construction, close, reset.",
        _seconds,
        None,
    ),
    (
        "COMPARE",
        _BOOLEAN,
        False,
        "1: before every call all ranks compare size, dtype and shape over MPI; a difference names all ranks' values.",
        _flag,
        None,
    ),
    (
        "EMULATED_DEVICES",
        "an integer from 1 to 4096",
        None,
        "Number of emulated devices.",
        _integer(1, 4096),
        "ranks on this host, from the launcher; else 1",
    ),
    (
        "FABRIC",
        "immediate or adversarial",
        "immediate",
        "Emulated device: how stores travel. adversarial: late, reordered, with threads and ranks in random order.",
        _choice("immediate", "adversarial"),
        None,
    ),
    ("SEED", "an integer from 0", 0, "Emulated device: the seed of the adversarial fabric.", _integer(0), None),
    (
        "RESIDENCY",
        "an integer from 1",
        None,
        "Emulated device: how many CTAs a device holds at once.",
        _integer(1),
        "what the emulated device's SMs hold",
    ),
    (
        "CACHE",
        "a path, or 0",
        None,
        "Emulated device: folder of translated kernels; 0 keeps none.",
        str,
        "$XDG_CACHE_HOME/lamport-numba or ~/.cache/lamport-numba",
    ),
)

TABLE: Final[Mapping[str, Setting]] = {
    short: Setting(_named(short), takes, default, meaning, parse, default_text)
    for short, takes, default, meaning, parse, default_text in _TABLE
}


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The checked value of a setting, by its name with or without the prefix.

    Raises SettingError if the environment holds something that it does not take; KeyError for an unknown setting.
    """
    return TABLE[name.removeprefix(PREFIX)].read(os.environ if environ is None else environ)


def check(environ: Mapping[str, str] | None = None) -> None:
    """Read every setting; raise SettingError for the first bad value."""
    env = os.environ if environ is None else environ
    for setting in TABLE.values():
        setting.read(env)


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that carry our prefix and are not in the table: mistyped, most likely."""
    env = os.environ if environ is None else environ
    return sorted(name for name in env if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in TABLE)


# Other libraries' switches that we obey: (variable, the value that switches multicast off).
_FOREIGN_OFF: tuple[tuple[str, str], ...] = (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
)


def multicast_switched_off(environ: Mapping[str, str] | None = None) -> str | None:
    """The variable, as "NAME=value", that forbids every multicast call in this process; None if none does."""
    env = os.environ if environ is None else environ
    if get("DISABLE_MULTICAST", env):
        return f"{TABLE['DISABLE_MULTICAST'].name}={env[TABLE['DISABLE_MULTICAST'].name].strip()}"
    for name, off in _FOREIGN_OFF:
        value = env.get(name, "").strip().lower()
        if value == off or value in (_FALSE if off == "0" else _TRUE):
            return f"{name}={env[name].strip()}"
    return None


def markdown() -> str:
    """The table of the documentation."""
    lines = ["| variable | takes | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{s.name}` | {s.takes} | {s.shown_default()} | {s.meaning} |" for s in TABLE.values()]
    return "\n".join(lines) + "\n"


_DOCUMENT: Final = """# Settings

Made by `python -m lamport_numba.settings > docs/settings.md` from the one table in `lamport_numba/settings.py`. An
argument of a constructor or of a command goes before its variable. A value that a setting does not take is an error
that names it; a variable with our prefix that does not exist is warned of once. Booleans also take true, yes, on,
false, no and off; integers also take 0x.

{table}
Variables of others that are obeyed:

- `NCCL_NVLS_ENABLE=0`, `TORCH_SYMM_MEM_DISABLE_MULTICAST=1`, `NVSHMEM_DISABLE_NVLS=1`: as
  `LAMPORT_NUMBA_DISABLE_MULTICAST=1`, if set on any rank.
- `CUDA_VISIBLE_DEVICES`: which GPUs there are. Ranks compare devices by UUID, never by number.
- The launcher's own ({launchers}): the rank and the ranks on this host, from which come the default device (the rank on
  this host modulo the number of devices) and the default number of emulated devices.
"""


def document() -> str:
    """The text of docs/settings.md."""
    from .launcher import LAUNCHERS

    return _DOCUMENT.format(table=markdown(), launchers=", ".join(name for name, *_ in LAUNCHERS))


if __name__ == "__main__":
    print(document(), end="")
