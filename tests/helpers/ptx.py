"""Run a kernel of some PTX text on numpy arrays, straight through the emulator's grid."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import AddressTable, Fabric, Grid, Kind, Status

HEADER = ".version 8.1\n.target sm_90\n.address_size 64\n"


def table_of(*arrays: np.ndarray) -> AddressTable:
    table = AddressTable()
    for key, array in enumerate(arrays):
        table.add(array.ctypes.data, array.nbytes, Kind.LOCAL, key=key << 40)
    return table


def pack(kernel: ptx.Kernel, args: tuple[Any, ...]) -> bytes:
    """The parameter block: arrays by address, numpy scalars and bytes by their bits, ints by the parameter's size."""
    block = bytearray(kernel.param_bytes)
    for param, arg in zip(kernel.params, args, strict=True):
        if isinstance(arg, np.ndarray):
            data = struct.pack("<Q", arg.ctypes.data)
        elif isinstance(arg, int):
            data = (arg % (1 << 8 * param.size)).to_bytes(param.size, "little")
        else:
            data = bytes(arg) if isinstance(arg, bytes) else arg.tobytes()
        assert len(data) == param.size, param
        block[param.offset : param.offset + param.size] = data
    return bytes(block)


def finish(grid: Grid, ctas: int = 8, passes: int = 100_000) -> Status:
    """Run until the grid ends; a grid that stalls for long is a failed test."""
    stalled = 0
    status = Status.RUNNING
    for _ in range(passes):
        status = grid.run(ctas, 1_000_000)
        if status >= Status.FINISHED:
            return status
        stalled = stalled + 1 if status == Status.STALLED else 0
        if stalled > 1000:
            break
    return status


def launch(
    text: str | ptx.Module,
    args: tuple[Any, ...],
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared: int = 0,
    fabric: Fabric | None = None,
    name: str | None = None,
    table: AddressTable | None = None,
    ctas: int = 8,
    variables: dict[str, np.ndarray] | None = None,
) -> Grid:
    """Run the only kernel of ``text`` (or ``name``) to its end and return the grid."""
    module = ptx.load(text) if isinstance(text, str) else text
    kernel = module.kernels[name] if name else next(iter(module.kernels.values()))
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    placed = None
    if module.variables:
        memory = variables if variables is not None else variables_of(module)
        arrays += list(memory.values())
        placed = module.place({n: a.ctypes.data for n, a in memory.items()})
    table = table or table_of(*{id(a): a for a in arrays if a.nbytes}.values())
    run = Grid(kernel, table, grid, block, shared, pack(kernel, args), fabric or Fabric.immediate(), variables=placed)
    status = finish(run, ctas)
    assert status == Status.FINISHED, run.fault or status
    return run


def variables_of(module: ptx.Module) -> dict[str, np.ndarray]:
    """Memory for the module's variables, holding their initial values."""
    memory = {n: np.zeros(max(v.size, 1) + 16, np.uint8) for n, v in module.variables.items()}
    memory = {n: a[-a.ctypes.data % 16 :][: max(module.variables[n].size, 1)] for n, a in memory.items()}
    addresses = {n: a.ctypes.data for n, a in memory.items()}
    for n, array in memory.items():
        array[: module.variables[n].size] = np.frombuffer(module.image(n, addresses), np.uint8)
    return memory
