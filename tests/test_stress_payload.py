"""The stress run's payload: what is told of a wrong word; the device makes and checks the same words as numpy."""

import numpy as np
import pytest

from lamport_numba.bench import payload
from lamport_numba.bench.payload import Mismatch, Payloads, State, expected, mix, origin, words
from lamport_numba.bench.rig import Rig, address_of
from lamport_numba.driver import select

SENTINEL = payload.SENTINEL


def test_words_differ_by_call_rank_and_position():
    seen = np.concatenate([words(call, rank, 256) for call in range(20) for rank in range(4)])
    assert len(np.unique(seen)) == len(seen)


def test_the_sentinel_is_expected_as_0():
    call = next(call for call in range(1 << 20) if SENTINEL in words(call, 0, 65536))
    place = int(np.flatnonzero(words(call, 0, 65536) == SENTINEL)[0])
    assert expected(call, 1, 65536)[place] == 0


def test_a_word_tells_where_it_is_from():
    assert origin(int(words(98, 1, 4096)[700]), 100, 2, 4096) == (98, 1, 700)
    assert origin(int(words(100, 0, 4096)[3]), 100, 2, 4096) == (100, 0, 3)
    assert origin(int(words(5000, 0, 64)[3]), 100, 2, 64) is None
    assert origin(0, 100, 2, 4096) is None


def test_the_story_names_the_stale_call():
    stale = Mismatch(call=100, rank=1, word=6, expected=mix(100, 1), got=int(words(97, 1, 4096)[6]))
    assert "word 6 of rank 1 in call 97, 3 calls earlier" in stale.story(2, 4096)
    assert "the sentinel" in Mismatch(0, 0, 0, 1, SENTINEL).story(2, 64)
    assert "no payload of a call near" in Mismatch(5, 0, 0, 1, 0x12345678).story(2, 64)


@pytest.fixture
def rig():
    drv = select()
    device = drv.default_device()
    with drv.current(device):
        rig = Rig(drv, device)
        yield rig
        rig.close()


@pytest.mark.parametrize("nbytes", [16, 32, 528, 4096, 200_000])
@pytest.mark.parametrize("pdl", [True, False])
def test_the_device_makes_the_words_that_numpy_makes(rig, nbytes, pdl):
    payloads = Payloads(rig, 3, 4, pdl=pdl)
    array = rig.array(nbytes + 16)
    rig.zero(address_of(array), nbytes + 16)
    payloads.advance(1000)
    payloads.fill(address_of(array), nbytes, 7)
    found = rig.read(address_of(array), nbytes + 16)
    assert np.array_equal(found[:-4], words(1007, 3, nbytes))
    assert not found[-4:].any()  # nothing past the end


@pytest.mark.parametrize("nbytes", [16, 48, 4096])
def test_a_right_output_counts_nothing(rig, nbytes):
    payloads = Payloads(rig, 0, 3, pdl=True)
    array = rig.array(3 * nbytes)
    rig.write(address_of(array), expected(5, 3, nbytes))
    payloads.check(address_of(array), nbytes, 5)
    payloads.advance(1)
    assert payloads.read() == State(1, 0, 0, None)


def test_the_sentinel_in_a_payload_is_checked_as_0(rig):
    call = next(call for call in range(1 << 20) if SENTINEL in words(call, 0, 65536))
    payloads = Payloads(rig, 0, 1, pdl=True)
    array = rig.array(65536)
    payloads.fill(address_of(array), 65536, call)
    payloads.check(address_of(array), 65536, call)
    found = payloads.read()
    assert found.bad_words == 1
    assert found.first is not None
    assert (found.first.expected, found.first.got) == (0, SENTINEL)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 95, 96, 191])
def test_any_wrong_word_is_counted_and_told_in_full(rig, place):
    nbytes, world = 256, 3
    payloads = Payloads(rig, 0, world, pdl=True)
    array = rig.array(world * nbytes)
    right = expected(12, world, nbytes)
    wrong = right.copy()
    wrong[place] ^= 1
    for content in (right, wrong):
        rig.write(address_of(array), content)
        payloads.check(address_of(array), nbytes, 12)
    found = payloads.read()
    source, word = divmod(place, nbytes // 4)
    assert found == State(0, 1, 1, Mismatch(12, source, word, int(right[place]), int(wrong[place])))


def test_all_wrong_words_are_counted_and_the_first_call_is_kept(rig):
    nbytes, world = 1024, 2
    payloads = Payloads(rig, 0, world, pdl=True)
    array = rig.array(world * nbytes)
    rig.write(address_of(array), expected(3, world, nbytes))
    payloads.check(address_of(array), nbytes, 4)  # an output of the call before
    payloads.check(address_of(array), nbytes, 5)
    found = payloads.read()
    assert (found.bad_words, found.bad_calls) == (2 * world * nbytes // 4, 2)
    assert found.first is not None
    assert found.first.call == 4
    assert "in call 3, 1 calls earlier" in found.first.story(world, nbytes)


def test_calls_are_counted_on_the_device_by_every_replay_of_a_graph(rig):
    payloads = Payloads(rig, 1, 2, pdl=True)
    array = rig.array(64)

    def two_calls():
        payloads.fill(address_of(array), 64, 0)
        payloads.fill(address_of(array), 64, 1)
        payloads.advance(2)

    graph = rig.capture(two_calls)
    for replay in range(3):
        graph.launch()
        assert np.array_equal(rig.read(address_of(array), 64), words(2 * replay + 1, 1, 64))
    graph.close()
    assert payloads.read().calls == 6
