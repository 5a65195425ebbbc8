import copy
import pickle

import pytest

from lamport_numba import errors
from lamport_numba.errors import (
    DriverError,
    LamportError,
    MulticastUnavailable,
    PeerTimeout,
    PtxError,
    RendezvousTimeout,
    SetupError,
)


def test_driver_error_names_call_code_number_rank():
    error = DriverError("cuMemMap", 1, rank=3)
    assert (error.call, error.code, error.code_name, error.rank) == ("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE", 3)
    assert str(error) == "rank 3: cuMemMap failed: CUDA_ERROR_INVALID_VALUE (1)"


def test_driver_error_without_rank_does_not_invent_one():
    assert str(DriverError("cuMemMap", 1)) == "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (1)"


def test_code_unknown_to_this_binding():
    assert DriverError("cuMemMap", 54321).code_name == "CUDA_ERROR_54321"


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("cuMulticastBindMem", 2, "multicast slots"),
        ("cuMulticastBindMem", 802, "still starting"),
        ("cuMulticastAddDevice", 401, "fabric manager"),
        ("cuMulticastAddDevice", 1, "device nodes"),
        ("cuMulticastCreate", 401, "IMEX"),
        ("cuMemCreate", 800, "IMEX channel"),
        ("cuMemCreate", 2, "no room"),
        ("cuModuleLoadDataEx", 222, "CUDA 12.1"),
        ("cuModuleLoadData", 222, "CUDA 12.1"),
        ("cuLaunchKernelEx", 201, "no context is current"),
        ("cuInit", 3, "fork"),
        ("cuStreamSynchronize", 700, "restarted"),
        ("cuCtxGetCurrent", 810, "MPS server"),
    ],
)
def test_hint(call, code, words):
    assert words in str(DriverError(call, code))


def test_no_hint_where_nothing_is_known():
    assert errors.hint_for("cuMemMap", 1) is None
    assert errors.hint_for("cuMemAlloc", 401) is not errors.hint_for("cuMulticastCreate", 401)


def test_every_hint_can_be_reached():
    for place, (prefix, code, text) in enumerate(errors._HINTS):
        found = errors.hint_for(prefix or "cuAnything", code)
        assert found == text, f"entry {place} is hidden by an earlier one"


def test_detail_follows_on_a_line_of_its_own():
    assert str(DriverError("cuModuleLoadDataEx", 218, detail="line 3: no\n")).endswith("its log follows\nline 3: no")


def test_driver_error_survives_copy():
    error = DriverError("cuMemCreate", 800, rank=1, detail="x")
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_families():
    for kind in (DriverError, SetupError, PeerTimeout, errors.CallMismatch, errors.ClosedError, errors.EmulatorFault):
        assert issubclass(kind, LamportError)
    assert issubclass(LamportError, RuntimeError)
    assert issubclass(MulticastUnavailable, SetupError)
    assert issubclass(RendezvousTimeout, SetupError)
    assert issubclass(PtxError, ValueError)
    assert issubclass(errors.SettingError, ValueError)


def test_attributes():
    multicast = MulticastUnavailable(
        "off", reason="disabled", rank=2, step="decide", call="cuMulticastCreate", code=801
    )
    assert (multicast.reason, multicast.rank, multicast.step, multicast.call, multicast.code) == (
        "disabled",
        2,
        "decide",
        "cuMulticastCreate",
        801,
    )
    late = RendezvousTimeout("bind", (1, 3), 2.5, rank=0)
    assert (late.stage, late.missing, late.seconds, late.rank) == ("bind", (1, 3), 2.5, 0)
    assert str(late) == "rank 0: waited 2.5 s at 'bind' for ranks 1, 3"
    peer = PeerTimeout(4, 17, 600.0)
    assert (peer.rank, peer.call, peer.seconds) == (4, 17, 600.0)
    assert "rank 4" in str(peer)
    assert "call 17" in str(peer)
    assert "600 s" in str(peer)


def test_ptx_error_quotes_its_line():
    error = PtxError("unknown instruction", line=12, text="    foo.b32 %r1;")
    assert (error.line, error.text) == (12, "    foo.b32 %r1;")
    assert str(error) == "line 12: unknown instruction\n    foo.b32 %r1;"
