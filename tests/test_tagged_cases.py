"""The all-gather's own cases, which every machine must pass, by TaggedAllGather: exact, so that no word may differ."""

import pytest
from helpers import ranks
from helpers.cases import TRANSPORTS, assert_passed

from lamport_numba import TaggedAllGather
from lamport_numba.selftest import CASES, World, run_case


def run_one(comm, name, transport):
    options = {"transport": transport}
    world = World(comm, collective=TaggedAllGather, exact=True, options=options, largest=1 << 13)
    return run_case(name, CASES[name], world).as_dict()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_in_threads(name, world, transport):
    if ranks.on_gpu() and transport == "multicast":
        pytest.skip("never on a borrowed GPU")
    for result in ranks.each(run_one, world, name=name, transport=transport, timeout=120):
        assert_passed(result, transport)
