"""Faults that a rank can bring about on any device, for runs under mpirun: each returns what was raised."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import numpy as np

from lamport_numba import LamportAllGather, device_array, to_device
from lamport_numba.errors import LamportError
from lamport_numba.symmetric import Communicator

from . import deaths
from .ranks import graph, new_stream, on_gpu, synchronise

DEADLINE = 1.5  # seconds, of the kernels and of each stage on the host


def gathers_well(gather: Any) -> None:
    """One call, checked."""
    out = gather(to_device(np.arange(4, dtype=np.float32) + gather.rank))
    synchronise()
    gather.check()
    expected = np.concatenate([np.arange(4) + rank for rank in range(gather.world_size)])
    np.testing.assert_array_equal(out.copy_to_host(), expected.astype(np.float32))


def reported(comm: Any, gather: Any) -> dict[str, Any]:
    """What all ranks raise once the calls of all are over; then the object goes on after a reset."""
    synchronise()
    comm.Barrier()
    try:
        gather.check()
        found = {"type": "nothing", "text": ""}
    except LamportError as error:
        found = {"type": type(error).__name__, "text": str(error)}
    gather.reset()
    gathers_well(gather)
    gather.close()
    return found


def disagree(comm: Any) -> dict[str, Any]:
    """Sizes 1 2 against 2 1."""
    gather = LamportAllGather(comm, 1024, transport="peer", timeout=20)
    gathers_well(gather)
    comm.Barrier()  # nobody still looks at the good call when the others disagree
    try:
        for packs in (2, 1) if comm.rank == 1 else (1, 2):
            gather(to_device(np.zeros(4 * packs, np.float32)))
    except LamportError:
        pass  # told again below
    return reported(comm, gather)


def refuse_in_a_graph(comm: Any) -> dict[str, Any]:
    """The last rank refuses the second of three calls of a graph."""
    gather = LamportAllGather(comm, 1024, transport="peer", timeout=20)
    gathers_well(gather)
    comm.Barrier()
    with new_stream() as stream:
        call = gather.prepare(to_device(np.zeros(4, np.float32)), device_array(4 * comm.size, np.float32), stream)

        def queue() -> None:
            call()
            if comm.rank == comm.size - 1:
                with suppress(ValueError):
                    gather(device_array(5, np.float32), stream=stream)
            else:
                call()
            call()

        with graph(stream, queue) as launch:
            launch()
            synchronise(stream)
        return reported(comm, gather)  # the stream lives until the all-gather is closed


def time_out(comm: Any) -> dict[str, Any]:
    """The last rank does not call."""
    gather = LamportAllGather(comm, 1024, transport="peer", timeout=DEADLINE)
    gathers_well(gather)
    if comm.rank < comm.size - 1:
        gather(to_device(np.zeros(4, np.float32)))
    return reported(comm, gather)


def die_at_stage(stage, folder, how):
    """Let this rank end when it comes to a stage of the set-up."""
    real = Communicator.all_gather

    def all_gather(self, data, name, timeout=None):
        if name == stage:
            deaths.die(folder, how)
        return real(self, data, name, timeout)

    Communicator.all_gather = all_gather


def survive(comm, folder, how, where, victim):
    dies = comm.rank == victim
    if where == "set-up" and dies:
        die_at_stage("map the peers' memory", folder, how)
    try:
        gather = LamportAllGather(comm, 1024, transport="peer", timeout=DEADLINE)
        x, y = to_device(np.full(4, comm.rank, np.float32)), device_array(4 * comm.size, np.float32)
        gather(x, out=y)
        synchronise()
        if where == "between calls":
            if dies:
                deaths.die(folder, how)
            gather(x, out=y)
            synchronise()
            gather.check()
        else:
            in_a_graph(gather, x, y, folder, how, dies)
    except LamportError as error:
        seconds = deaths.seconds_since(folder)
        try:
            if where != "set-up":
                gather.close()  # was told: for a moment it waits for the others, and does not raise
                gather.close()
        except LamportError as second:
            return {"second": repr(second)}
        return {
            "type": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "missing": list(getattr(error, "missing", ())),
            "seconds": seconds,
            "closed": deaths.seconds_since(folder) - seconds,
        }
    return "nothing was raised"


def in_a_graph(gather, x, y, folder, how, dies):
    with new_stream() as stream:
        call = gather.prepare(x, y, stream)
        with graph(stream, lambda: [call() for _ in range(1000)]) as launch:
            launch()
            synchronise(stream)
            for _ in range(40 if on_gpu() else 1):  # a GPU is through one before anybody can look
                launch()
            if dies:
                (channel,) = gather._channels.values()
                while channel.calls() < 1200:
                    time.sleep(0.0005)
                deaths.die(folder, how)
            synchronise(stream)
            gather.check()
