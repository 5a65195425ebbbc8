"""While any of four variables is set on any rank, no call of the driver that begins with cuMulticast is made."""

import logging

import pytest

from lamport_numba import driver, run_ranks, settings
from lamport_numba.errors import MulticastUnavailable, SetupError
from lamport_numba.symmetric import survey as survey_module
from lamport_numba.symmetric.communicator import Communicator
from lamport_numba.symmetric.multicast import multicast_disabled
from lamport_numba.symmetric.transport import choose_transport

SWITCHES = {
    "LAMPORT_NUMBA_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class Counting:
    """A driver api that counts the calls that are looked up, and answers what a survey asks."""

    def __init__(self, attributes=()):
        self.names = []
        self.attributes = {"MULTICAST_SUPPORTED": 1, **dict(attributes)}

    def __getattr__(self, name):
        self.names.append(name)
        return getattr(self, f"_{name}")

    def _cuDeviceGet(self, ordinal):
        return 0, ordinal

    def _cuDeviceGetUuid(self, device):
        return 0, type("Uuid", (), {"bytes": bytes([int(device)]) * 16})

    def _cuDeviceGetName(self, length, device):
        return 0, b"Fake" + bytes(length - 4)

    def _cuDeviceGetAttribute(self, attribute, device):
        return 0, self.attributes.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1)

    def _cuDriverGetVersion(self):
        return 0, 13000


def choose(n, requested, off=None, attributes=(), devices=None):
    """What each rank decided or raised, and every call that was looked up. ``off`` maps ranks to environments."""
    apis = [Counting(attributes) for _ in range(n)]

    def body(comm):
        drv = driver.Driver("emulated", apis[comm.rank], comm.rank)
        communicator = Communicator(comm, timeout=10)
        device = comm.rank if devices is None else devices[comm.rank]
        try:
            return choose_transport(communicator, drv, device, requested)
        except Exception as error:
            return error

    with pytest.MonkeyPatch.context() as patch:

        def of_this_thread():
            return settings.multicast_switched_off((off or {}).get(driver._thread.rank, {}))

        patch.setattr(survey_module, "multicast_disabled", of_this_thread)
        return run_ranks(n, body), [name for api in apis for name in api.names]


@pytest.mark.parametrize(("name", "value"), SWITCHES.items())
def test_each_variable_switches_off(name, value, monkeypatch):
    for other in SWITCHES:
        monkeypatch.delenv(other, raising=False)
    assert multicast_disabled() is None
    monkeypatch.setenv(name, value)
    assert multicast_disabled() == f"{name}={value}"
    monkeypatch.setenv(name, {"0": "1", "1": "0"}[value])
    assert multicast_disabled() is None


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("name", "value"), SWITCHES.items())
def test_one_rank_is_enough(rank, name, value):
    decided, calls = choose(3, "auto", {rank: {name: value}})
    assert decided == ["peer"] * 3
    assert not [call for call in calls if call.startswith("cuMulticast")]


def test_asked_for_by_name_it_is_an_error_everywhere():
    errors, _ = choose(3, "multicast", {1: {"NCCL_NVLS_ENABLE": "0"}})
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, MulticastUnavailable) and error.reason == "disabled" for error in errors)
    assert all(error.rank == 1 for error in errors)


def test_without_a_switch_multicast_is_chosen():  # the control of all of the above
    assert choose(3, "auto")[0] == ["multicast"] * 3
    assert choose(3, "multicast")[0] == ["multicast"] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_two_ranks_go_by_peer_unless_asked(n):
    assert choose(n, "auto")[0] == ["peer"] * n
    assert choose(n, "multicast")[0] == ["multicast"] * n


def test_an_attribute_of_zero():
    errors, _ = choose(3, "multicast", attributes={"MULTICAST_SUPPORTED": 0})
    assert {(error.reason, error.rank) for error in errors} == {("attribute", 0)}
    assert choose(3, "auto", attributes={"MULTICAST_SUPPORTED": 0})[0] == ["peer"] * 3


def test_ranks_that_share_a_device_have_no_multicast():
    errors, _ = choose(3, "multicast", devices=[0, 1, 1])
    assert {str(error) for error in errors} == {"multicast needs a device for each rank, and ranks 1 and 2 share one"}


def test_ranks_that_ask_for_different_transports():
    def body(comm):
        communicator = Communicator(comm, timeout=10)
        drv = driver.Driver("emulated", Counting(), comm.rank)
        with pytest.raises(SetupError, match=r"different values of transport: peer \(rank 0\), multicast \(rank 1\)"):
            choose_transport(communicator, drv, comm.rank, ["peer", "multicast"][comm.rank])

    run_ranks(2, body)


def test_an_unknown_transport_is_a_value_error():
    error = choose(1, "pigeon")[0][0]
    assert isinstance(error, ValueError)
    assert "'pigeon'; expected 'auto', 'peer' or 'multicast'" in str(error)


def test_one_log_line_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="lamport_numba"):
        choose(3, "auto", {2: {"NVSHMEM_DISABLE_NVLS": "1"}})
    lines = [record.getMessage() for record in caplog.records if record.name == "lamport_numba"]
    assert lines == ["transport peer: multicast is switched off on rank 2 by NVSHMEM_DISABLE_NVLS=1"]
