"""Loads, stores, atomics and fences.

Every access is checked. For device memory each access site remembers the range it hit last (`layout.CACHE`); only
another range costs
a search of the table. A vector access is cut into its elements, each whole by itself: 16 bytes are four words to
anybody else.

With the adversarial fabric, accesses of device memory go through it (`runtime`): stores may linger, loads see the
CTA's own ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import layout
from .ir import Value
from .layout import CACHE, CTA, ENTRY
from .syntax import TYPES, Address, Instruction, Operand, Symbol, Vector
from .translate import _COLD, Mods, Translator, instruction

_SPACES = ("global", "shared", "shared::cta", "local", "const", "param", "param::entry", "param::func")
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "mmio", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
MULTIMEM = 4  # a need, beside READ and WRITE


@dataclass
class Access:
    """What the modifiers of an access say."""

    space: str  # "" is generic
    order: str  # "" is weak
    scope: str
    kind: str
    count: int  # elements of a vector

    @property
    def unit(self) -> int:
        return TYPES[self.kind][0] // 8

    @property
    def size(self) -> int:
        return self.unit * self.count

    @property
    def far(self) -> bool:
        """Whether a fence or release of this scope reaches beyond the CTA."""
        return self.scope in ("gpu", "sys", "cluster")


def _access(t: Translator, mods: Mods, *, default_order: str = "") -> Access:
    order = mods.one_of(_ORDERS) or default_order
    scope = mods.one_of(_SCOPES) or ("gpu" if default_order else "")
    space = (mods.one_of(_SPACES) or "").split("::")[0]
    hints = [m for m in mods.rest if m in _HINTS or m.startswith(("L1::", "L2::"))]
    for hint in hints:
        mods.take(hint)
    count = int((mods.one_of(("v2", "v4", "v8")) or "v1")[1:])
    kind = mods.type()
    if kind == "pred":
        raise t.fail("predicates are not stored in memory")
    if order in ("relaxed", "acquire", "release") and not scope:
        raise t.fail(f".{order} needs a scope")
    access = Access(space, "" if order == "weak" else order, scope, kind, count)
    if access.size > 32:
        raise t.fail(f"an access of {access.size} bytes is too wide")
    return access


def _address(t: Translator, operand: Operand) -> Value:
    """The 64-bit value of [base + offset], in the terms of the instruction's own space."""
    if not isinstance(operand, Address):
        raise t.fail("an address is expected")
    base = t.address_of(operand.base) if isinstance(operand.base, Symbol) else t.read(operand.base, 64)
    return base + operand.offset if operand.offset else base


class Place:
    """A checked address: a host pointer, or (adversarial, device memory) an address with its table entry."""

    def __init__(self, pointer: Value, address: Value | None = None, entry: Value | None = None) -> None:
        self.pointer = pointer
        self.address = address
        self.entry = entry


def locate(t: Translator, operand: Operand, access: Access, need: int) -> Place:
    """Check an access and find its memory."""
    base = operand.base if isinstance(operand, Address) else None
    symbol = base if isinstance(base, Symbol) else None
    space = access.space
    if symbol is not None and symbol.target is not None and space in ("", "shared", "local", "param"):
        known = _static_place(t, symbol, access)
        if known is not None:
            return Place(known)
    address = _address(t, operand)
    site = t.site(access.size)
    if space == "param":  # an address of a parameter carries its window
        if not t.frame_addresses:
            offset, total = address - layout.PARAM_WINDOW, t.c.const("i64", t.param_bytes)
            return Place(_bounded(t, t.once("params"), total, offset, access, site, layout.F_PARAM))
        space = ""
    if space == "shared":
        total = t.once("shared_bytes").to("i64")
        return Place(_bounded(t, t.cta + t.once("shared_at").to("i64"), total, address, access, site, layout.F_SHARED))
    if space == "local":
        total = t.c.const("i64", t.local_bytes)
        return Place(_bounded(t, t.local_base(), total, address, access, site, layout.F_LOCAL))
    if t.adversarial:
        return _watched(t, address, access, site, need, generic=space == "")
    if space in ("global", "const"):
        return Place(_checked(t, address, access, site, need))
    return Place(_generic(t, address, access, site, need))


def _static_place(t: Translator, symbol: Symbol, access: Access) -> Value | None:
    """A variable named in the address itself: checked here and now."""
    variable = symbol.target
    assert variable is not None
    assert isinstance(t.item, Instruction)
    operand = next(o for o in t.item.operands if isinstance(o, Address))
    at = symbol.offset + operand.offset
    if variable.external or variable.space in ("global", "const"):
        return None
    if access.space not in ("", variable.space):
        raise t.fail(f"{variable.name} is {variable.space}, and the access is {access.space}")
    if at < 0 or at + access.size > variable.size or (t.offsets[variable] + at) % access.unit:
        raise t.fail(
            f"{access.size} bytes at {at} are not inside {variable.name} ({variable.size} bytes), or not aligned"
        )
    offset = t.c.const("i64", t.offsets[variable] + at)
    if variable.space == "shared":
        return t.cta + t.once("shared_at").to("i64") + offset
    if t.in_frame(variable):
        return t.local_base() + offset
    return t.once("params") + offset


def _bounded(t: Translator, base: Value, total: Value, at: Value, access: Access, site: int, kind: int) -> Value:
    """A place in shared or local memory."""
    inside = at.lt(total) & (at + access.size).le(total)
    t.require(inside, kind, site, at)
    if access.size > 1:
        t.require((at & (access.size - 1)).eq(0), layout.F_ALIGN, site, at)
    return base + at


def _remembered(t: Translator, address: Value, access: Access, site: int) -> tuple[Value, Value]:
    """What the site remembers, and whether the access is inside it."""
    c = t.c
    cache = t.once("caches") + CACHE.size * site
    inside = (address - c.get(cache, CACHE, "base")).lt(c.get(cache, CACHE, "span"))
    if access.size > 1:
        inside = inside & (address & (access.size - 1)).eq(0)
    return cache, inside


def _checked(t: Translator, address: Value, access: Access, site: int, need: int) -> Value:
    """Device memory: the site's remembered range, else a search."""
    c = t.c
    _, inside = _remembered(t, address, access, site)
    good, slow = c.fresh("good"), c.fresh("slow")
    c.branch(inside, good, slow, _COLD)
    c.label(slow)
    _admit(t, address, access, site, need)
    c.label(good)
    return address.to("ptr")


def _entry(t: Translator, address: Value, access: Access, site: int, need: int) -> Value:
    """The same for whoever wants the entry."""
    c = t.c
    cache, inside = _remembered(t, address, access, site)
    with c.when(~inside):
        _admit(t, address, access, site, need)  # remembers it
    return c.get(cache, CACHE, "entry")


def _admit(t: Translator, address: Value, access: Access, site: int, need: int) -> Value:
    """Search the table; the entry, or a fault."""
    c = t.c
    numbers = (c.const("i32", n) for n in (site, access.size, need))
    entry = c.call("ptr", "admit", t.grid, address, *numbers)
    _fault_if_null(t, entry)
    return entry


def _fault_if_null(t: Translator, pointer: Value) -> None:
    c = t.c
    on, bad = c.fresh("on"), c.fresh("bad")
    c.branch(pointer.ne(0), on, bad, _COLD)
    c.label(bad)
    c.ret(c.const("i32", layout.FAULT))
    c.label(on)


def _generic(t: Translator, address: Value, access: Access, site: int, need: int) -> Value:
    """An address of any space: the top byte tells which."""
    c = t.c
    result = c.variable("ptr")
    with c.choose((address >> 56).eq(0)) as (device, window):
        with device:
            result.set(_checked(t, address, access, site, need))
        with window:
            result.set(window_pointer(t, address, access, site))
    return result.get()


def window_pointer(t: Translator, address: Value, access: Access, site: int) -> Value:
    """Memory behind a generic address that has a window."""
    c = t.c
    numbers = (c.const("i32", n) for n in (site, access.size, t.local_bytes))
    pointer = c.call("ptr", "window", t.grid, t.cta, t.local_base(), address, *numbers)
    _fault_if_null(t, pointer)
    return pointer


def _watched(t: Translator, address: Value, access: Access, site: int, need: int, *, generic: bool) -> Place:
    """Adversarial: the lane may lose its turn here; then the entry decides how the access travels (null: memory of
    the thread's own)."""
    c = t.c
    _may_lose_turn(t)
    address = _address(t, next(o for o in t.item.operands if isinstance(o, Address)))
    if not generic:
        return Place(address.to("ptr"), address, _entry(t, address, access, site, need))
    entry, pointer = c.variable("ptr"), c.variable("ptr")
    with c.choose((address >> 56).eq(0)) as (device, window):
        with device:
            entry.set(_entry(t, address, access, site, need))
            pointer.set(address.to("ptr"))
        with window:
            entry.set(c.const("ptr", 0))
            pointer.set(window_pointer(t, address, access, site))
    return Place(pointer.get(), address, entry.get())


def _may_lose_turn(t: Translator) -> None:
    """Adversarial: before an access the lane may be left, by a draw."""
    c = t.c
    lose, keep = c.fresh("lose"), c.fresh("keep")
    c.branch(c.call("i1", "preempt", t.grid), lose, keep)
    c.label(lose)
    t.leave(t.moved.get().select(c.const("i32", layout.YIELD), layout.SPIN), t.live[t.at])
    c.label(keep)


def _elements(t: Translator, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise t.fail(f"{len(items)} elements, expected {count}")
    return items


def _own(t: Translator, place: Place, access: Access) -> Value:
    """Whether the CTA may see stores of its own that nobody else does, where it loads now."""
    c, entry = t.c, place.entry
    assert entry is not None
    own = c.variable("i1", 0)
    with c.when(entry.ne(0)):
        remote = c.get(entry, ENTRY, "kind").eq(layout.REMOTE)
        with c.when(remote | c.get(t.cta, CTA, "buffered").ne(0)):
            unit, count = c.const("i32", access.unit), c.const("i32", access.count)
            own.set(c.call("i1", "fabric_look", t.grid, t.cta, entry, place.pointer, unit, count))
    return own.get()


@instruction("ld", "ldu")
def _load(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2, 3)
    access = _access(t, mods)
    mods.done()
    c = t.c
    if access.order in ("release", "acq_rel"):
        raise t.fail(f"a load is not .{access.order}")
    place = locate(t, t.operand(1), access, layout.READ)
    bits = 8 * access.unit
    atomic = access.order != "" and bits <= 64
    order = "acquire" if access.order == "acquire" else "monotonic"
    base = t.operand(1).base if isinstance(t.operand(1), Address) else None  # type: ignore[union-attr]
    given = isinstance(base, Symbol) and base.target in t.kernel.params
    how = ", !invariant.load !1" if given else ""
    own = _own(t, place, access) if place.entry is not None and bits <= 64 else None

    def plain(i: int) -> Value:
        at = place.pointer + i * access.unit
        if atomic:
            volatile = "volatile " if access.order in ("volatile", "mmio") else ""
            return c.op(f"i{bits}", f"load atomic {volatile}i{bits}, {at} {order}, align {access.unit}")
        return at.load(f"i{bits}", f", align {access.unit}{how}")

    if own is None:
        found = [plain(i) for i in range(access.count)]
    else:
        seen = [c.variable(f"i{bits}") for _ in range(access.count)]
        with c.choose(own) as (yes, no):
            with yes:
                for i in range(access.count):
                    at, size = place.pointer + i * access.unit, c.const("i32", access.unit)
                    seen[i].set(c.call("i64", "fabric_load", t.grid, t.cta, at, size).to(f"i{bits}"))
            with no:
                for i in range(access.count):
                    seen[i].set(plain(i))
        found = [variable.get() for variable in seen]
    for target, value in zip(_elements(t, t.operand(0), access.count), found, strict=True):
        t.write(target, value, signed=TYPES[access.kind][1] == "s")


@instruction("st")
def _store(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2, 3)
    access = _access(t, mods)
    mods.done()
    c = t.c
    if access.order in ("acquire", "acq_rel"):
        raise t.fail(f"a store is not .{access.order}")
    place = locate(t, t.operand(0), access, layout.WRITE)
    bits = 8 * access.unit
    values = [t.read(e, bits, real=access.kind) for e in _elements(t, t.operand(1), access.count)]
    if access.order == "release" and t.adversarial and access.far:
        c.call("void", "fabric_fence", t.grid, t.cta)
    order = "release" if access.order == "release" else "monotonic"
    if place.entry is not None and bits <= 64:
        kept = t.values(access.count)
        for i, value in enumerate(values):
            (kept + 8 * i).store(value.to("i64"))
        numbers = c.const("i32", access.unit), c.const("i32", access.count)
        c.call("void", "fabric_store", t.grid, t.cta, place.entry, place.pointer, kept, *numbers)
    else:
        for i, value in enumerate(values):
            at = place.pointer + i * access.unit
            if access.order and bits <= 64:
                c.do(f"store atomic {value}, {at} {order}, align {access.unit}")
            else:
                c.do(f"store {value}, {at}, align {access.unit}")
    if access.space in ("", "global"):
        t.moved.set(1)


@instruction("multimem")
def _multimem(t: Translator, item: Instruction, mods: Mods) -> None:
    """multimem.st: every element goes to every member, each copy by itself."""
    t.count(2)
    if not mods.take("st"):
        raise t.fail("of multimem only multimem.st is emulated")
    access = _access(t, mods)
    mods.done()
    c = t.c
    if access.space not in ("", "global") or access.order not in ("", "relaxed", "release"):
        raise t.fail("multimem.st is weak, relaxed or release, on global memory")
    if access.count > 1 and TYPES[access.kind][1] in "bus":
        raise t.fail("multimem.st of integers takes no vector")
    if access.unit < 4 or access.size > 16:
        raise t.fail("multimem.st takes 4 to 16 bytes, in elements of 4 or 8")
    if t.adversarial:
        _may_lose_turn(t)
    address = _address(t, t.operand(0))
    entry = _admit(t, address, access, t.site(access.size), layout.WRITE | MULTIMEM)
    if access.order == "release":
        c.do("fence release")
        if t.adversarial and access.far:
            c.call("void", "fabric_fence", t.grid, t.cta)
    send = "fabric_multicast" if t.adversarial else "multicast"
    bits = 8 * access.unit
    for i, element in enumerate(_elements(t, t.operand(1), access.count)):
        value = t.read(element, bits, real=access.kind).to("i64")
        c.call("void", send, t.grid, entry, address + i * access.unit, value, c.const("i32", access.unit))
    t.moved.set(1)


_ATOMIC = {
    "add": "add",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "exch": "xchg",
    "inc": "uinc_wrap",
    "dec": "udec_wrap",
    "min": "umin",
    "max": "umax",
}
_FLOAT_TYPES = {"f32": "float", "f64": "double", "f16": "half", "f16x2": "<2 x half>"}


@instruction("atom", "red")
def _atomic(t: Translator, item: Instruction, mods: Mods) -> None:
    returns = item.op == "atom"
    op = mods.one_of(("cas", *_ATOMIC))
    mods.take("noftz")
    access = _access(t, mods, default_order="relaxed")
    mods.done()
    c = t.c
    if op is None:
        raise t.fail("the operation is missing")
    t.count(2 + returns + (op == "cas"))
    if access.space not in ("", "global", "shared") or access.unit not in (2, 4, 8) or access.count > 1:
        raise t.fail(f"{item.name} is not emulated")
    at = 1 if returns else 0
    place = locate(t, t.operand(at), access, layout.READ | layout.WRITE)
    bits = 8 * access.unit
    value = t.read(t.operand(at + 1), bits, real=access.kind)
    if place.entry is not None:
        release = c.const("i32", access.order in ("release", "acq_rel") and access.far)
        c.call("void", "fabric_atomic", t.grid, t.cta, place.entry, place.pointer, c.const("i32", access.unit), release)
    order = {"relaxed": "monotonic", "volatile": "monotonic"}.get(access.order, access.order)
    letter = TYPES[access.kind][1]
    changed = c.const("i1", 1)
    if op == "cas":
        new = t.read(t.operand(at + 2), bits)
        failed = "acquire" if order in ("acquire", "acq_rel") else "monotonic"
        pair = c.op("i1", f"cmpxchg {place.pointer}, {value}, {new} {order} {failed}, align {access.unit}")
        old = c.op(value.type, f"extractvalue {{ {value.type}, i1 }} {pair.name}, 0")
        changed = old.eq(value) & value.ne(new)
    elif letter in ("f", "f16x2"):
        type_ = _FLOAT_TYPES[access.kind]
        if op not in ("add", "exch"):
            raise t.fail(f"{item.name} is not emulated")
        number = value.cast(type_)
        how = "fadd" if op == "add" else "xchg"
        if how == "xchg":
            old = c.op(value.type, f"atomicrmw xchg {place.pointer}, {value} {order}, align {access.unit}")
        else:
            was = c.op(type_, f"atomicrmw fadd {place.pointer}, {number} {order}, align {access.unit}")
            old = c.op(value.type, f"bitcast {was} to {value.type}")
    elif letter in "bus":
        how = _ATOMIC[op]
        if op in ("min", "max") and letter == "s":
            how = op
        old = c.op(value.type, f"atomicrmw {how} {place.pointer}, {value} {order}, align {access.unit}")
        if op in ("and", "or", "xor", "add"):
            changed = old.op(op, value).ne(old)
        elif op == "exch":
            changed = old.ne(value)
        elif op in ("min", "max"):
            changed = value.cmp(("s" if letter == "s" else "u") + ("lt" if op == "min" else "gt"), old)
    else:
        raise t.fail(f"{item.name} is not emulated")
    t.moved.set(t.moved.get() | changed)
    if returns:
        t.write(t.operand(0), old, signed=letter == "s")


@instruction("fence", "membar")
def _fence(t: Translator, item: Instruction, mods: Mods) -> None:
    if mods.take("proxy"):
        if not mods.take("alias"):
            raise t.fail("of proxy fences only fence.proxy.alias is emulated")
        mods.done()
        t.c.do("fence seq_cst")
        return
    kind = mods.one_of(("sc", "acq_rel", "acquire", "release")) or "acq_rel"
    level = mods.one_of(("cta", "cluster", "gpu", "sys", "gl"))
    mods.done()
    t.count(0)
    if level is None:
        raise t.fail("a fence needs a scope")
    if item.op == "membar":
        kind = "sc"
    if level == "cta":
        t.c.do('fence syncscope("singlethread") seq_cst')  # a CTA's lanes share one host thread
        return
    t.c.do(f"fence {'seq_cst' if kind == 'sc' else kind}")
    if t.adversarial and kind != "acquire":
        t.c.call("void", "fabric_fence", t.grid, t.cta)


@instruction("prefetch", "prefetchu", "discard", "applypriority")
def _prefetch(t: Translator, item: Instruction, mods: Mods) -> None:
    """Hints: nothing that can be seen."""


@instruction("createpolicy")
def _policy(t: Translator, item: Instruction, mods: Mods) -> None:
    t.write(t.operand(0), t.c.const("i64", 0))
