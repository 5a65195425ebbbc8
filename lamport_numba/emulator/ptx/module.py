"""A loaded module: its kernels and its variables."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ...errors import PtxError
from . import native
from .ir import unit
from .parser import parse
from .scheduler import scheduler
from .syntax import TYPES, Imm, Source
from .syntax import Variable as Declared
from .translate import Translation, module_variables, translate

__all__ = ["Kernel", "Module", "Param", "Variable", "load"]


class Param(NamedTuple):
    """One kernel parameter and its place in the parameter block (bytes)."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Variable:
    """A module-scope variable. Whoever loads the module gives it ``size`` bytes at a multiple of ``align``."""

    name: str
    space: str  # "global" or "const"
    size: int
    align: int


class Native(NamedTuple):
    """Linked code of a kernel: ``run(grid, ctas, quantum)``, and the size of the frame that its lanes need."""

    run: Any
    frame_bytes: int


@dataclass
class Kernel:
    """One ``.entry``. The fields after ``warp_size`` are for `Grid`."""

    name: str
    params: list[Param]
    param_bytes: int
    shared_bytes: int  # static, of a CTA
    local_bytes: int  # of a thread
    registers: int  # an estimate: 32-bit registers a thread
    max_threads: int  # of a CTA
    warp_size: int = 32
    sites: list[tuple[int, int]] = field(default_factory=list)  # (line, bytes) of every place that can fault
    uses_variables: bool = False
    module: Module = field(default=None, repr=False)  # type: ignore[assignment]
    code: dict[bool, Native] = field(default_factory=dict, repr=False)  # by variant: adversarial or not
    pool: list[Any] = field(default_factory=list, repr=False)  # blocks of finished grids, to be used again

    def native(self, adversarial: bool) -> Native:
        """The code, compiled (or read from the cache) when it is first asked for."""
        found = self.code.get(adversarial)
        if found is None:
            found = self.code[adversarial] = self.module.native(self.name, adversarial)
        return found

    def line_text(self, line: int) -> str:
        return self.module.line_text(line)


class Module:
    """What `load` returns."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.key = native.key(text)
        self.kernels: dict[str, Kernel] = {}
        self.variables: dict[str, Variable] = {}
        self._source: Source | None = None
        self._translations: dict[str, Translation] = {}
        self._lock = threading.RLock()
        if not self._remember():
            self._translate()

    # -- from the text, or from the cache ---------------------------------------------------------------------------

    def _remember(self) -> bool:
        """Read from the cache what is known of this text."""
        data = native.disk_read(f"{self.key}.json")
        if data is None:
            return False
        known = json.loads(data)
        for fields in known["kernels"]:
            fields["params"] = [Param(*p) for p in fields["params"]]
            fields["sites"] = [(line, size) for line, size in fields["sites"]]
            self.kernels[fields["name"]] = Kernel(**fields, module=self)
        self.variables = {v["name"]: Variable(**v) for v in known["variables"]}
        return True

    @property
    def source(self) -> Source:
        if self._source is None:
            self._source = parse(self.text)
        return self._source

    def _translate(self) -> None:
        source = self.source
        for name in module_variables(source):
            v = source.variables[name]
            self.variables[name] = Variable(name, v.space, v.size, v.align)
        for function in source.functions.values():
            if not function.is_kernel or function.body is None:
                continue
            t = self._translations[function.name] = translate(source, function)
            offsets = zip(function.params, t.param_offsets, strict=True)
            self.kernels[function.name] = Kernel(
                name=function.name,
                params=[Param(p.name, at, p.size, p.align) for p, at in offsets],
                param_bytes=t.param_bytes,
                shared_bytes=t.shared_bytes,
                local_bytes=t.local_bytes,
                registers=min(t.live_registers + 8, 255),
                max_threads=function.max_threads,
                sites=[(s.line, s.size) for s in t.sites],
                uses_variables=any(v.space in ("global", "const") for v in t.flat.variables),
                module=self,
            )
        known = {
            "kernels": [_plain(k) for k in self.kernels.values()],
            "variables": [asdict(v) for v in self.variables.values()],
        }
        native.disk_write(f"{self.key}.json", json.dumps(known).encode())

    def native(self, name: str, adversarial: bool) -> Native:
        with self._lock:
            data = self._object(name, adversarial)
            return Native(native.link(data[8:], "run", native.RUN), int.from_bytes(data[:8], "little"))

    def _object(self, name: str, adversarial: bool) -> bytes:
        """The size of a frame (8 bytes), then the object file."""
        index = list(self.kernels).index(name)
        file = f"{self.key}-{index}{'a' if adversarial else 'i'}.o"
        data = native.disk_read(file)
        if data is None:
            translation = self._translations.pop(name, None) if not adversarial else None
            if translation is None:
                translation = translate(self.source, self.source.functions[name], adversarial=adversarial)
            code = native.compile_text(unit(scheduler(translation.step, adversarial=adversarial)))
            data = translation.frame_bytes.to_bytes(8, "little") + code
            native.disk_write(file, data)
        return data

    def line_text(self, line: int) -> str:
        lines = self.text.split("\n")
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    # -- variables ----------------------------------------------------------------------------------------------------

    def place(self, addresses: Mapping[str, int]) -> ctypes.Array[ctypes.c_uint64]:
        """The variables' addresses as `Grid` takes them (``variables=``)."""
        return (ctypes.c_uint64 * max(len(self.variables), 1))(*(addresses[name] for name in self.variables))

    def image(self, name: str, addresses: Mapping[str, int]) -> bytes:
        """The initial bytes of a variable, with the addresses of others filled in where its initialiser names them."""
        declared = self.source.variables[name]
        unit_bytes = max(TYPES[declared.type][0] // 8, 1)
        data = bytearray(declared.size)
        for i, value in enumerate(declared.init or ()):
            number = _initial(value, declared, addresses)
            data[i * unit_bytes : (i + 1) * unit_bytes] = (number % (1 << 8 * unit_bytes)).to_bytes(
                unit_bytes, "little"
            )
        return bytes(data)


def _initial(value: Any, declared: Declared, addresses: Mapping[str, int]) -> int:
    if isinstance(value, Imm):
        if value.kind == "real" and declared.type == "f32":
            import struct

            number = struct.unpack("<d", value.value.to_bytes(8, "little"))[0]
            return int.from_bytes(struct.pack("<f", number), "little")
        return int(value.value)
    if value.name not in addresses:
        raise PtxError(f"{declared.name} is initialised with {value.name}, which has no address", line=declared.line)
    return addresses[value.name] + int(value.offset)


def _plain(kernel: Kernel) -> dict[str, Any]:
    skipped = ("module", "pool", "code")
    return {name: value for name, value in vars(kernel).items() if name not in skipped}


_MOST_MODULES = 512
_modules: dict[str, Module] = {}
_modules_lock = threading.Lock()


def load(text: str | bytes) -> Module:
    """Parse and translate PTX text. The same text gives the same `Module`.

    Raises:
        PtxError: the text cannot be understood, or uses an instruction that is not emulated; the line is named.
    """
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    with _modules_lock:
        module = _modules.get(text)
        if module is None:
            try:
                module = _modules[text] = Module(text)
            except RecursionError:
                raise PtxError("nested too deep") from None
            while len(_modules) > _MOST_MODULES:  # the oldest; whoever still uses it holds it
                del _modules[next(iter(_modules))]
        return module
