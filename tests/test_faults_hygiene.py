"""What an all-gather leaves lying about: names of sockets, descriptors, files, processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from helpers import deaths, mpirun
from helpers.ranks import synchronise

from lamport_numba import LamportAllGather, run_ranks, to_device
from lamport_numba.symmetric import handles

NAME = re.compile(r"lamport-numba-[0-9a-f]{32}")


def gathers(comm, **options):
    gather = LamportAllGather(comm, 64, transport="peer", timeout=20, **options)
    out = gather(to_device(np.full(4, comm.rank, np.float32)))
    synchronise()
    gather.check()
    return gather, out.copy_to_host()[::4].tolist()


def test_names_of_sockets_cannot_be_guessed_and_never_repeat():
    doors = [handles.Door() for _ in range(50)]
    try:
        assert len({door.address["name"] for door in doors}) == 50
        assert len({door.secret for door in doors}) == 50
        assert all(NAME.fullmatch(door.address["name"]) for door in doors)
        assert not any(os.get_inheritable(door.socket.fileno()) for door in doors)
    finally:
        for door in doors:
            door.socket.close()


def child_sees(comm):
    """The descriptors that a child has which is started without closing any."""
    gather, _ = gathers(comm)
    code = "import os; print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2 "
    code += "and os.path.exists(f'/proc/self/fd/{fd}')), sep='\\n')"
    said = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True)
    own = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = [os.readlink(path) for path in own if os.path.lexists(path)]
    gather.close()
    return [said.stdout, "\n".join(mine)]


def test_children_inherit_no_descriptor_of_ours():
    for seen, mine in mpirun.run(child_sees, 2):
        assert "memfd:" in mine, "there was something to inherit"
        assert "memfd:" not in seen
        assert "nvidia" not in seen


def files():
    """Files that could be ours, where such things are left."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.home()]
    return {str(entry) for place in places if place.is_dir() for entry in place.iterdir() if "lamport" in entry.name}


def is_killed(comm, folder):
    gather, _ = gathers(comm)
    comm.Barrier()
    if comm.rank == 1:
        deaths.die(folder, signal.SIGKILL)
    gather.abandon()
    return sorted(files())


def test_a_kill_leaves_no_file():
    before = files()
    (seen, _) = deaths.run(is_killed, 2, victims=(1,))
    assert all("lamport-deaths-" in name or name in before for name in seen["value"])  # the harness's own folder
    assert {name for name in files() if "lamport-deaths-" not in name} <= before


def one_of_several_jobs(comm, mark):
    gather, got = gathers(comm)
    gather.close()
    return [mark, *got]


def test_several_jobs_start_at_once_on_one_host():
    found = {}

    def job(mark):
        found[mark] = mpirun.run(one_of_several_jobs, 2, mark=mark)

    threads = [threading.Thread(target=job, args=(mark,)) for mark in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {mark: [[mark, 0.0, 1.0]] * 2 for mark in range(3)}


def test_descriptors_and_mappings_do_not_grow():
    def rank(comm):
        counts = []
        for turn in range(12):
            gather, _ = gathers(comm)
            gather.reset()
            gather.close()
            comm.Barrier()
            if turn >= 2:
                with open("/proc/self/maps") as maps:
                    counts.append((len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)))
            comm.Barrier()
        return counts

    counts = run_ranks(2, rank, timeout=60)[0]
    assert counts[-1][0] <= counts[0][0] + 2
    assert counts[-1][1] <= counts[0][1] + 6
