"""Registers taken apart, and those that need not be saved.

PTX written by hand uses a register for one thing after another. A *web* is one such thing: the definitions that reach
common uses. Each web becomes a register of its own; then a register with a single definition from parameters, special
registers and constants has the same value wherever the thread is, so it is computed again whenever the thread is called
(mostly once for a whole warp) instead of being saved in the lane's frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .flow import Flat, has_result, liveness, mapped, registers_of, successors
from .syntax import Address, Imm, Instruction, Label, Not, Operand, Register, Special, Symbol, Variable

__all__ = ["constants", "split"]

_MOST_ITEMS = 5000  # a longer kernel is left as it is: its text comes from a compiler, which has taken it apart
_ARITHMETIC = ("add", "sub", "mul", "mad", "and", "or", "xor", "not", "shl", "shr", "min", "max")
_PURE = frozenset([*_ARITHMETIC, "mov", "cvt", "cvta", "setp", "selp"])
_FIXED = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid", "%lanemask")


def split(flat: Flat) -> Flat:
    """The same code with a register for each web."""
    if len(flat.items) > _MOST_ITEMS:
        return flat
    results = [_results(item) for item in flat.items]
    # numbers of definitions, by place and register; those at the entry have the registers' own indices
    numbers: dict[tuple[int, int], int] = {}
    of = [1 << r.index for r in flat.registers]  # all definitions of a register, as a mask
    for at, defined in enumerate(results):
        for register in defined:
            number = numbers[at, register.index] = len(flat.registers) + len(numbers)
            of[register.index] |= 1 << number
    reaching = _reaching(flat, results, numbers, of)
    leader = list(range(len(flat.registers) + len(numbers)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    def web(at: int, register: Register) -> int:
        """The web of a use."""
        found = reaching[at] & of[register.index]
        first = find((found & -found).bit_length() - 1) if found else find(register.index)
        found &= found - 1
        while found:
            leader[find((found & -found).bit_length() - 1)] = first
            found &= found - 1
        return first

    for at, item in enumerate(flat.items):
        for register in (r for o in _sources(item) for r in registers_of(o)):
            web(at, register)
    registers: list[Register] = []
    fresh: dict[int, Register] = {}

    def named(number: int, register: Register) -> Register:
        number = find(number)
        if register == flat.carry:  # instructions use it without naming it
            number = -1
        if number not in fresh:
            fresh[number] = Register(register.name, register.bits, len(registers))
            registers.append(fresh[number])
        return fresh[number]

    carry = named(flat.carry.index, flat.carry)
    items: list[Instruction | Label] = []
    for at, item in enumerate(flat.items):
        if isinstance(item, Label):
            items.append(item)
        else:

            def read(operand: Operand, at: int = at) -> Operand:
                return named(web(at, operand), operand) if isinstance(operand, Register) else operand

            def written(operand: Operand, at: int = at) -> Operand:
                return named(numbers[at, operand.index], operand) if isinstance(operand, Register) else operand

            first = 1 if has_result(item) else 0
            operands = [mapped(o, written if i < first else read) for i, o in enumerate(item.operands)]
            guard = read(item.guard) if item.guard is not None else None
            assert guard is None or isinstance(guard, Register)
            items.append(replace(item, operands=tuple(operands), guard=guard))
    return replace(flat, items=items, registers=registers, carry=carry)


def _results(item: Instruction | Label) -> list[Register]:
    if isinstance(item, Label) or not has_result(item):
        return []
    return list(dict.fromkeys(registers_of(item.operands[0]))) if item.operands else []


def _sources(item: Instruction | Label) -> list[Operand]:
    if isinstance(item, Label):
        return []
    guard = [item.guard] if item.guard is not None else []
    return [*item.operands[1 if has_result(item) else 0 :], *guard]


def _reaching(
    flat: Flat, results: list[list[Register]], numbers: dict[tuple[int, int], int], of: list[int]
) -> list[int]:
    """For every item, the mask of the definitions that may be the last ones before it."""
    count = len(flat.items)
    before = [0] * (count + 1)
    before[0] = (1 << len(flat.registers)) - 1
    kept, made = [-1] * count, [0] * count
    for at, defined in enumerate(results):
        for register in defined:
            made[at] |= 1 << numbers[at, register.index]
            item = flat.items[at]
            if isinstance(item, Instruction) and item.guard is None:
                kept[at] &= ~of[register.index]
    after = [successors(flat, at) for at in range(count)]
    changed = True
    while changed:
        changed = False
        for at in range(count):
            mask = (before[at] & kept[at]) | made[at]
            targets, falls = after[at]
            for target in [at + 1, *targets] if falls else targets:
                if mask & ~before[target]:
                    before[target] |= mask
                    changed = changed or target <= at
    return before


def constants(flat: Flat, params: Sequence[Variable]) -> dict[int, Instruction]:
    """By a register's index, its only definition, if its value never changes; in an order in which they can be
    computed. ``params`` are the kernel's."""
    definitions: dict[int, Instruction | None] = {}
    for place in flat.items:
        for register in _results(place):
            known = register.index in definitions
            definitions[register.index] = None if known or isinstance(place, Label) else place
    # one that is read before it is written is a web with the entry's zero, and has that as a second definition
    live = liveness(flat)[0]
    found: dict[int, Instruction] = {}
    refused = {index for index, item in definitions.items() if item is None or live >> index & 1}
    for start in definitions:
        stack = [start]
        while stack:
            index = stack[-1]
            item = definitions.get(index)
            if index in found or index in refused or item is None or not _pure(item, params):
                refused.update(() if index in found else (index,))
                stack.pop()
                continue
            needs = {r.index for o in item.operands[1:] for r in registers_of(o)}
            missing = needs - set(found)
            if missing & refused or missing & set(stack):
                refused.add(index)
                stack.pop()
            elif missing:
                stack += missing
            else:
                found[index] = item
                stack.pop()
    return found


def _pure(item: Instruction, params: Sequence[Variable]) -> bool:
    """Whether an instruction computes the same, without a jump, whenever and wherever the thread executes it."""
    if item.guard is not None or not item.operands or not isinstance(item.operands[0], Register):
        return False
    if item.op == "ld":
        address = item.operands[1]
        base = address.base if isinstance(address, Address) else None
        plain = len(item.operands) == 2 and item.mods[:1] == ("param",) and len(item.mods) == 2
        return plain and isinstance(base, Symbol) and base.target in params
    if item.op not in _PURE or any(m == "cc" or m[0] == "f" or m[:2] == "bf" for m in item.mods):
        return False
    return all(_plain(operand) for operand in item.operands[1:])


def _plain(operand: Operand) -> bool:
    match operand:
        case Register() | Imm():
            return True
        case Not(inner):
            return _plain(inner)
        case Special(name):
            return name.split(".")[0].startswith(_FIXED)
        case _:
            return False
