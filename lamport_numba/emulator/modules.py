"""Modules and functions: PTX text made ready to launch, its variables, and what a kernel needs of a multiprocessor."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

from cuda.bindings import driver as cuda

from ..errors import PtxError
from . import ptx
from .config import CONFIG
from .core import address_of, api, handle, refuse, result
from .machine import MACHINE, Context, current

__all__ = ["Function", "Module", "function_of"]

_STATIC_SHARED: Final = 48 << 10  # without the opt-in attribute
_OPTIN_SHARED: Final = 227 << 10
_SM_SHARED: Final = 228 << 10
_SM_WARPS, _SM_BLOCKS, _SM_REGISTERS = 64, 32, 65536

MODULES: Final[dict[int, Module]] = {}
FUNCTIONS: Final[dict[int, Function]] = {}


class Function:
    """A kernel in one context."""

    def __init__(self, module: Module, kernel: ptx.Kernel) -> None:
        self.handle = cuda.CUfunction(handle())
        self.module = module
        self.context = module.context
        self.kernel = kernel
        self.name = kernel.name
        self.dynamic_limit = _STATIC_SHARED - kernel.shared_bytes
        self.plans: dict[Any, Any] = {}  # validated launch configurations, by their bytes
        self.layouts: dict[bytes, Any] = {}  # where parameters were found, by the bytes of the pointer array
        self.pointers = 8 * len(kernel.params)

    def occupancy(self, threads: int, dynamic: int) -> int:
        """CTAs of ``threads`` threads and ``dynamic`` bytes of shared memory that one multiprocessor holds at once."""
        kernel = self.kernel
        if not 0 < threads <= kernel.max_threads or dynamic > max(self.dynamic_limit, 0):
            return 0
        if CONFIG.residency is not None:
            return 1
        warps = -(-threads // 32)
        registers = -(-max(kernel.registers, 16) * 32 // 256) * 256 * warps
        shared = kernel.shared_bytes + dynamic + 1024
        return min(_SM_WARPS // warps, _SM_BLOCKS, _SM_REGISTERS // registers, _SM_SHARED // shared)


class Module:
    """PTX text loaded into one context."""

    def __init__(self, context: Context, loaded: ptx.Module) -> None:
        from .memory import MEMORY

        self.handle = cuda.CUmodule(handle())
        self.context = context
        self.loaded = loaded
        self.regions = {
            name: MEMORY.variable(context, v.size, v.align, v.space == "const") for name, v in loaded.variables.items()
        }
        addresses = {name: region.base for name, region in self.regions.items()}
        for name, region in self.regions.items():
            image = loaded.image(name, addresses)
            ctypes.memmove(region.base, image, min(len(image), region.size))
        self.variables = loaded.place(addresses) if addresses else None
        self.functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """The kernel ``name``, the same object each time."""
        with MACHINE.lock:
            found = self.functions.get(name)
            if found is None:
                kernel = self.loaded.kernels.get(name)
                if kernel is None:
                    have = ", ".join(self.loaded.kernels) or "none"
                    refuse(result.CUDA_ERROR_NOT_FOUND, f"no kernel {name!r} in the module; it has {have}")
                found = self.functions[name] = Function(self, kernel)
                FUNCTIONS[int(found.handle)] = found
            return found


def function_of(number: Any) -> Function:
    """The function of a handle."""
    function = FUNCTIONS.get(number if number.__class__ is int else int(number))
    if function is None:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, f"no function {int(number):#x} (its module was unloaded?)")
    return function


def _module_of(number: Any) -> Module:
    module = MODULES.get(int(number))
    if module is None:
        refuse(result.CUDA_ERROR_INVALID_HANDLE, f"no module {int(number):#x} (unloaded?)")
    return module


def _text_of(image: Any) -> str:
    if isinstance(image, str):
        raw = image.encode()
    elif isinstance(image, int) or hasattr(image, "__int__"):
        raw = ctypes.string_at(address_of(image))
    else:
        raw = bytes(image)
    if raw[:4] in (b"\x7fELF", b"\x50\xed\x55\xba"):
        refuse(result.CUDA_ERROR_NO_BINARY_FOR_GPU, "the emulated device runs PTX text, not cubins or fat binaries")
    return raw.split(b"\0", 1)[0].decode("utf-8", errors="replace")


_VERSION: Final = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_TARGET: Final = re.compile(r"^\s*\.target\s+sm_(\d+)([af]?)", re.MULTILINE)


def _load(image: Any) -> tuple[Module | None, Any, str]:
    """The module, or the code and the log of what is wrong with the text."""
    context = current()
    text = _text_of(image)
    version, target = _VERSION.search(text), _TARGET.search(text)
    if version is not None and (int(version[1]), int(version[2])) > CONFIG.ptx_version:
        newest = "{}.{}".format(*CONFIG.ptx_version)
        log = f"ptxas fatal   : Unsupported .version {version[1]}.{version[2]}; current version is '{newest}'"
        return None, result.CUDA_ERROR_UNSUPPORTED_PTX_VERSION, log
    if target is not None and (int(target[1]) > 90 or (target[2] and target[1] != "90")):
        log = f"ptxas fatal   : .target sm_{target[1]}{target[2]} does not run on compute capability 9.0"
        return None, result.CUDA_ERROR_NO_BINARY_FOR_GPU, log
    try:
        return Module(context, ptx.load(text)), None, ""
    except PtxError as error:
        return None, result.CUDA_ERROR_INVALID_PTX, f"ptxas application ptx input, {error}"


@api(1)
def cuModuleLoadData(image: Any) -> Any:
    return _keep(*_load(image))


@api(1)
def cuModuleLoad(fname: Any) -> Any:
    path = fname.decode() if isinstance(fname, bytes) else fname
    try:
        with open(path, "rb") as file:
            image = file.read()
    except OSError as error:
        refuse(result.CUDA_ERROR_FILE_NOT_FOUND, str(error))
    return _keep(*_load(image))


@api(1)
def cuModuleLoadDataEx(image: Any, numOptions: int, options: Any, optionValues: Any) -> Any:
    module, code, log = _load(image)
    if log:
        _write_log(log, dict(zip([int(o) for o in options or ()][:numOptions], optionValues or (), strict=False)))
    return _keep(module, code, log)


def _keep(module: Module | None, code: Any, log: str) -> Any:
    if module is None:
        refuse(code, log)
    MODULES[int(module.handle)] = module
    return module.handle


def _write_log(log: str, options: dict[int, Any]) -> None:
    """Put the log where the JIT options say: a bytearray, another buffer, or an address."""
    option = cuda.CUjit_option
    target = options.get(int(option.CU_JIT_ERROR_LOG_BUFFER))
    room = int(options.get(int(option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES), 0))
    if target is None or room <= 0:
        return
    text = log.encode()[: room - 1] + b"\0"
    if isinstance(target, bytearray):
        target[: len(text)] = text
    else:
        ctypes.memmove(address_of(target), text, len(text))


@api()
def cuModuleUnload(hmod: Any) -> None:
    from .engine import ENGINE
    from .memory import MEMORY

    module = _module_of(hmod)
    current()
    ENGINE.wait(lambda: module.context.error is not None or module.context.idle)
    for function in module.functions.values():
        FUNCTIONS.pop(int(function.handle), None)
    for region in module.regions.values():
        MEMORY.free(region)
    MODULES.pop(int(module.handle), None)


def forget(context: Context) -> None:
    """Drop the modules of a context that ends."""
    for module in [module for module in MODULES.values() if module.context is context]:
        for function in module.functions.values():
            FUNCTIONS.pop(int(function.handle), None)
        MODULES.pop(int(module.handle), None)


@api(1)
def cuModuleGetFunction(hmod: Any, name: Any) -> Any:
    module = _module_of(hmod)
    return module.function(name.decode() if isinstance(name, bytes) else name).handle


@api(1)
def cuModuleGetFunctionCount(mod: Any) -> int:
    return len(_module_of(mod).loaded.kernels)


@api(2)
def cuModuleGetGlobal(hmod: Any, name: Any) -> tuple[Any, int]:
    module = _module_of(hmod)
    text = name.decode() if isinstance(name, bytes) else name
    region = module.regions.get(text)
    if region is None:
        refuse(result.CUDA_ERROR_NOT_FOUND, f"no variable {text!r} in the module")
    return cuda.CUdeviceptr(region.base), region.size


@api(1)
def cuFuncGetName(hfunc: Any) -> bytes:
    return function_of(hfunc).name.encode()


@api(1)
def cuFuncGetModule(hfunc: Any) -> Any:
    return function_of(hfunc).module.handle


@api(2)
def cuFuncGetParamInfo(func: Any, paramIndex: int) -> tuple[int, int]:
    params = function_of(func).kernel.params
    if not 0 <= paramIndex < len(params):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"parameter {paramIndex} of {len(params)}")
    return params[paramIndex].offset, params[paramIndex].size


@api(1)
def cuFuncGetAttribute(attrib: Any, hfunc: Any) -> int:
    function = function_of(hfunc)
    kernel = function.kernel
    names = cuda.CUfunction_attribute
    values = {
        names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: kernel.max_threads,
        names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: kernel.shared_bytes,
        names.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: 0,
        names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: kernel.local_bytes,
        names.CU_FUNC_ATTRIBUTE_NUM_REGS: kernel.registers,
        names.CU_FUNC_ATTRIBUTE_PTX_VERSION: 90,
        names.CU_FUNC_ATTRIBUTE_BINARY_VERSION: 90,
        names.CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: 0,
        names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: function.dynamic_limit,
    }
    value = values.get(names(int(attrib)))
    if value is None:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"function attribute {int(attrib)} is not emulated")
    return value


@api()
def cuFuncSetAttribute(hfunc: Any, attrib: Any, value: int) -> None:
    function = function_of(hfunc)
    names = cuda.CUfunction_attribute
    if int(attrib) == int(names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES):
        if not 0 <= value <= _OPTIN_SHARED - function.kernel.shared_bytes:
            refuse(result.CUDA_ERROR_INVALID_VALUE, f"{value} bytes of dynamic shared memory; at most {_OPTIN_SHARED}")
        function.dynamic_limit = value
        function.plans.clear()
    elif int(attrib) != int(names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"function attribute {int(attrib)} cannot be set")


@api(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(func: Any, blockSize: int, dynamicSMemSize: int) -> int:
    return function_of(func).occupancy(blockSize, dynamicSMemSize)


@api(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    func: Any, blockSize: int, dynamicSMemSize: int, flags: int
) -> int:
    return function_of(func).occupancy(blockSize, dynamicSMemSize)
