"""PTX text to `syntax`: one method for each kind of statement.

Names are resolved here: braces open scopes for registers, variables and labels (inline assembly relies on it).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ...errors import PtxError
from .lexer import Token, tokens
from .syntax import (
    TYPES,
    Address,
    Function,
    Group,
    Imm,
    Instruction,
    Label,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Source,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = ["parse"]

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SPACES = {".global": "global", ".const": "const", ".shared": "shared", ".local": "local", ".param": "param"}
_TO_END_OF_LINE = {".version", ".target", ".address_size", ".file", ".loc"}
_TUNING = {
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".maxnctapersm",
    ".maxnreg",
    ".pragma",
    ".noreturn",
    ".abi_preserve",
}
_DIMENSION = ["tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"]
SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in _DIMENSION for axis in "xyzw"]
    + [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%lanemask_eq",
        "%lanemask_le",
        "%lanemask_lt",
        "%lanemask_ge",
        "%lanemask_gt",
        "%clock",
        "%clock_hi",
        "%clock64",
        "%globaltimer",
        "%globaltimer_lo",
        "%globaltimer_hi",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%aggr_smem_size",
        "%is_explicit_cluster",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%reserved_smem_offset_begin",
    ]
)


@dataclass
class _Scope:
    """What one pair of braces declares. ``ranges`` are the %r<n> declarations: prefix -> (count, bits)."""

    parent: _Scope | None
    label_prefix: str = ""
    names: dict[str, Register | Variable] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens = tokens(text, self.lines)
        self.at = 0
        self.source = Source(self.lines, "", "", {}, {})
        self.function: Function | None = None
        self.scope: _Scope | None = None
        self.scopes = 0

    # -- tokens ------------------------------------------------------------------------------------------------

    def fail(self, message: str, line: int | None = None) -> PtxError:
        line = self.tokens[self.at].line if line is None else line
        return PtxError(message, line=line, text=self.lines[line - 1])

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def take(self, text: str) -> bool:
        if self.token.text == text and self.token.kind != "end":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.fail(f"expected {text!r}, found {self.token.text!r}")

    def word(self, what: str) -> str:
        if self.token.kind != "word":
            raise self.fail(f"expected {what}, found {self.token.text!r}")
        return self.next().text

    def integer(self, what: str) -> int:
        value = self.constant()
        if not isinstance(value, Imm) or value.kind != "int":
            raise self.fail(f"expected {what} as an integer")
        return value.value

    def rest_of_line(self) -> str:
        line = self.token.line
        found = []
        while self.token.line == line and self.token.kind != "end":
            found.append(self.next().text)
        return " ".join(found)

    def skip_braces(self) -> None:
        line = self.token.line
        depth = 0
        while True:
            token = self.next()
            if token.kind == "end":
                raise self.fail("a brace is not closed", line)
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return

    # -- module ------------------------------------------------------------------------------------------------

    def module(self) -> Source:
        while self.token.kind != "end":
            self.module_statement()
        if not self.source.version:
            raise self.fail("no .version: this is not PTX", 1)
        return self.source

    def module_statement(self) -> None:
        token = self.token
        linkage = set()
        while self.token.text in _LINKAGE:
            linkage.add(self.next().text)
        text = self.token.text
        if text in _TO_END_OF_LINE:
            self.next()
            rest = self.rest_of_line()
            if text == ".version":
                self.source.version = rest
            elif text == ".target":
                self.source.target = rest
            elif text == ".address_size" and rest != "64":
                raise self.fail(f"only 64-bit addresses are emulated, not {rest}", token.line)
        elif text in (".entry", ".func"):
            self.function_header(".extern" in linkage)
        elif text in (".global", ".const", ".shared"):
            for variable in self.variable_declaration():
                variable.external = ".extern" in linkage
                known = self.source.variables.get(variable.name)
                if known is None or known.external:
                    self.source.variables[variable.name] = variable
                elif not variable.external:
                    raise self.fail(f"{variable.name} is defined twice", variable.line)
        elif text == ".section":
            self.next()
            while self.token.text != "{" and self.token.kind != "end":
                self.next()
            self.skip_braces()
        elif text == ".pragma":
            self.pragma()
        elif text == ";":
            self.next()
        else:
            raise self.fail(f"unknown statement {text!r}")

    def pragma(self) -> None:
        self.next()
        while self.token.kind == "string" or self.token.text == ",":
            self.next()
        self.expect(";")

    # -- declarations ------------------------------------------------------------------------------------------

    def type_of(self, text: str) -> tuple[int, str]:
        known = TYPES.get(text[1:])
        if known is None:
            raise self.fail(f"unknown type {text!r}")
        return known

    def variable_declaration(self) -> list[Variable]:
        """``.space .align n .v2 .type name[n] = init, ...;``"""
        space = _SPACES[self.next().text]
        found = [self.variable(space)]
        # further names repeat neither space nor type
        while self.take(","):
            found.append(self.named_variable(space, found[0].type, found[0].align, found[0].size, self.token.line))
        self.expect(";")
        return found

    def variable(self, space: str) -> Variable:
        align, width, kind, line = 0, 1, "", self.token.line
        while self.token.kind == "directive":
            text = self.next().text
            if text == ".align":
                align = self.integer("an alignment")
                if align <= 0 or align & (align - 1) or align > 1 << 20:
                    raise self.fail(f"alignment {align} is not a power of two")
            elif text in (".v2", ".v4"):
                width = int(text[2:])
            elif text == ".ptr" or text in (".global", ".const", ".shared", ".local", ".generic", ".managed"):
                if text == ".managed":
                    raise self.fail("managed variables are not emulated")
            else:
                self.at -= 1
                self.type_of(text)
                self.at += 1
                if kind:
                    raise self.fail(f"two types: {kind} and {text}")
                kind = text[1:]
        if not kind or kind == "pred":
            raise self.fail("a variable needs a type of its own size")
        size = max(TYPES[kind][0] // 8, 1) * width
        return self.named_variable(space, kind, align or size, size, line)

    def named_variable(self, space: str, kind: str, align: int, size: int, line: int) -> Variable:
        name = self.word("a variable's name")
        count = 1
        open_ended = False
        while self.take("["):
            if self.take("]"):
                open_ended = True
                continue
            count *= self.integer("a number of elements")
            self.expect("]")
        if count < 0 or count * size > 1 << 32:
            raise self.fail(f"{count} elements of {size} bytes are too many")
        init = None
        if self.take("="):
            init = self.initialiser(0)
            count = max(count, len(init)) if open_ended else count
            if len(init) > count * size // max(TYPES[kind][0] // 8, 1):
                raise self.fail(f"{len(init)} initial values for {count} elements")
        elif open_ended:
            count = 0
        return Variable(name, space, count * size, align, kind, init, line=line)

    def initialiser(self, depth: int) -> list[Imm | Symbol]:
        if depth > 8:
            raise self.fail("braces are nested too deep")
        if not self.take("{"):
            return [self.constant()]
        values: list[Imm | Symbol] = []
        while not self.take("}"):
            values += self.initialiser(depth + 1)
            if not self.take(","):
                self.expect("}")
                break
        return values

    def constant(self) -> Imm | Symbol:
        sign = 1
        while self.token.text in "+-" and self.token.kind == "punct":
            sign = -sign if self.next().text == "-" else sign
        token = self.next()
        if token.kind == "number":
            return self.number(token.text, sign)
        if token.kind != "word":
            raise self.fail(f"expected a constant, found {token.text!r}", token.line)
        if token.text == "generic" and self.take("("):
            inner = self.constant()
            self.expect(")")
            if not isinstance(inner, Symbol):
                raise self.fail("generic() takes a variable", token.line)
            return Symbol(inner.name, inner.offset + self.offset())
        offset = self.offset()
        return Symbol(token.text, offset)

    def offset(self) -> int:
        """``+ n`` or ``- n`` after a name, or nothing; ``+ -n`` is what numba and nvcc write."""
        total = 0
        while self.token.kind == "punct" and self.token.text in "+-":
            sign = -1 if self.next().text == "-" else 1
            while self.token.kind == "punct" and self.token.text in "+-":
                sign *= -1 if self.next().text == "-" else 1
            if self.token.kind != "number":
                raise self.fail(f"expected a number, found {self.token.text!r}")
            value = self.number(self.next().text, sign)
            if value.kind != "int":
                raise self.fail("an offset is an integer")
            total += value.value
        return total

    def number(self, text: str, sign: int = 1) -> Imm:
        head = text[:2].lower()
        if head == "0f":
            return Imm(int(text[2:], 16) ^ (0x80000000 if sign < 0 else 0), "f32")
        if head == "0d":
            return Imm(int(text[2:], 16) ^ (1 << 63 if sign < 0 else 0), "f64")
        text = text.rstrip("U") if head != "0x" else text[:-1] if text.endswith("U") else text
        if head == "0x":
            return Imm(sign * int(text, 16))
        if head == "0b":
            return Imm(sign * int(text[2:], 2))
        if "." in text or "e" in text or "E" in text:
            return Imm(int.from_bytes(struct.pack("<d", sign * float(text)), "little"), "real")
        if len(text) > 1 and text[0] == "0":
            if set(text) & set("89"):
                raise self.fail(f"{text} is no octal number")
            return Imm(sign * int(text, 8))
        if len(text) > 40:
            raise self.fail(f"{text} is too large")
        return Imm(sign * int(text))

    # -- functions ---------------------------------------------------------------------------------------------

    def function_header(self, external: bool) -> None:
        line = self.token.line
        is_kernel = self.next().text == ".entry"
        results: list[Variable] = []
        if not is_kernel and self.token.text == "(":
            results = self.parameters()
        name = self.word("a function's name")
        params = self.parameters() if self.token.text == "(" else []
        function = Function(name, is_kernel, params, results, line)
        while self.token.text in _TUNING:
            self.tuning(function)
        old = self.source.functions.get(name)
        if self.take(";"):
            if old is None:
                self.source.functions[name] = function
            return
        if external:
            raise self.fail(f"{name} is external, and has a body")
        if old is not None and old.body is not None:
            raise self.fail(f"{name} is defined twice", line)
        self.source.functions[name] = function
        self.body(function)

    def tuning(self, function: Function) -> None:
        text = self.next().text
        if text == ".pragma":
            self.at -= 1
            self.pragma()
            return
        if text == ".noreturn":
            return
        product = 1
        while self.token.kind == "number":
            product *= self.integer("a number")
            if not self.take(","):
                break
        if text in (".maxntid", ".reqntid"):
            function.max_threads = min(product, 1024)

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found: list[Variable] = []
        while not self.take(")"):
            if self.token.text != ".param":
                raise self.fail(f"expected .param, found {self.token.text!r} (register parameters are not emulated)")
            self.next()
            found.append(self.variable("param"))
            if not self.take(","):
                self.expect(")")
                break
        return found

    def body(self, function: Function) -> None:
        self.function = function
        self.expect("{")
        self.scope = _Scope(None)
        self.scopes = 0
        for variable in (*function.params, *function.results):
            self.scope.names[variable.name] = variable
        body: list[Instruction | Label] = []
        function.body = body
        pending: list[tuple[int, _Scope]] = []  # instructions whose labels are resolved once all are known
        while self.scope is not None:
            token = self.token
            if token.kind == "end":
                raise self.fail(f"function {function.name} is not closed", function.line)
            if self.take("{"):
                self.scopes += 1
                self.scope = _Scope(self.scope, f"{self.scopes}.")
            elif self.take("}"):
                self.scope = self.scope.parent
            elif self.take(";"):
                pass
            elif token.kind == "directive":
                self.local_directive(function)
            elif token.kind == "word" and self.tokens[self.at + 1].text == ":":
                self.label(body)
            else:
                pending.append((len(body), self.scope))
                body.append(self.instruction())
        for index, scope in pending:
            instruction = body[index]
            assert isinstance(instruction, Instruction)
            if instruction.op in ("bra", "brx"):
                instruction.operands = tuple(self.resolve_label(o, scope, instruction) for o in instruction.operands)
        self.function = None

    def label(self, body: list[Instruction | Label]) -> None:
        assert self.scope is not None
        assert self.function is not None
        token = self.next()
        self.next()
        name = self.scope.label_prefix + token.text
        if token.text in self.scope.labels:
            raise self.fail(f"label {token.text} is defined twice", token.line)
        self.scope.labels.add(token.text)
        if self.take(".branchtargets"):
            prefix = self.scope.label_prefix
            targets = [prefix + self.word("a label")]
            while self.take(","):
                targets.append(prefix + self.word("a label"))
            self.expect(";")
            self.function.tables[name] = targets
        elif self.token.text in (".callprototype", ".calltargets"):
            while not self.take(";"):
                if self.next().kind == "end":
                    raise self.fail("a prototype is not closed", token.line)
        else:
            body.append(Label(name, token.line))

    def resolve_label(self, operand: Operand, scope: _Scope, instruction: Instruction) -> Operand:
        if not isinstance(operand, Symbol) or operand.target is not None:
            return operand
        at: _Scope | None = scope
        while at is not None:
            if operand.name in at.labels:
                return Symbol(at.label_prefix + operand.name)
            at = at.parent
        raise self.fail(f"no label {operand.name}", instruction.line)

    def local_directive(self, function: Function) -> None:
        assert self.scope is not None
        text = self.token.text
        if text == ".reg":
            self.next()
            self.registers(function)
        elif text in (".local", ".shared", ".param", ".global", ".const"):
            for variable in self.variable_declaration():
                self.scope.names[variable.name] = variable
                function.variables.append(variable)
        elif text == ".loc":
            self.next()
            self.rest_of_line()
        elif text == ".pragma":
            self.pragma()
        else:
            raise self.fail(f"unknown directive {text!r}")

    def registers(self, function: Function) -> None:
        assert self.scope is not None
        text = self.next().text
        if text in (".v2", ".v4"):
            raise self.fail("vector registers are not emulated")
        self.at -= 1
        bits = self.type_of(text)[0]
        self.at += 1
        while True:
            name = self.word("a register's name")
            if self.take("<"):
                count = self.integer("a number of registers")
                self.expect(">")
                self.scope.ranges[name] = (count, bits)
            else:
                self.scope.names[name] = self.new_register(function, name, bits)
            if not self.take(","):
                break
        self.expect(";")

    def new_register(self, function: Function, name: str, bits: int) -> Register:
        register = Register(name, bits, len(function.registers))
        function.registers.append(register)
        return register

    # -- instructions ------------------------------------------------------------------------------------------

    def instruction(self) -> Instruction:
        guard: Register | None = None
        negated = False
        line = self.token.line
        if self.take("@"):
            negated = self.take("!")
            operand = self.name(self.word("a predicate"))
            if not isinstance(operand, Register) or operand.bits != 1:
                raise self.fail("the guard of an instruction is a predicate")
            guard = operand
        op, *mods = self.word("an instruction").split(".")
        operands: list[Operand] = []
        if not self.take(";"):
            operands.append(self.operand())
            while self.take(","):
                operands.append(self.operand())
            self.expect(";")
        return Instruction(op, tuple(mods), tuple(operands), line, guard, negated)

    def operand(self) -> Operand:
        first = self.simple_operand()
        if self.take("|"):
            return Pair(first, self.simple_operand())
        return first

    def simple_operand(self) -> Operand:
        token = self.token
        if token.kind == "number" or (token.kind == "punct" and token.text in "+-"):
            return self.constant()
        if token.kind == "word":
            self.next()
            return self.name(token.text)
        if self.take("["):
            return self.address()
        if self.take("{"):
            return Vector(self.items("}"))
        if self.take("("):
            return Group(self.items(")"))
        if self.take("!"):
            return Not(self.name(self.word("a predicate")))
        raise self.fail(f"expected an operand, found {token.text!r}")

    def items(self, end: str) -> tuple[Operand, ...]:
        found: list[Operand] = []
        while not self.take(end):
            token = self.token
            if token.kind == "number" or (token.kind == "punct" and token.text in "+-"):
                found.append(self.constant())
            else:
                found.append(self.name(self.word("a name")))
            if not self.take(","):
                self.expect(end)
                break
        return tuple(found)

    def address(self) -> Address:
        if self.token.kind == "number":
            base: Operand = self.constant()
        else:
            base = self.name(self.word("an address"))
        offset = self.offset()
        self.expect("]")
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name, 0, base.target), base.offset + offset
        if not isinstance(base, Register | Symbol | Imm):
            raise self.fail("an address is a register, a variable or a number")
        return Address(base, offset)

    def name(self, text: str) -> Operand:
        """Whatever a name stands for here: a register, a special register, a variable (plus an offset), a function or
        a label."""
        if text == "_":
            return Sink()
        assert self.function is not None
        scope = self.scope
        while scope is not None:
            known = scope.names.get(text)
            if isinstance(known, Register):
                return known
            if known is not None:
                return Symbol(text, self.symbol_offset(), known)
            if scope.ranges:
                digits = len(text.rstrip("0123456789"))
                number = text[digits:]
                found = scope.ranges.get(text[:digits])
                if found is not None and number and len(number) < 9 and int(number) < found[0]:
                    register = self.new_register(self.function, text, found[1])
                    scope.names[text] = register
                    return register
            scope = scope.parent
        if text in SPECIALS:
            return Special(text)
        if text == "WARP_SZ":
            return Imm(32)
        if text.startswith("%"):
            raise self.fail(f"unknown register {text}")
        variable = self.source.variables.get(text)
        return Symbol(text, self.symbol_offset() if variable is not None else 0, variable)

    def symbol_offset(self) -> int:
        return self.offset() if self.token.text in ("+", "-") else 0


def parse(text: str) -> Source:
    """Parse a PTX module.

    Raises:
        PtxError: the text is not PTX that we understand.
    """
    return _Parser(text).module()
