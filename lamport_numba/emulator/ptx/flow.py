"""From a function's text to a flat piece of code that knows its loops and its live registers.

Device functions are inlined (a call keeps nothing that a state machine could not keep), so what is translated is one
list of
instructions. Every loop has a branch backwards in the text; those are the places where a lane can be left without
losing anything
but the registers that are *live* there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ...errors import PtxError
from .syntax import (
    Address,
    Function,
    Group,
    Instruction,
    Label,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Source,
    Symbol,
    Variable,
    Vector,
)

__all__ = ["Flat", "flatten", "has_result", "liveness", "mapped", "registers_of", "successors"]

# Instructions without a result; in all others the first operand is the result.
_NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "nanosleep",
        "prefetch",
        "prefetchu",
        "fence",
        "membar",
        "griddepcontrol",
        "call",
        "discard",
        "applypriority",
        "pmevent",
        "setmaxnreg",
    ]
)
_MAX_INSTRUCTIONS = 200_000
_EXTERNAL = frozenset(["__assertfail", "__assert_fail", "vprintf"])


@dataclass
class Flat:
    """A kernel with everything inlined. ``carry`` is the condition code, kept as one more register."""

    items: list[Instruction | Label]
    registers: list[Register]
    variables: list[Variable]  # local and param pieces, one set an inlined call; shared and module ones once
    tables: dict[str, list[str]]
    carry: Register
    labels: dict[str, int] = field(default_factory=dict)


class _Inliner:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.items: list[Instruction | Label] = []
        self.registers: list[Register] = []
        self.variables: dict[Variable, None] = {}
        self.tables: dict[str, list[str]] = {}
        self.calls = 0

    def fail(self, message: str, line: int) -> PtxError:
        return PtxError(message, line=line, text=self.source.lines[line - 1])

    def function(
        self, function: Function, bindings: dict[Variable, Variable], prefix: str, stack: tuple[str, ...]
    ) -> None:
        """Append the body; ``bindings`` are the caller's pieces of memory behind the parameters. "" is the kernel's
        own prefix."""
        assert function.body is not None
        fresh: dict[Register, Register] = {}
        renamed = dict(bindings)
        for variable in function.variables:
            if variable.space in ("local", "param"):
                renamed[variable] = replace(variable, name=prefix + variable.name)
            self.variables[renamed.get(variable, variable)] = None
        for name, targets in function.tables.items():
            self.tables[prefix + name] = [prefix + t for t in targets]

        def rename(operand: Operand) -> Operand:
            if isinstance(operand, Register):
                if operand not in fresh:
                    fresh[operand] = Register(prefix + operand.name, operand.bits, len(self.registers))
                    self.registers.append(fresh[operand])
                return fresh[operand]
            if isinstance(operand, Symbol) and operand.target is not None:
                target = renamed.get(operand.target, operand.target)
                self.variables[target] = None
                return Symbol(operand.name, operand.offset, target)
            return operand

        end = f"{prefix}end"
        for item in function.body:
            if len(self.items) > _MAX_INSTRUCTIONS:
                raise self.fail("too many instructions once device functions are inlined", item.line)
            if isinstance(item, Label):
                self.items.append(Label(prefix + item.name, item.line))
                continue
            guard = rename(item.guard) if item.guard is not None else None
            assert guard is None or isinstance(guard, Register)
            operands = tuple(mapped(o, rename) for o in item.operands)
            if item.op in ("bra", "brx"):
                operands = tuple(Symbol(prefix + o.name) if isinstance(o, Symbol) else o for o in operands)
            copy = Instruction(item.op, item.mods, operands, item.line, guard, item.guard_negated)
            if item.op == "call":
                self.call(copy, stack)
            elif item.op == "ret" and prefix:
                self.items.append(Instruction("bra", (), (Symbol(end),), item.line, guard, item.guard_negated))
            else:
                self.items.append(copy)
        if prefix:
            self.items.append(Label(end, function.line))

    def call(self, call: Instruction, stack: tuple[str, ...]) -> None:
        """``call (results), name, (arguments);``"""
        groups = [o for o in call.operands if isinstance(o, Group)]
        names = [o for o in call.operands if isinstance(o, Symbol)]
        has_results = bool(call.operands) and isinstance(call.operands[0], Group)
        if not names:
            raise self.fail("a call through a register is not emulated", call.line)
        name = names[0].name
        callee = self.source.functions.get(name)
        results = groups[0].items if has_results else ()
        arguments = groups[-1].items if len(groups) > has_results else ()
        if callee is None or (callee.body is None and name not in _EXTERNAL):
            raise self.fail(f"call of {name}, which is not in this module", call.line)
        if len(results) != len(callee.results) or len(arguments) != len(callee.params):
            raise self.fail(
                f"{name} takes {len(callee.params)} arguments and gives {len(callee.results)} results", call.line
            )
        if callee.body is None:
            self.items.append(replace(call, op="external", mods=(name,), operands=(*arguments, *results)))
            return
        if name in stack:
            raise self.fail(f"{name} is recursive, which is not emulated", call.line)
        if len(stack) > 100:
            raise self.fail("calls are nested too deep", call.line)
        bindings = {}
        for formal, actual in zip((*callee.results, *callee.params), (*results, *arguments), strict=True):
            if not isinstance(actual, Symbol) or actual.target is None or actual.target.space != "param":
                raise self.fail("arguments of a call are .param variables", call.line)
            if actual.target.size < formal.size:
                raise self.fail(f"{actual.name} is smaller than the parameter {formal.name} of {name}", call.line)
            bindings[formal] = actual.target
        self.calls += 1
        prefix = f"c{self.calls}."
        skip = f"{prefix}skip"
        if call.guard is not None:
            self.items.append(Instruction("bra", (), (Symbol(skip),), call.line, call.guard, not call.guard_negated))
        self.function(callee, bindings, prefix, (*stack, name))
        if call.guard is not None:
            self.items.append(Label(skip, call.line))


def mapped(operand: Operand, rename: Callable[[Operand], Operand]) -> Operand:
    """The operand with every name inside it replaced."""
    match operand:
        case Vector(items):
            return Vector(tuple(map(rename, items)))
        case Group(items):
            return Group(tuple(map(rename, items)))
        case Pair(first, second):
            return Pair(rename(first), rename(second))
        case Not(inner):
            return Not(rename(inner))
        case Address(base, offset):
            inner = rename(base)
            assert not isinstance(inner, Vector | Group | Pair | Not | Address | Sink)
            return Address(inner, offset)  # type: ignore[arg-type]
        case _:
            return rename(operand)


def flatten(source: Source, kernel: Function) -> Flat:
    """Inline every device function that ``kernel`` calls, and find the labels."""
    inliner = _Inliner(source)
    inliner.function(kernel, {}, "", (kernel.name,))
    carry = Register("carry flag", 1, len(inliner.registers))
    inliner.registers.append(carry)
    flat = Flat(inliner.items, inliner.registers, list(inliner.variables), inliner.tables, carry)
    flat.labels = {item.name: i for i, item in enumerate(flat.items) if isinstance(item, Label)}
    return flat


def registers_of(operand: Operand) -> Iterator[Register]:
    """The registers that an operand names."""
    match operand:
        case Register():
            yield operand
        case Vector(items) | Group(items):
            for item in items:
                yield from registers_of(item)
        case Pair(first, second):
            yield from registers_of(first)
            yield from registers_of(second)
        case Not(inner) | Address(inner, _):
            yield from registers_of(inner)


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is written."""
    if instruction.op in ("bar", "barrier"):
        return "red" in instruction.mods
    if instruction.op == "multimem":
        return "ld_reduce" in instruction.mods
    return instruction.op not in _NO_RESULT and instruction.op != "external"


def _mask(operands: tuple[Operand, ...]) -> int:
    mask = 0
    for operand in operands:
        for register in registers_of(operand):
            mask |= 1 << register.index
    return mask


def uses_and_defs(instruction: Instruction, carry: Register) -> tuple[int, int]:
    """Bit masks of the registers that an instruction reads, and of those that it surely writes."""
    results = 1 if has_result(instruction) else 0
    uses, defs = _mask(instruction.operands[results:]), _mask(instruction.operands[:results])
    if instruction.op in ("addc", "subc", "madc"):
        uses |= 1 << carry.index
    if "cc" in instruction.mods:
        defs |= 1 << carry.index
    if instruction.guard is not None:
        uses |= 1 << instruction.guard.index
        defs = 0  # it may not be executed
    return uses, defs


def successors(flat: Flat, at: int) -> tuple[list[int], bool]:
    """The places an item may jump to, and whether it may fall through to the next."""
    item = flat.items[at]
    if isinstance(item, Label):
        return [], True
    if item.op == "bra":
        return [flat.labels[o.name] for o in item.operands if isinstance(o, Symbol)], item.guard is not None
    if item.op == "brx":
        names = [o.name for o in item.operands if isinstance(o, Symbol)]
        return [flat.labels[t] for n in names for t in flat.tables.get(n, ())], item.guard is not None
    return [], not (item.op in ("ret", "exit", "trap") and item.guard is None)


def liveness(flat: Flat) -> list[int]:
    """For every item, the mask of the registers that are live *before* it; one more entry for the end."""
    count = len(flat.items)
    live = [0] * (count + 1)
    effects = [(0, 0) if isinstance(item, Label) else uses_and_defs(item, flat.carry) for item in flat.items]
    after = [successors(flat, i) for i in range(count)]
    changed = True
    while changed:
        changed = False
        for i in range(count - 1, -1, -1):
            targets, falls = after[i]
            mask = live[i + 1] if falls else 0
            for target in targets:
                mask |= live[target]
            uses, defs = effects[i]
            mask = (mask & ~defs) | uses
            if mask != live[i]:
                live[i] = mask
                changed = changed or isinstance(flat.items[i], Label)
    return live
