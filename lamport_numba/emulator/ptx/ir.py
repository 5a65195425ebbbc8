"""A small writer of LLVM IR text.

`Code` writes one function; a `Value` is an SSA name with its type, and Python's operators on it write instructions.
Integers mix in
freely. Division, shifts right and comparisons are unsigned unless the method says otherwise, as PTX's .u forms are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from .layout import Record

__all__ = ["Code", "Value", "const"]

_BITS = {"ptr": 64, "float": 32, "double": 64, "half": 16, "bfloat": 16}


class Value:
    """An SSA value or a constant of some LLVM type, tied to the `Code` that it is written in."""

    __slots__ = ("code", "name", "type")

    def __init__(self, code: Code, type_: str, name: str) -> None:
        self.code = code
        self.type = type_
        self.name = name

    def __str__(self) -> str:
        return f"{self.type} {self.name}"

    @property
    def bits(self) -> int:
        return _BITS.get(self.type) or int(self.type[1:])

    def _same(self, other: Value | int) -> str:
        if isinstance(other, int):
            return const(other, self.bits)
        assert other.type == self.type, f"{other} with {self}"
        return other.name

    def op(self, text: str, other: Value | int) -> Value:
        """``text`` is a binary instruction such as "lshr"."""
        return self.code.op(self.type, f"{text} {self.type} {self.name}, {self._same(other)}")

    def __add__(self, other: Value | int) -> Value:
        if self.type == "ptr":
            offset = other if isinstance(other, Value) else Value(self.code, "i64", str(other))
            return self.code.op("ptr", f"getelementptr i8, ptr {self.name}, {offset}")
        return self.op("add", other)

    def __sub__(self, other: Value | int) -> Value:
        return self.op("sub", other)

    def __mul__(self, other: Value | int) -> Value:
        return self.op("mul", other)

    def __and__(self, other: Value | int) -> Value:
        return self.op("and", other)

    def __or__(self, other: Value | int) -> Value:
        return self.op("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self.op("xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self.op("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self.op("lshr", other)

    def __mod__(self, other: Value | int) -> Value:
        return self.op("urem", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self.op("udiv", other)

    def __invert__(self) -> Value:
        return self.op("xor", -1)

    def cmp(self, how: str, other: Value | int) -> Value:
        """``how`` is an icmp predicate."""
        name = "null" if self.type == "ptr" and other == 0 else self._same(other)
        return self.code.op("i1", f"icmp {how} {self.type} {self.name}, {name}")

    def eq(self, other: Value | int) -> Value:
        return self.cmp("eq", other)

    def ne(self, other: Value | int) -> Value:
        return self.cmp("ne", other)

    def lt(self, other: Value | int) -> Value:
        return self.cmp("ult", other)

    def le(self, other: Value | int) -> Value:
        return self.cmp("ule", other)

    def to(self, type_: str, *, signed: bool = False) -> Value:
        """Convert between integer widths and pointers, keeping the value (or its low bits)."""
        if type_ == self.type:
            return self
        if "ptr" in (type_, self.type):
            if type_ == "ptr":
                return self.code.op("ptr", f"inttoptr {self} to ptr")
            wide = self.code.op("i64", f"ptrtoint {self} to i64")
            return wide.to(type_)
        how = "trunc" if int(type_[1:]) < self.bits else "sext" if signed else "zext"
        return self.code.op(type_, f"{how} {self} to {type_}")

    def cast(self, type_: str) -> Value:
        """The same bits as another type of the same size."""
        if type_ == self.type:
            return self
        return self.code.op(type_, f"bitcast {self} to {type_}")

    def select(self, yes: Value | int, no: Value | int) -> Value:
        sample = yes if isinstance(yes, Value) else no
        assert isinstance(sample, Value)
        return self.code.op(
            sample.type, f"select {self}, {sample.type} {sample._same(yes)}, {sample.type} {sample._same(no)}"
        )

    def load(self, type_: str, how: str = "") -> Value:
        return self.code.op(type_, f"load {type_}, {self}{how}")

    def store(self, value: Value) -> None:
        self.code.do(f"store {value}, {self}")

    def bit_count(self) -> Value:
        return self.code.call(self.type, f"llvm.ctpop.{self.type}", self)

    def lowest_bit(self) -> Value:
        """Index of the lowest set bit; the value must not be 0."""
        return self.code.call(self.type, f"llvm.cttz.{self.type}", self, Value(self.code, "i1", "true"))


def const(value: int, bits: int) -> str:
    """An integer constant as LLVM writes it: reduced to the signed range of its width."""
    if bits == 1:
        return "true" if value & 1 else "false"
    value &= (1 << bits) - 1
    return str(value - (1 << bits) if value >> (bits - 1) else value)


class Code:
    """Writes one function, block by block; functions that it calls are declared by the `unit` it belongs to."""

    def __init__(self, name: str, result: str, params: Sequence[tuple[str, str]], attributes: str = "") -> None:
        self.internal = "alwaysinline" in attributes
        linkage = "internal " if self.internal else ""
        self.name = name
        self.head = f"define {linkage}{result} @{name}({', '.join(f'{t} %{n}' for t, n in params)}) {attributes} {{"
        self.params = {n: Value(self, t.split()[0], f"%{n}") for t, n in params}
        self.entry: list[str] = []  # allocas, and whatever else must come first
        self.lines: list[str] = []
        self.calls: dict[str, str] = {}
        self.count = 0
        self.open = True
        self.enter = "br label %begin"  # how the entry block ends

    def text(self) -> str:
        return "\n".join([self.head, "start:", *self.entry, f"  {self.enter}", "begin:", *self.lines, "}"])

    # -- instructions ------------------------------------------------------------------------------------------

    def fresh(self, stem: str = "t") -> str:
        self.count += 1
        return f"{stem}.{self.count}"

    def op(self, type_: str, text: str) -> Value:
        name = f"%t.{self.count}"
        self.count += 1
        self.lines.append(f"  {name} = {text}")
        return Value(self, type_, name)

    def first(self, type_: str, text: str) -> Value:
        """An instruction in the entry block, so that it dominates everything."""
        name = f"%t.{self.count}"
        self.count += 1
        self.entry.append(f"  {name} = {text}")
        return Value(self, type_, name)

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def const(self, type_: str, value: int) -> Value:
        return Value(self, type_, "null" if type_ == "ptr" else const(value, int(type_[1:])))

    def call(self, result: str, name: str, *args: Value) -> Value:
        self.calls[name] = f"declare {result} @{name}({', '.join(a.type for a in args)})"
        text = f"call {result} @{name}({', '.join(map(str, args))})"
        if result == "void":
            self.do(text)
            return Value(self, "void", "")
        return self.op(result, text)

    def ret(self, value: Value | None = None) -> None:
        self.do(f"ret {value}" if value is not None else "ret void")
        self.open = False

    # -- fields of records -------------------------------------------------------------------------------------

    def get(self, base: Value, record: Record, name: str, how: str = "") -> Value:
        return (base + record.offsets[name]).load(record.types[name], how)

    def put(self, base: Value, record: Record, name: str, value: Value | int) -> None:
        type_ = record.types[name]
        wide = self.const(type_, value) if isinstance(value, int) else value
        (base + record.offsets[name]).store(wide)

    def bump(self, base: Value, record: Record, name: str, by: Value | int = 1) -> Value:
        """Add to a field and return the new value."""
        new = self.get(base, record, name) + by
        self.put(base, record, name, new)
        return new

    # -- variables ---------------------------------------------------------------------------------------------

    def variable(self, type_: str, start: Value | int | None = None, name: str | None = None) -> Variable:
        slot = f"%{name}" if name else f"%{self.fresh('v')}"
        self.entry.append(f"  {slot} = alloca {type_}")
        variable = Variable(self, type_, slot)
        if start is not None:
            variable.set(start)
        return variable

    # -- control -----------------------------------------------------------------------------------------------

    def label(self, name: str) -> None:
        if self.open:
            self.do(f"br label %{name}")
        self.lines.append(f"{name}:")
        self.open = True

    def jump(self, name: str) -> None:
        if self.open:
            self.do(f"br label %{name}")
        self.open = False

    def branch(self, condition: Value, yes: str, no: str, weights: str = "") -> None:
        self.do(f"br {condition}, label %{yes}, label %{no}{weights}")
        self.open = False

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        yes, end = self.fresh("then"), self.fresh("end")
        self.branch(condition, yes, end)
        self.label(yes)
        yield
        self.label(end)

    @contextmanager
    def choose(self, condition: Value) -> Iterator[tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
        """``with c.choose(x) as (yes, no):`` and inside ``with yes:`` and ``with no:``."""
        yes, no, end = self.fresh("yes"), self.fresh("no"), self.fresh("end")
        self.branch(condition, yes, no)
        yield self._arm(yes, end), self._arm(no, end)
        self.label(end)

    @contextmanager
    def _arm(self, name: str, end: str) -> Iterator[None]:
        self.label(name)
        yield
        self.jump(end)

    @contextmanager
    def forever(self) -> Iterator[tuple[str, str]]:
        """A loop; gives the labels to go on and to leave."""
        again, leave = self.fresh("loop"), self.fresh("done")
        self.label(again)
        yield again, leave
        self.jump(again)
        self.label(leave)

    @contextmanager
    def each(self, count: Value, start: Value | int = 0) -> Iterator[Value]:
        """For each integer from ``start`` up to ``count``."""
        index = self.variable(count.type, start)
        test, body, end = self.fresh("test"), self.fresh("body"), self.fresh("end")
        self.label(test)
        now = index.get()
        self.branch(now.lt(count), body, end)
        self.label(body)
        yield now
        index.set(now + 1)
        self.jump(test)
        self.label(end)

    @contextmanager
    def each_bit(self, mask: Value | Variable) -> Iterator[Value]:
        """For each set bit of ``mask``, from the lowest: its index. A variable is emptied; the body may clear more."""
        rest = mask if isinstance(mask, Variable) else self.variable(mask.type, mask)
        test, body, end = self.fresh("test"), self.fresh("body"), self.fresh("end")
        self.label(test)
        now = rest.get()
        self.branch(now.ne(0), body, end)
        self.label(body)
        rest.set(now & (now - 1))
        yield now.lowest_bit()
        self.jump(test)
        self.label(end)


class Variable:
    """A local variable (an alloca that mem2reg makes a register of)."""

    __slots__ = ("code", "slot", "type")

    def __init__(self, code: Code, type_: str, slot: str) -> None:
        self.code = code
        self.type = type_
        self.slot = slot

    def get(self) -> Value:
        return self.code.op(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Value | int) -> None:
        name = const(value, int(self.type[1:])) if isinstance(value, int) else value.name
        self.code.do(f"store {self.type} {name}, ptr {self.slot}")


def unit(functions: Sequence[Code], extra: str = "") -> str:
    """The text of an LLVM module with these functions; whatever they call and do not define is declared.

    ``!0`` are the weights of a branch whose first target is the likely one, ``!1`` marks loads of what never changes.
    """
    defined = {f.name for f in functions}
    declared: dict[str, str] = {}
    for function in functions:
        declared.update(function.calls)
    lines = [text for name, text in declared.items() if name not in defined and f"@{name}(" not in extra]
    lines += ['!0 = !{!"branch_weights", i32 2000, i32 1}', "!1 = !{}"]
    return "\n".join([*lines, extra, *(f.text() for f in functions)])
