"""Symmetric memory on the emulated device: every rank sees every rank's bytes, and all is given back."""

import gc
import os
import subprocess
import sys

import pytest
from helpers import mpirun
from helpers.symmetric import Fresh, descriptors, make, mappings, world

from lamport_numba import driver, emulator
from lamport_numba.emulator import CONFIG
from lamport_numba.errors import ClosedError, MulticastUnavailable, RendezvousTimeout, SetupError
from lamport_numba.symmetric import Communicator, SymmetricMemory, handles
from lamport_numba.symmetric import survey as survey_module


def pattern(rank, length):
    return bytes((rank * 59 + i * 7 + i // 251) % 256 for i in range(length))


def write(memory, data, offset=0):
    drv = driver.select("emulated")
    with drv.current(memory._device):
        drv.call("cuMemcpyHtoD", memory.local + offset, data, len(data))


def read(memory, rank, length, offset=0):
    drv = driver.select("emulated")
    data = bytearray(length)
    with drv.current(memory._device):
        drv.call("cuMemcpyDtoH", data, memory.address(rank) + offset, length)
    return bytes(data)


def everyone_sees_everyone(communicator, **options):
    """Each rank fills its memory, each reads all: through the peers' mappings, to the last byte."""
    memory = make(communicator, **options)
    assert memory.nbytes % CONFIG.granularity == 0
    write(memory, pattern(communicator.rank, memory.nbytes))
    communicator.barrier("written")
    for rank in range(communicator.size):
        assert read(memory, rank, memory.nbytes) == pattern(rank, memory.nbytes)
    assert len({memory.address(rank) for rank in range(communicator.size)}) == communicator.size
    assert (memory.multicast is not None) == bool(options.get("multicast"))
    memory.close()
    return memory.nbytes


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_everyone_sees_everyone(n, multicast):
    with Fresh():
        sizes = world(n, lambda c: everyone_sees_everyone(c, multicast=multicast))
    granularity = CONFIG.multicast_granularity if multicast else CONFIG.granularity
    assert sizes == [granularity] * n


def test_a_rack_of_72():
    with Fresh():
        results = world(72, lambda c: make(c, multicast=True).close(), timeout=60)
    assert results == [None] * 72


def processes(comm):
    communicator = Communicator(comm, timeout=20)
    for multicast in (False, True, False):
        everyone_sees_everyone(communicator, multicast=multicast)
    communicator.free()
    return emulator.leaks()


def test_everyone_sees_everyone_in_processes():
    assert mpirun.run(processes, 4, multicast=True) == [[]] * 4


def test_sizes_are_rounded_up_to_the_granularity():
    def program(c):
        memory = make(c, CONFIG.granularity + 1)
        memory.close()
        return memory.nbytes

    assert world(2, program) == [2 * CONFIG.granularity] * 2


def test_fabric_handles_serve_where_they_work(monkeypatch):
    monkeypatch.setattr(CONFIG, "fabric_handles", True)
    with Fresh():
        results = world(3, lambda c: everyone_sees_everyone(c, multicast=True, handle_kind="fabric"))
    assert results == [CONFIG.multicast_granularity] * 3


def on_hosts(monkeypatch, *hosts):
    """Let each rank believe that it runs on another host."""
    real = survey_module._facts

    def facts(drv, device, wish):
        import dataclasses

        return dataclasses.replace(real(drv, device, wish), boot=hosts[device], host=hosts[device])

    monkeypatch.setattr(survey_module, "_facts", facts)


def test_several_hosts_go_by_fabric_handles(monkeypatch):
    on_hosts(monkeypatch, "alpha", "alpha", "beta")
    monkeypatch.setattr(CONFIG, "fabric_handles", True)
    with Fresh():
        assert not [r for r in world(3, lambda c: everyone_sees_everyone(c)) if isinstance(r, Exception)]


def test_several_hosts_without_fabric_are_an_error_at_once(monkeypatch):
    on_hosts(monkeypatch, "alpha", "alpha", "beta")
    with Fresh() as run:
        errors = world(3, make)
    assert run.seconds < 5
    assert len({str(error) for error in errors}) == 1
    assert type(errors[0]) is SetupError
    assert "the ranks are on several hosts: alpha (ranks 0, 1), beta (rank 2)" in str(errors[0])
    assert "FABRIC handles, which do not work on ranks 0, 1, 2" in str(errors[0])


def test_two_ranks_on_one_device_are_refused_by_name():
    def program(c):
        return SymmetricMemory(c, driver.select("emulated"), min(c.rank, 1), 100)

    with Fresh():
        errors = world(3, program)
    assert len({str(error) for error in errors}) == 1
    assert "ranks 1 and 2 use one device (Emulated H200" in str(errors[0])
    assert "share_device=True" in str(errors[0])


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_sharing_a_device_can_be_allowed(way, monkeypatch):
    if way == "variable":
        monkeypatch.setenv("LAMPORT_NUMBA_SHARE_DEVICE", "1")

    def program(c):
        share = True if way == "argument" else None
        memory = SymmetricMemory(c, driver.select("emulated"), c.rank // 2, 100, share_device=share)
        write(memory, pattern(c.rank, 100))
        c.barrier("written")
        assert [read(memory, rank, 100) for rank in range(3)] == [pattern(rank, 100) for rank in range(3)]
        memory.close()
        return memory.sharers

    with Fresh():
        assert world(3, program) == [2] * 3


def test_ranks_that_ask_for_different_sizes():
    errors = world(3, lambda c: make(c, 100 if c.rank else 200))
    assert len({str(error) for error in errors}) == 1
    assert "different values of bytes: 200 (rank 0), 100 (ranks 1, 2)" in str(errors[0])


def test_ranks_of_which_one_may_share_its_device():
    with Fresh():
        errors = world(3, lambda c: make(c, share_device=c.rank == 2))
    assert len({str(error) for error in errors}) == 1
    assert "different values of share_device: False (ranks 0, 1), True (rank 2)" in str(errors[0])


def test_ranks_of_different_versions(monkeypatch):
    monkeypatch.setattr(survey_module, "__version__", property)
    real = survey_module._facts

    def facts(drv, device, wish):
        import dataclasses

        return dataclasses.replace(real(drv, device, wish), version=f"1.{device}")

    monkeypatch.setattr(survey_module, "_facts", facts)
    errors = world(2, make)
    assert "different versions of the library: 1.0 (rank 0), 1.1 (rank 1)" in str(errors[1])


def test_misuse_of_arguments():
    def program(c):
        with pytest.raises(ValueError, match="nbytes is 0"):
            make(c, 0)
        memory = make(c)
        with pytest.raises(ValueError, match=r"rank is 2; expected 0\.\.1"):
            memory.address(2)
        memory.close()

    assert world(2, program) == [None, None]


# Ends


def test_close_twice_and_use_after():
    def program(c):
        memory = make(c)
        memory.close()
        memory.close()
        memory.abandon()
        with pytest.raises(ClosedError):
            memory.local  # noqa: B018

    assert world(2, program) == [None, None]


def test_abandon_is_local():
    def program(c):
        memory = make(c, multicast=True)
        write(memory, pattern(c.rank, 100))
        c.barrier("written")
        if c.rank == 0:
            memory.abandon()
            memory.abandon()
        c.barrier("rank 0 has left")
        if c.rank != 0:  # what is mapped stays
            assert read(memory, 0, 100) == pattern(0, 100)
            memory.abandon()

    with Fresh():
        assert world(3, program) == [None] * 3


def test_close_while_another_rank_is_gone_names_it():
    def program(c):
        memory = make(c)
        if c.rank == 1:
            memory.abandon()
            return None
        c.timeout = 0.3
        with pytest.raises(RendezvousTimeout) as caught:
            memory.close()
        memory.abandon()
        return caught.value.missing

    with Fresh():
        assert world(3, program) == [(1,), None, (1,)]


def test_an_object_that_is_dropped_gives_its_memory_back():
    def program(c):
        memory = make(c, multicast=True)
        assert memory.nbytes
        del memory
        gc.collect()
        c.barrier("dropped")

    with Fresh():
        assert world(3, program) == [None] * 3


def test_an_exception_on_one_rank_releases_the_others():
    def program(c):
        memory = make(c)
        try:
            if c.rank == 0:
                raise KeyError("application")
            memory.close()
        except KeyError as error:
            c.give_up(repr(error))
            memory.abandon()
            raise
        except SetupError:
            memory.abandon()
            raise

    with Fresh() as run:
        errors = world(3, program)
    assert run.seconds < 5
    assert isinstance(errors[0], KeyError)
    assert [str(error) for error in errors[1:]] == ["rank 0 gave up: KeyError('application')"] * 2


def exit_without_close(comm, how):
    communicator = Communicator(comm, timeout=20)
    memory = make(communicator, multicast=True)
    if how == "global":
        globals()["kept"] = memory
    elif how == "cycle":
        loop = [memory]
        loop.append(loop)
    return True


@pytest.mark.parametrize("how", ["global", "cycle"])
def test_exit_without_close(how):
    assert mpirun.run(exit_without_close, 2, multicast=True, how=how) == [True, True]


def test_exit_without_close_says_nothing_on_stderr():
    code = (
        "from helpers.symmetric import make\n"
        "from lamport_numba import run_ranks\n"
        "from lamport_numba.symmetric import Communicator\n"
        "kept = run_ranks(2, lambda comm: make(Communicator(comm), multicast=True))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def fork(comm):
    communicator = Communicator(comm, timeout=20)
    memory = make(communicator, multicast=True)
    child = os.fork()
    if child == 0:
        told = []
        for use in (memory.close, lambda: memory.local, lambda: communicator.barrier("x"), memory.abandon):
            try:
                use()
            except ClosedError as error:
                told.append("fork" in str(error))
        os._exit(7 if told == [True] * 3 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write(memory, pattern(communicator.rank, 100))  # the child's abandon has touched nothing of ours
    communicator.barrier("written")
    assert [read(memory, rank, 100) for rank in range(2)] == [pattern(rank, 100) for rank in range(2)]
    memory.close()
    communicator.free()
    return status


def test_the_child_of_a_fork_is_refused_and_harms_nobody():
    assert mpirun.run(fork, 2, multicast=True) == [7, 7]


def test_ctrl_c_on_one_rank_releases_the_others(monkeypatch):
    real = handles.Parcel.__init__

    def interrupted(self, *args):
        if driver._thread.rank == 1:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(handles.Parcel, "__init__", interrupted)

    def program(c):
        try:
            make(c)
        except KeyboardInterrupt:
            return "interrupted"

    with Fresh() as run:
        results = world(3, program)
    assert run.seconds < 5
    assert results[1] == "interrupted"
    assert [str(results[rank]) for rank in (0, 2)] == ["rank 1 gave up: KeyboardInterrupt"] * 2


def test_a_fork_is_refused():
    def program(c):
        memory = make(c)
        memory._pid -= 1
        with pytest.raises(ClosedError, match="fork"):
            memory.close()
        with pytest.raises(ClosedError, match="fork"):
            memory.address(0)
        memory._pid += 1
        memory.close()

    assert world(2, program) == [None, None]


def test_no_descriptor_is_inherited():
    def program(c):
        memory = make(c, multicast=True)
        inherited = [fd for fd in os.listdir("/proc/self/fd") if _inheritable(int(fd))]
        c.barrier("looked")
        memory.close()
        return inherited

    before = [fd for fd in os.listdir("/proc/self/fd") if _inheritable(int(fd))]
    for found in world(3, program):
        assert set(found) <= set(before)


def _inheritable(fd):
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def test_200_constructions_leave_nothing():
    def program(c):
        for _ in range(5):
            make(c, multicast=True).close()
        before = descriptors(), mappings()
        c.barrier("before")
        for _ in range(200):
            make(c, multicast=True).close()
        c.barrier("after")
        return before, (descriptors(), mappings())

    with Fresh():
        results = world(2, program)
    (fds, maps), (fds_after, maps_after) = results[0]
    assert fds_after <= fds + 2
    assert maps_after <= maps + 4


def test_50_failed_constructions_leave_nothing():
    def program(c):
        before = None
        for _ in range(50):
            with pytest.raises(MulticastUnavailable):
                make(c, multicast=True)
            before = before or (descriptors(), mappings())
        c.barrier("after")
        return before, (descriptors(), mappings())

    with Fresh(), emulator.injected("cuMulticastBindMem", code=2, rank=1, times=None):
        results = world(2, program)
    (fds, maps), (fds_after, maps_after) = results[0]
    assert fds_after <= fds + 2
    assert maps_after <= maps + 4
