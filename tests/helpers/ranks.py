"""Run a test's function on every rank of a world, on whatever device the tests are for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lamport_numba import driver
from lamport_numba.driver import structs
from lamport_numba.graphs import Graph

from . import environment, mpirun


def on_gpu() -> bool:
    """Whether these tests run on real GPUs: with LAMPORT_NUMBA_DEVICE=cuda, ranks may share one under MPS."""
    return os.environ.get(environment.DEVICE) == "cuda"


def each(
    function: Callable[..., Any],
    ranks: int,
    *,
    fabric: str | None = None,
    seed: int | None = None,
    residency: int | None = None,
    timeout: float = 60.0,
    **arguments: Any,
) -> list[Any]:
    """``function(comm, **arguments)`` on every rank; results by rank.

    On the emulated device ranks are threads of this process, on GPUs processes under mpirun: then ``function`` is one
    that can be imported, arguments and results travel as JSON, and there is no fabric to choose.
    """
    if on_gpu():
        assert fabric is None, "an adversarial fabric is for the emulated device"
        env = {"LAMPORT_NUMBA_SHARE_DEVICE": "1"}
        return mpirun.run(function, ranks, timeout=timeout + 60, env=env, **arguments)
    from lamport_numba.emulator.ranks import run_ranks

    return run_ranks(
        ranks,
        lambda comm: function(comm, **arguments),
        fabric=fabric,
        seed=seed,
        residency=residency,
        timeout=timeout,
    )


@contextmanager
def new_stream() -> Iterator[int]:
    """A stream of this rank's device, as a handle."""
    drv = driver.select()
    with drv.current(drv.default_device()):
        stream = drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            yield int(stream)
        finally:
            drv.call("cuStreamSynchronize", stream)
            drv.call("cuStreamDestroy", stream)


@contextmanager
def graph(stream: int, queue: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """What ``queue()`` queues on the stream, captured: gives a function that launches it there."""
    drv = driver.select()
    with drv.current(drv.default_device()), Graph(drv, stream, queue) as made:
        yield made.launch


def synchronise(stream: int = 0) -> None:
    """Wait for a stream of this rank's device."""
    drv = driver.select()
    with drv.current(drv.default_device()):
        drv.call("cuStreamSynchronize", stream)


def write(address: int, data: bytes) -> None:
    """Copy bytes to the memory of this rank's device."""
    drv = driver.select()
    with drv.current(drv.default_device()):
        drv.call("cuMemcpyHtoD", address, data, len(data))


def read(address: int, nbytes: int) -> bytes:
    """Copy bytes from the memory of this rank's device."""
    drv = driver.select()
    into = bytearray(nbytes)
    with drv.current(drv.default_device()):
        drv.call("cuMemcpyDtoH", into, address, nbytes)
    return bytes(into)


class Words:
    """Device memory at an address as an array of uint32, for kernels."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<u4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class OnStream:
    """An array that says it was written on this stream."""

    def __init__(self, array: Any, stream: int) -> None:
        self.held = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}
