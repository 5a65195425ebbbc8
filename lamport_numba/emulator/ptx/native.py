"""LLVM text to machine code, and the cache of what was compiled.

Objects are kept in a private folder (mode 0700, owned by us), each written under another name and renamed, with a
digest in front.
Their key holds everything they depend on: the PTX text, the processor, llvmlite, and the emulator's own source.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import stat
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from . import printing, runtime

__all__ = ["compile_text", "disk_read", "disk_write", "key", "link"]

_lock = threading.RLock()
_names = itertools.count()
_writes = itertools.count()
_MOST_FILES = 4000
# What LLVM turns intrinsics of float functions into, where the processor has no instruction for them.
_LIBRARY = ("sin", "cos", "log2", "exp2", "fma", "floor", "ceil", "trunc", "roundeven", "tanh", "memset", "memcpy")


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.load_library_permanently("libm.so.6")
    return _new_machine()


def _new_machine() -> Any:
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2, reloc="pic", jit=True)


@cache
def _sources() -> str:
    """A digest of the emulator's own source: a change of it makes every cached object stale."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key(*parts: str | bytes) -> str:
    """The name under which something made from ``parts`` is cached."""
    digest = hashlib.sha256()
    features = llvm.get_host_cpu_features().flatten()
    for part in (llvmlite.__version__, llvm.get_host_cpu_name(), features, _sources(), *parts):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile_text(text: str) -> bytes:
    """An object file from LLVM text."""
    with _lock:
        machine = _machine()
        module = llvm.parse_assembly(text)
        module.verify()
        builder = llvm.create_pass_builder(machine, llvm.PipelineTuningOptions(speed_level=1))
        builder.getModulePassManager().run(module, builder)
        return bytes(machine.emit_object(module))


# -- cache on disk ---------------------------------------------------------------------------------------------------


@cache
def _folder() -> Path | None:
    """The private folder, or None where there can be none."""
    from ...settings import get

    chosen = get("CACHE")
    if chosen == "0":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(chosen or Path(base) / "lamport-numba") / "ptx"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return None
        if status.st_mode & 0o077:
            path.chmod(0o700)
    except OSError:
        return None
    return path


def disk_read(name: str) -> bytes | None:
    """What `disk_write` wrote under this name; None if there is nothing, or it is damaged."""
    folder = _folder()
    if folder is None:
        return None
    try:
        data = (folder / name).read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def disk_write(name: str, data: bytes) -> None:
    """Keep ``data``; a full or read-only disk is no reason to fail."""
    folder = _folder()
    if folder is None:
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, folder / name)
        if next(_writes) % 64 == 0:
            _prune(folder)
    except OSError:
        return


def _prune(folder: Path) -> None:
    """Remove the oldest files of a cache that has grown too large."""
    files = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)
    for path in files[: max(len(files) - _MOST_FILES, 0)]:
        path.unlink(missing_ok=True)


# -- linking ---------------------------------------------------------------------------------------------------------


class _Process:
    """The code that this process has linked."""

    def __init__(self) -> None:
        _machine()
        self.jit = llvm.create_lljit_compiler(_new_machine())
        self.keep: list[Any] = []
        self.runtime = self.load_runtime()

    def load_runtime(self) -> dict[str, int]:
        name = f"{key('runtime')}.o"
        code = disk_read(name)
        if code is None:
            code = compile_text(runtime.source())
            disk_write(name, code)
        library = self.add(code, {}, runtime.symbols())
        found = {symbol: library[symbol] for symbol in runtime.symbols()}
        found["print_hook"] = ctypes.cast(printing.HOOK, ctypes.c_void_p).value or 0
        return found

    def add(self, code: bytes, imports: dict[str, int], exports: list[str]) -> Any:
        builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        for symbol, address in imports.items():
            builder.import_symbol(symbol, address)
        for symbol in exports:
            builder.export_symbol(symbol)
        library = builder.link(self.jit, f"ptx{next(_names)}")
        self.keep.append(library)
        return library


@cache
def _process() -> _Process:
    return _Process()


def link(code: bytes, name: str, prototype: Any) -> Any:
    """A callable of the function ``name`` in an object, which may call the runtime's."""
    with _lock:
        process = _process()
        library = process.add(code, process.runtime, [name])
        return prototype(library[name])


def runtime_function(name: str, prototype: Any) -> Any:
    """A callable of one of the runtime's own functions."""
    with _lock:
        return prototype(_process().runtime[name])


# run(grid, ctas, quantum)
RUN = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64)
