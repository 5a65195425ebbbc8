"""One kernel to one step function: ``step(lane, cta, grid) -> why it came back``.

A GPU thread becomes a state machine. Its PTX registers are local variables of the step function; LLVM makes SSA
values of them.
Where a thread must let others run (a barrier, a warp collective, the way back of a loop that polls) the function
saves the registers
that are live there in the lane's frame, notes the number of the place, and returns. Called again, it jumps to that
place and loads
them. Between two such places it is straight native code.

    step:  switch lane.state -> begin | resume.1 | resume.2 | ...

A loop that does not poll cannot be left for ever either: each way back burns a unit of *fuel*, and without fuel the
lane yields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import PtxError
from . import layout
from .flow import Flat, flatten, liveness, registers_of
from .ir import Code, Value
from .layout import CTA, GRID, LANE
from .syntax import (
    TYPES,
    Function,
    Imm,
    Instruction,
    Label,
    Not,
    Operand,
    Register,
    Sink,
    Source,
    Special,
    Symbol,
    Variable,
)
from .webs import constants, split

__all__ = ["Handler", "Mods", "Translation", "Translator", "instruction", "translate"]

FUEL = 1 << 16  # loop iterations before a lane that computes lets the others run
_LEAVES = frozenset(
    ["bar", "barrier", "vote", "shfl", "match", "redux", "elect", "activemask", "griddepcontrol", "nanosleep"]
)
_ACCESSES = frozenset(["ld", "st", "atom", "red", "multimem"])
_LOCAL_AT = "$LOCAL_AT"  # where local memory begins in a frame: known once all saved registers are
_SAVED_AT = re.compile(r"\$SAVED_AT\.(\d+)\$")  # where a register is saved, likewise
_COLD = ", !prof !0"  # the first target of such a branch is the likely one


@dataclass(frozen=True)
class Site:
    """A place in the PTX that can fault: where it is, and what it accesses."""

    line: int
    size: int = 0


@dataclass
class Translation:
    """What is left of a kernel: LLVM text, and what the grid must know to run it."""

    step: Code
    flat: Flat
    sites: list[Site]
    frame_bytes: int
    local_bytes: int
    shared_bytes: int
    shared_align: int
    param_bytes: int
    param_offsets: list[int]
    live_registers: int


Handler = Callable[["Translator", Instruction, "Mods"], None]
_HANDLERS: dict[str, Handler] = {}


def instruction(*names: str) -> Callable[[Handler], Handler]:
    """Register the translator of one or more instructions."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


class Mods:
    """The modifiers of an instruction; each must be asked for, or the instruction is refused."""

    def __init__(self, translator: Translator, item: Instruction) -> None:
        self.translator = translator
        self.item = item
        self.rest = list(item.mods)

    def take(self, *names: str) -> bool:
        """Remove one of these modifiers; say whether it was there."""
        return self.one_of(names) is not None

    def one_of(self, names: tuple[str, ...] | list[str]) -> str | None:
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                return name
        return None

    def type(self, *allowed: str) -> str:
        """The type that comes next in the text."""
        for name in self.rest:
            if name in TYPES:
                self.rest.remove(name)
                if allowed and name not in allowed:
                    raise self.translator.fail(f"type .{name} is not emulated here")
                return name
        raise self.translator.fail("a type is missing")

    def done(self) -> None:
        if self.rest:
            raise self.translator.fail(f"modifier .{self.rest[0]} is not emulated here")


class Translator:
    """The state of a translation: the code so far, the registers, and the instruction at hand."""

    def __init__(self, source: Source, kernel: Function, *, adversarial: bool) -> None:
        self.source = source
        self.kernel = kernel
        self.adversarial = adversarial
        self.item = Instruction("", (), (), kernel.line)
        self.flat = split(flatten(source, kernel))
        self.live = liveness(self.flat)
        self.at = 0
        self.sites: list[Site] = []
        self.resumes: list[str] = []
        self.left: list[list[Register]] = []  # the registers saved at each place where the thread is left
        self.computed: set[int] = set()  # indices of registers that are computed anew at each call
        self.hoisted: set[int] = set()  # the places of their definitions
        self.c = c = Code("step", "i32", [("ptr noalias", "lane"), ("ptr", "cta"), ("ptr", "grid")], "alwaysinline")
        self.lane, self.cta, self.grid = c.params["lane"], c.params["cta"], c.params["grid"]
        self.fuel = c.variable("i32", name="fuel")
        self.moved = c.variable("i1", name="moved")  # whether it has done something since it was called
        c.entry += [f"  store i32 {FUEL}, ptr %fuel", "  store i1 false, ptr %moved"]
        self.slots: dict[int, str] = {}
        self.module_index = {name: i for i, name in enumerate(module_variables(source))}
        self.place_variables()

    def fail(self, message: str) -> PtxError:
        line = self.item.line
        return PtxError(message, line=line, text=self.source.lines[line - 1])

    # -- memory of a thread and of a CTA ----------------------------------------------------------------------------

    def place_variables(self) -> None:
        """Lay out parameters, shared variables, and what lies in the lane's frame."""
        self.offsets: dict[Variable, int] = {}
        at = 0
        for param in self.kernel.params:
            at += -at % param.align
            self.offsets[param] = at
            at += param.size
        self.param_bytes = at
        used = [v for v in self.flat.variables if v not in self.offsets]
        self.shared_bytes, self.shared_align = self.lay_out([v for v in used if v.space == "shared" and not v.external])
        for variable in used:
            if variable.space == "shared" and variable.external:
                self.shared_align = max(self.shared_align, variable.align, 16)
        dynamic_at = self.shared_bytes + -self.shared_bytes % max(self.shared_align, 16)
        for variable in used:
            if variable.space == "shared" and variable.external:
                self.shared_bytes = dynamic_at
                self.offsets[variable] = dynamic_at
        self.local_bytes, _ = self.lay_out([v for v in used if v.space in ("local", "param")])
        # whether the address of an inlined call's parameter is ever taken: then one in a register may be in the frame
        self.frame_addresses = any(
            isinstance(o, Symbol) and o.target is not None and o.target.space == "param" and self.in_frame(o.target)
            for item in self.flat.items
            if isinstance(item, Instruction)
            for o in item.operands
        )

    def lay_out(self, variables: list[Variable]) -> tuple[int, int]:
        at, widest = 0, 1
        for variable in variables:
            at += -at % variable.align
            self.offsets[variable] = at
            at += variable.size
            widest = max(widest, variable.align)
        return at, widest

    def local_base(self) -> Value:
        return self.lane + Value(self.c, "i64", _LOCAL_AT)

    def in_frame(self, variable: Variable) -> bool:
        """Whether a variable is local, or a parameter of an inlined call."""
        return variable.space == "local" or (variable.space == "param" and variable not in self.kernel.params)

    # -- operands ----------------------------------------------------------------------------------------------------

    def slot(self, register: Register) -> str:
        name = self.slots.get(register.index)
        if name is None:
            name = self.slots[register.index] = f"%r{register.index}"
            self.c.entry += [f"  {name} = alloca i{register.bits}", f"  store i{register.bits} 0, ptr {name}"]
        return name

    def read(self, operand: Operand, bits: int, *, signed: bool = False, real: str = "") -> Value:
        """An operand as an integer of ``bits`` bits (floats are their bits; ``real`` is the float type of a decimal
        constant)."""
        c = self.c
        match operand:
            case Register():
                value = c.op(f"i{operand.bits}", f"load i{operand.bits}, ptr {self.slot(operand)}")
                return value.to(f"i{bits}", signed=signed)
            case Imm():
                return c.const(f"i{bits}", self.constant(operand, bits, real))
            case Not():
                return ~self.read(operand.operand, 1)
            case Special():
                return self.special(operand.name).to(f"i{bits}")
            case Symbol():
                return self.address_of(operand).to(f"i{bits}")
            case _:
                raise self.fail(f"unexpected operand {type(operand).__name__.lower()}")

    def constant(self, imm: Imm, bits: int, real: str) -> int:
        import struct

        if imm.kind == "real" or (imm.kind == "f64" and real == "f32"):
            number = struct.unpack("<d", imm.value.to_bytes(8, "little"))[0]
            try:
                if real == "f64" or (not real and bits == 64):
                    return imm.value
                if real == "f32" or (not real and bits == 32):
                    return int.from_bytes(struct.pack("<f", number), "little")
            except OverflowError:
                raise self.fail("the constant does not fit a float") from None
            raise self.fail("a decimal constant needs type f32 or f64")
        if imm.kind in ("f32", "f64") and bits < int(imm.kind[1:]):
            raise self.fail(f"a constant of type {imm.kind} in {bits} bits")
        if imm.kind == "f32" and real == "f64":
            number = struct.unpack("<f", imm.value.to_bytes(4, "little"))[0]
            return int.from_bytes(struct.pack("<d", number), "little")
        return imm.value

    def write(self, operand: Operand, value: Value, *, signed: bool = False) -> None:
        """Put the bits of ``value`` in a register, extended to its width."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise self.fail("the result goes to a register")
        value = value.to("i64") if value.type == "ptr" else value.cast(f"i{value.bits}")
        if value.bits > operand.bits:
            raise self.fail(f"{value.bits} bits do not fit register {operand.name} of {operand.bits}")
        wide = value.to(f"i{operand.bits}", signed=signed)
        self.c.do(f"store {wide}, ptr {self.slot(operand)}")

    def operand(self, index: int) -> Operand:
        if index >= len(self.item.operands):
            raise self.fail("an operand is missing")
        return self.item.operands[index]

    def count(self, *allowed: int) -> int:
        """Check the number of operands."""
        if len(self.item.operands) not in allowed:
            raise self.fail(f"{len(self.item.operands)} operands, expected {' or '.join(map(str, allowed))}")
        return len(self.item.operands)

    def address_of(self, symbol: Symbol) -> Value:
        """The address of a variable in its own space, 64 bits."""
        variable = symbol.target
        if variable is None:
            raise self.fail(f"unknown name {symbol.name}")
        if variable.space in ("global", "const"):
            if variable.name not in self.module_index:
                raise self.fail(f"variable {variable.name} is not defined in this module")
            base = (self.once("variables") + 8 * self.module_index[variable.name]).load("i64", ", !invariant.load !1")
            return base + symbol.offset
        if variable not in self.offsets:
            raise self.fail(f"variable {variable.name} has no place")
        offset = self.offsets[variable] + symbol.offset
        if variable.space == "param":  # no instruction converts it later, so the window goes in at once
            offset += layout.LOCAL_WINDOW if self.in_frame(variable) else layout.PARAM_WINDOW
        return self.c.const("i64", offset)

    def once(self, name: str) -> Value:
        """A field of the grid that never changes while it runs."""
        return self.c.get(self.grid, GRID, name, ", !invariant.load !1")

    # -- special registers -------------------------------------------------------------------------------------------

    def special(self, name: str) -> Value:
        c = self.c
        text = name[1:]
        head, _, axis = text.partition(".")
        if axis == "w":
            return c.const("i32", 0)
        if head == "tid":
            return c.get(self.lane, LANE, f"tid_{axis}", ", !invariant.load !1")
        if head in ("ntid", "nctaid"):
            return self.once(f"{head}_{axis}")
        if head == "nclusterid":
            return self.once(f"nctaid_{axis}")
        if head in ("ctaid", "clusterid"):
            # fixed for as long as code that is compiled together can see: another CTA comes in by a call
            return c.get(self.cta, CTA, axis, ", !invariant.load !1")
        if head in ("cluster_ctaid", "cluster_ctarank", "is_explicit_cluster"):
            return c.const("i32", 0)
        if head in ("cluster_nctaid", "cluster_nctarank"):
            return c.const("i32", 1)
        if text in ("laneid", "warpid"):
            return c.get(self.lane, LANE, text[:-2], ", !invariant.load !1")
        if text == "nwarpid":
            return self.once("warps")
        if text.startswith("lanemask_"):
            one = c.const("i32", 1) << c.get(self.lane, LANE, "lane", ", !invariant.load !1")
            below = one - 1
            return {"eq": one, "lt": below, "le": below | one, "ge": ~below, "gt": ~(below | one)}[text[-2:]]
        if text == "smid":
            return c.get(self.cta, CTA, "rank")
        if text == "nsmid":
            return self.once("total")
        if text == "gridid":
            return self.once("sequence")
        if text in ("dynamic_smem_size", "total_smem_size", "aggr_smem_size"):
            total = self.once("shared_bytes")
            return total - self.shared_bytes if text == "dynamic_smem_size" else total
        if text == "reserved_smem_offset_begin":
            return c.const("i32", 0)
        now = c.call("i64", "fabric_now", c.get(self.grid, GRID, "fabric"))
        return now >> 32 if text.endswith("_hi") else now & 0xFFFFFFFF if text.endswith(("_lo", "clock")) else now

    def values(self, count: int) -> Value:
        """Room for the values of an access, 8 bytes each."""
        name = f"%values.{count}"
        text = f"  {name} = alloca [{count} x i64]"
        if text not in self.c.entry:
            self.c.entry.append(text)
        return Value(self.c, "ptr", name)

    # -- leaving and coming back -------------------------------------------------------------------------------------

    def site(self, size: int = 0) -> int:
        self.sites.append(Site(self.item.line, size))
        return len(self.sites) - 1

    def leave(self, why: int | Value, live: int) -> None:
        """Save what is live, return ``why``, and go on here when the lane is called again."""
        c = self.c
        registers = [r for r in self.flat.registers if live >> r.index & 1 and r.index not in self.computed]
        name = f"resume.{len(self.resumes) + 1}"
        self.resumes.append(name)
        self.left.append(registers)
        for register in registers:
            self.frame_slot(register).store(self.read(register, register.bits).to(f"i{max(register.bits, 8)}"))
        c.put(self.lane, LANE, "state", len(self.resumes))
        c.ret(c.const("i32", why) if isinstance(why, int) else why)
        c.label(name)
        for register in registers:
            value = self.frame_slot(register).load(f"i{max(register.bits, 8)}").to(f"i{register.bits}")
            c.do(f"store {value}, ptr {self.slot(register)}")

    def frame_slot(self, register: Register) -> Value:
        if register.bits > 64:
            raise self.fail("a 128-bit register is live where the thread can be left, which is not emulated")
        return self.lane + Value(self.c, "i64", f"$SAVED_AT.{register.index}$")

    def frame_slots(self) -> tuple[dict[str, int], int]:
        """Where registers are saved, and the end of that: two that are never saved together share a place. A lane
        that waits should touch little memory."""
        together: dict[Register, set[Register]] = {}
        for registers in self.left:
            for register in registers:
                together.setdefault(register, set()).update(registers)
        often = sorted(together, key=lambda r: (-r.bits, -sum(r in registers for registers in self.left)))
        places: dict[Register, int] = {}
        for register in often:
            size = max(register.bits // 8, 1)
            taken = [(places[o], places[o] + max(o.bits // 8, 1)) for o in together[register] if o in places]
            at = LANE.size
            while any(low < at + size and at < high for low, high in taken):
                at += size
            places[register] = at
        end = max((at + max(r.bits // 8, 1) for r, at in places.items()), default=LANE.size)
        return {str(register.index): at for register, at in places.items()}, end

    def live_after(self) -> int:
        """What must be kept while an instruction waits: all that is live after it but its own results."""
        from .flow import uses_and_defs

        plain = Instruction(self.item.op, self.item.mods, self.item.operands, self.item.line)
        return self.live[self.at + 1] & ~uses_and_defs(plain, self.flat.carry)[1]

    def fault(self, kind: int, site: int | None = None, address: Value | None = None) -> None:
        """Report a fault of this lane and return."""
        c = self.c
        site = self.site() if site is None else site
        where = address if address is not None else c.const("i64", 0)
        number, kind_value = c.const("i32", site), c.const("i32", kind)
        size = c.const("i32", self.sites[site].size)
        c.call("void", "fault", self.grid, kind_value, number, where, size)
        c.ret(c.const("i32", layout.FAULT))

    def require(self, condition: Value, kind: int, site: int | None = None, address: Value | None = None) -> None:
        """Go on if ``condition`` holds, else fault."""
        good, bad = self.c.fresh("good"), self.c.fresh("bad")
        self.c.branch(condition, good, bad, _COLD)
        self.c.label(bad)
        self.fault(kind, site, address)
        self.c.label(good)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def translate(self) -> Translation:
        c = self.c
        polling = self.polling_branches()
        self.compute_first(polling)
        for at, item in enumerate(self.flat.items):
            self.at = at
            if isinstance(item, Label):
                c.label(f"L.{self.flat.labels[item.name]}")
                continue
            if not c.open:
                c.label(c.fresh("unreached"))
            self.item = item
            if at in self.hoisted:
                continue
            if item.op in ("bra", "brx"):
                self.jump(item, polling)
                continue
            handler = _HANDLERS.get(item.op)
            if handler is None:
                raise self.fail(f"instruction {item.name} is not emulated")
            if item.guard is None:
                handler(self, item, Mods(self, item))
            else:
                run, skip = c.fresh("guarded"), c.fresh("skip")
                guard = self.read(item.guard, 1)
                yes, no = (skip, run) if item.guard_negated else (run, skip)
                c.branch(guard, yes, no)
                c.label(run)
                handler(self, item, Mods(self, item))
                c.label(skip)
        if c.open:
            c.ret(c.const("i32", layout.EXIT))
        if self.resumes:
            state = c.first("i32", "load i32, ptr %lane")
            cases = " ".join(f"i32 {n + 1}, label %{name}" for n, name in enumerate(self.resumes))
            c.enter = f"switch {state}, label %begin [{cases}]"
        places, saved = self.frame_slots()
        local_at = saved + -saved % 16
        c.lines = [
            _SAVED_AT.sub(lambda found: str(places[found[1]]), line).replace(_LOCAL_AT, str(local_at))
            for line in c.lines
        ]
        frame = local_at + self.local_bytes
        return Translation(
            c,
            self.flat,
            self.sites,
            frame + -frame % 64,
            self.local_bytes,
            self.shared_bytes,
            self.shared_align,
            self.param_bytes,
            [self.offsets[p] for p in self.kernel.params],
            max((m.bit_count() for m in self.live), default=0),
        )

    def compute_first(self, polling: set[int]) -> None:
        """Compute what never changes whenever the thread is called, instead of saving it where the thread is left."""
        known = constants(self.flat, self.kernel.params)
        kept = 0
        leaves = _LEAVES | (_ACCESSES if self.adversarial else frozenset())
        for at, item in enumerate(self.flat.items):
            if isinstance(item, Instruction) and (at in polling or item.op in leaves):
                kept |= self.live[at] | self.live[at + 1]
        wanted = {index for index in known if kept >> index & 1}
        for index in reversed(known):
            if index in wanted:
                wanted |= {r.index for o in known[index].operands[1:] for r in registers_of(o)}
        c, lines = self.c, self.c.lines
        c.lines = []
        for index, item in known.items():
            if index in wanted:
                self.item = item
                _HANDLERS[item.op](self, item, Mods(self, item))
        c.entry += c.lines
        c.lines = lines
        self.computed = wanted
        hoisted = {id(known[index]) for index in wanted}
        self.hoisted = {at for at, item in enumerate(self.flat.items) if id(item) in hoisted}

    def polling_branches(self) -> set[int]:
        """The branches backwards of loops that look at memory others write: those yield on every way back."""
        watching = [
            i
            for i, item in enumerate(self.flat.items)
            if isinstance(item, Instruction)
            and (
                item.op in ("atom", "red", "nanosleep")
                or (item.op == "ld" and {"volatile", "relaxed", "acquire", "mmio"} & set(item.mods))
                or (item.op == "mov" and any(isinstance(o, Special) and "clock" in o.name for o in item.operands))
                or (item.op == "mov" and any(isinstance(o, Special) and "timer" in o.name for o in item.operands))
            )
        ]
        found = set()
        for i, item in enumerate(self.flat.items):
            if isinstance(item, Instruction) and item.op in ("bra", "brx"):
                for target in self.targets(item):
                    if target <= i and any(target <= w <= i for w in watching):
                        found.add(i)
        return found

    def targets(self, item: Instruction) -> list[int]:
        names = [o.name for o in item.operands if isinstance(o, Symbol)]
        if item.op == "brx":
            names = [t for n in names for t in self.flat.tables.get(n, ())]
        missing = [n for n in names if n not in self.flat.labels]
        if missing or not names:
            self.item = item
            raise self.fail(f"no label {missing[0] if missing else ''}")
        return [self.flat.labels[n] for n in names]

    def jump(self, item: Instruction, polling: set[int]) -> None:
        c = self.c
        mods = Mods(self, item)
        mods.take("uni")
        if item.op == "brx":
            mods.take("idx")
        mods.done()
        targets = self.targets(item)
        skip = c.fresh("stay")
        if item.guard is not None:
            guard = self.read(item.guard, 1)
            take = c.fresh("taken")
            yes, no = (skip, take) if item.guard_negated else (take, skip)
            c.branch(guard, yes, no)
            c.label(take)
        if item.op == "bra":
            self.go(targets[0], self.at in polling)
        else:
            index = self.read(self.operand(0), 32)
            arms = [c.fresh("arm") for _ in targets]
            lost = c.fresh("lost")
            cases = " ".join(f"i32 {n}, label %{arm}" for n, arm in enumerate(arms))
            c.do(f"switch {index}, label %{lost} [{cases}]")
            c.open = False
            c.label(lost)
            self.fault(layout.F_TRAP)
            for target, arm in zip(targets, arms, strict=True):
                c.label(arm)
                self.go(target, self.at in polling)
        if item.guard is not None:
            c.label(skip)

    def go(self, target: int, polls: bool) -> None:
        """Jump to a place; on the way back of a loop, let the others run now and then."""
        c = self.c
        if target <= self.at:
            if polls:
                why = self.moved.get().select(c.const("i32", layout.LOOKED), layout.SPIN)
                self.leave(why, self.live[target])
            else:
                fuel = self.fuel.get() - 1
                self.fuel.set(fuel)
                empty, on = c.fresh("empty"), c.fresh("on")
                c.branch(fuel.ne(0), on, empty, _COLD)
                c.label(empty)
                self.leave(layout.YIELD, self.live[target])
                c.label(on)
        c.jump(f"L.{target}")


def module_variables(source: Source) -> list[str]:
    """The variables that need an address of the device, in the order of their numbers."""
    return [name for name, v in source.variables.items() if v.space in ("global", "const") and not v.external]


@instruction("ret", "exit")
def _exit(t: Translator, item: Instruction, mods: Mods) -> None:
    mods.take("uni")
    mods.done()
    t.c.ret(t.c.const("i32", layout.EXIT))


@instruction("trap", "brkpt")
def _trap(t: Translator, item: Instruction, mods: Mods) -> None:
    mods.done()
    t.fault(layout.F_TRAP)


@instruction("pragma", "pmevent")
def _nothing(t: Translator, item: Instruction, mods: Mods) -> None:
    """Instructions that change nothing that can be seen."""


def translate(source: Source, kernel: Function, *, adversarial: bool = False) -> Translation:
    """Translate one kernel.

    Raises:
        PtxError: an instruction, type or modifier is not emulated.
    """
    from . import arithmetic, bits, compare, convert, memory, printing, warp  # noqa: F401  (they register instructions)

    return Translator(source, kernel, adversarial=adversarial).translate()
