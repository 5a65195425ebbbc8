"""A loaded module: its kernels and its variables."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Kernel", "Module", "Param", "Variable", "load"]


class Param(NamedTuple):
    """One kernel parameter and its place in the parameter block (bytes)."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Variable:
    """A module-scope variable: ``space`` is "global" or "const"; B gives it ``size`` bytes aligned to ``align``."""

    name: str
    space: str
    size: int
    align: int


@dataclass
class Kernel:
    """One ``.entry``."""

    name: str
    params: list[Param]
    param_bytes: int
    shared_bytes: int  # static, of a CTA
    local_bytes: int  # of a thread
    registers: int  # an estimate: 32-bit registers a thread
    max_threads: int  # of a CTA
    warp_size: int = 32


class Module:
    """What `load` returns."""

    text: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]

    def place(self, addresses: Mapping[str, int]) -> ctypes.Array[ctypes.c_uint64]:
        """The variables' addresses as `Grid` takes them (``variables=``)."""
        raise NotImplementedError

    def image(self, name: str, addresses: Mapping[str, int]) -> bytes:
        """The initial bytes of a variable, with the addresses of others filled in where its initialiser names them."""
        raise NotImplementedError


def load(text: str | bytes) -> Module:
    """Parse and translate PTX text.

    Raises:
        PtxError: the text cannot be understood, or uses an instruction that is not emulated; the line is named.
    """
    raise NotImplementedError
