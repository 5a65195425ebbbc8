"""Compile a numba kernel and launch it on either device, by the same call."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.np.numpy_support import from_dtype

from ..driver import Driver, select
from ..streams import as_stream

CAPABILITY = (9, 0)  # what every kernel is compiled for: one dialect of PTX on all devices


class Kernel:
    """A numba kernel that runs on a GPU and on the emulated device. Use it as a decorator, launch it as numba's.

    >>> @kernel
    ... def scale(x, factor):
    ...     i = cuda.grid(1)
    ...     if i < x.size:
    ...         x[i] *= factor
    >>> scale[grid, block, stream, shared_bytes](x, np.float32(2))

    numba compiles the function to PTX, which needs no GPU. The emulated device takes that text; for a GPU it is
    linked to machine code with nvJitLink, because its PTX version may be above what the driver takes. Arrays are
    anything with ``__cuda_array_interface__``; they must live until the launch has passed. Scalars keep their numpy
    type: a Python int is an int64, a float a float64. Functions of ``numba.cuda.jit(device=True)`` want a driver when
    they are compiled: write them into the kernel.

    Args:
        function: a Python function, or a kernel of ``numba.cuda.jit`` that was not launched.
        fastmath: as for ``numba.cuda.jit``.
        launch_bounds: threads a CTA, and more, as for ``numba.cuda.jit``.
    """

    def __init__(self, function: Callable[..., None], *, fastmath: bool = False, launch_bounds: Any = None) -> None:
        self.function: Callable[..., None] = getattr(function, "py_func", function)
        self.__doc__ = function.__doc__
        self._options = {"fastmath": fastmath, "launch_bounds": launch_bounds}
        self._texts: dict[Any, str] = {}
        self._loaded: dict[Any, tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._entry = "numba_" + re.sub(r"\W", "_", self.function.__name__, flags=re.ASCII)

    def __repr__(self) -> str:
        return f"<Kernel {self.function.__name__}>"

    def __call__(self, *arguments: Any) -> NoReturn:
        raise TypeError(
            f"{self!r} was called without a grid and a block: launch it as "
            f"{self.function.__name__}[grid, block](...), or [grid, block, stream](...)"
        )

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        """Configure a launch: ``[grid, block]``, ``[grid, block, stream]`` or ``[grid, block, stream,
        shared_bytes]``.
        """
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise ValueError(f"{self!r}: a launch is kernel[grid, block, stream, shared_bytes], got {configuration!r}")
        grid, block = configuration[:2]
        stream = configuration[2] if len(configuration) > 2 else None
        shared = configuration[3] if len(configuration) > 3 else 0

        def launch(*arguments: Any) -> None:
            self._launch(_extent(grid), _extent(block), as_stream(stream), int(shared), arguments)

        return launch

    def ptx(self, *arguments: Any) -> str:
        """The PTX for arguments of these types: values as for a launch, or numba types."""
        return self._text(tuple(_type_of(argument) for argument in arguments))

    def load(self, *arguments: Any) -> None:
        """Compile and load for arguments like these (values or numba types), without a launch.

        Ranks that wait for each other do so before a barrier: a first launch compiles, which may outlast a deadline.
        """
        drv = select()
        device = drv.default_device()
        with drv.current(device):
            self._function(drv, device, tuple(_type_of(argument) for argument in arguments))

    def _function(self, drv: Driver, device: int, signature: tuple[Any, ...]) -> Any:
        key = (drv.kind, device, signature)
        if key not in self._loaded:
            self._loaded[key] = _load(drv, device, self._text(signature), self._entry)
        return self._loaded[key][1]

    def _text(self, signature: tuple[Any, ...]) -> str:
        with self._lock:
            if signature not in self._texts:
                texts, _ = cuda.compile_ptx(self.function, types.void(*signature), cc=CAPABILITY, **self._options)
                (text,) = texts if isinstance(texts, list) else [texts]
                self._texts[signature] = _renamed(text, self._entry)
            return self._texts[signature]

    def _launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], stream: int, shared: int, arguments: tuple[Any, ...]
    ) -> None:
        drv = select()
        device = drv.default_device()
        signature = tuple(_type_of(argument) for argument in arguments)
        with drv.current(device):
            function = self._function(drv, device, signature)
            values = [
                value
                for kind, argument in zip(signature, arguments, strict=True)
                for value in _parameters(kind, argument)
            ]
            pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
            drv.call("cuLaunchKernel", function, *grid, *block, shared, stream, ctypes.addressof(pointers), 0)


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Make a :class:`Kernel` of a function: ``@kernel`` or ``@kernel(fastmath=True)``."""
    if function is None:
        return lambda decorated: Kernel(decorated, **options)
    return Kernel(function, **options)


def _extent(value: Any) -> tuple[int, int, int]:
    """A grid or block as three numbers."""
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(given) <= 3 or any(int(each) < 1 for each in given):
        raise ValueError(f"a grid or block is one to three numbers of at least 1, got {value!r}")
    x, y, z = (*map(int, given), 1, 1)[:3]
    return x, y, z


def _renamed(text: str, entry: str) -> str:
    """Give the kernel a name that people know, and the same text each time: numba's has a running number in it."""
    mangled = text.split(".visible .entry ", 1)[1].split("(", 1)[0].strip()
    environment = "_ZN08NumbaEnv" + mangled.removeprefix("_ZN")
    return text.replace(environment, f"{entry}_environment").replace(mangled, entry)


def _load(drv: Driver, device: int, text: str, name: str) -> tuple[Any, Any]:
    """The module and the function of a kernel's PTX, on the current context."""
    if drv.kind == "cuda":
        major, minor = drv.compute_capability(device)
        module = drv.call("cuModuleLoadData", _linked(text, f"sm_{major}{minor}"))
    else:
        module = drv.load_module(text)
    return module, drv.call("cuModuleGetFunction", module, name.encode())


def _linked(text: str, architecture: str) -> bytes:
    """Machine code for ``architecture``, by nvJitLink of the same toolkit that numba's compiler is of."""
    from cuda.bindings import nvjitlink

    source = text.encode()
    handle = nvjitlink.create(1, [f"-arch={architecture}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "kernel")
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
    finally:
        nvjitlink.destroy(handle)
    return bytes(code)


def _type_of(argument: Any) -> Any:
    """The numba type of an argument; a type stands for itself."""
    if isinstance(argument, types.Type):
        return argument
    interface = getattr(argument, "__cuda_array_interface__", None)
    if interface is not None:
        dtype = np.dtype(interface["typestr"])
        strides = interface.get("strides")
        layout = _layout(tuple(interface["shape"]), strides, dtype.itemsize)
        return types.Array(from_dtype(dtype), len(interface["shape"]), layout)
    if isinstance(argument, bool | np.bool_):
        return types.boolean
    if isinstance(argument, np.number):
        return from_dtype(argument.dtype)
    if isinstance(argument, int):
        return types.int64
    if isinstance(argument, float):
        return types.float64
    if isinstance(argument, np.ndarray):
        raise TypeError("an argument is a host array; a kernel takes device arrays: lamport_numba.to_device(x)")
    raise TypeError(
        f"an argument is of type {type(argument).__name__}; a kernel takes device arrays and numpy or Python scalars"
    )


def _layout(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> str:
    return "C" if strides is None or tuple(strides) == _packed(shape, itemsize) else "A"


def _packed(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-contiguous array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tuple(strides)


def _parameters(kind: Any, argument: Any) -> list[Any]:
    """The kernel parameters of one argument in numba's ABI, as ctypes values. A 1-D array is seven."""
    if not isinstance(kind, types.Array):
        scalar = np.int8(argument) if kind == types.boolean else np.dtype(str(kind)).type(argument)
        return [(ctypes.c_byte * scalar.nbytes).from_buffer_copy(scalar.tobytes())]
    interface = argument.__cuda_array_interface__
    shape = tuple(int(extent) for extent in interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or _packed(shape, itemsize)
    no_object = 0  # numba's meminfo and parent, which a device array has not
    numbers = (no_object, no_object, int(np.prod(shape, dtype=np.int64)), itemsize, int(interface["data"][0] or 0))
    return [ctypes.c_int64(number) for number in (*numbers, *shape, *map(int, strides))]
