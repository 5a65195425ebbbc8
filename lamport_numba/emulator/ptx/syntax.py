"""The parts of a PTX module, as the parser hands them on.

Registers are resolved: two operands that name the same register hold the same `Register` object, whatever the nesting
of the
braces they stand in. Every instruction keeps its line, so that everything later can say where it went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

# Type -> (bits, kind): b untyped, u/s integers, f IEEE floats, bf bfloat16, p predicate; x2 packs are bits with a
# meaning of their own.
TYPES: dict[str, tuple[int, str]] = {
    **{f"{k}{n}": (n, k) for k in "bus" for n in (8, 16, 32, 64)},
    "b128": (128, "b"),
    "f16": (16, "f"),
    "f32": (32, "f"),
    "f64": (64, "f"),
    "bf16": (16, "bf"),
    "f16x2": (32, "f16x2"),
    "bf16x2": (32, "bf16x2"),
    "pred": (1, "p"),
}


@dataclass(eq=False)
class Register:
    """A virtual register: a container of ``bits`` bits. ``index`` is its place in its function's list."""

    name: str
    bits: int
    index: int = -1


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A constant: ``value`` holds the bits (floats too); ``kind`` is "int", "f32", "f64", or "real" (a decimal float:
    a double)."""

    value: int
    kind: str = "int"


@dataclass(eq=False)
class Variable:
    """A named piece of memory: ``space`` is global, const, shared, local or param. ``offset`` is filled in once it is
    laid out."""

    name: str
    space: str
    size: int
    align: int
    type: str = "b8"
    init: list[Imm | Symbol] | None = None
    external: bool = False
    line: int = 0
    offset: int = -1


@dataclass(frozen=True)
class Symbol:
    """A name that is no register, with an offset in bytes; ``target`` is what it was resolved to."""

    name: str
    offset: int = 0
    target: Variable | None = None


@dataclass(frozen=True)
class Address:
    """A memory operand [base + offset]."""

    base: Register | Symbol | Imm
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}: the elements of a vector access, or of a packed register."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """!p"""

    operand: Operand


@dataclass(frozen=True)
class Group:
    """(a, b): the arguments of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """_: a result that nobody wants."""


Operand: TypeAlias = Register | Special | Imm | Symbol | Address | Vector | Pair | Not | Group | Sink


@dataclass
class Instruction:
    """``@guard op.mods operands;``"""

    op: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    guard: Register | None = None
    guard_negated: bool = False

    @property
    def name(self) -> str:
        return ".".join((self.op, *self.mods))


@dataclass
class Label:
    """A place in the code."""

    name: str
    line: int


@dataclass
class Function:
    """``.entry`` or ``.func``; ``body`` is None for a declaration."""

    name: str
    is_kernel: bool
    params: list[Variable]
    results: list[Variable]
    line: int
    body: list[Instruction | Label] | None = None
    registers: list[Register] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    max_threads: int = 1024


@dataclass
class Source:
    """A parsed module."""

    lines: list[str]
    version: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
