"""The mailbox and the tagged all-gather on the adversarial fabric: pairs land late, in any order; lanes run by lot.

Each guarantee has its control: a protocol with a part left out, which the same adversary must catch.
"""

import pytest
import test_mailbox_epochs as epochs
import test_mailbox_operations as operations
import test_tagged_allgather as tagged
from helpers import ranks

pytestmark = pytest.mark.skipif(ranks.on_gpu(), reason="the fabric of a GPU cannot be chosen")


def adversary(function, world, seed, **arguments):
    return ranks.each(function, world, fabric="adversarial", seed=seed, timeout=120, **arguments)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("space", operations.SPACES)
def test_pairs_of_a_batch_may_land_in_any_order(space, seed):
    world = 1 if space == "scratch" else 2
    for operation in (operations.WORD, operations.WORDS_2):
        found = adversary(operations.run_exchange, world, seed, space=space, operation=operation, parties=2, places=7)
        assert found == [[]] * world


@pytest.mark.parametrize("seed", range(3))
def test_epochs(seed):
    assert adversary(epochs.run_eager, 3, seed, launches=12) == [[]] * 3


@pytest.mark.parametrize("space", operations.SPACES)
def test_a_flag_without_its_fence_overtakes_the_data(space):
    """A control: the adversary catches what publish is for, and publish stands the same seeds."""
    world = 1 if space == "scratch" else 2
    seeds = range(4)
    assert any(sum(adversary(operations.run_announced, world, seed, space=space, fence=False)) for seed in seeds)
    for seed in seeds:
        assert adversary(operations.run_announced, world, seed, space=space, fence=True) == [0] * world


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transport", tagged.TRANSPORTS)
def test_the_collective(transport, seed):
    sizes = [64, 16, 640, 33, 64, 16, 16, 640, 128]
    assert adversary(tagged.run_sizes, 3, seed, transport=transport, sizes=sizes, capacity=1024) == [[]] * 3


@pytest.mark.parametrize("transport", tagged.TRANSPORTS)
def test_the_collective_across_the_wrap(transport):
    found = adversary(tagged.run_wrap, 2, 5, transport=transport, before=1, parity=0, sizes=[16, 64, 16, 512, 512])
    assert found == [[]] * 2


@pytest.mark.parametrize("transport", tagged.TRANSPORTS)
def test_a_kernel_that_looks_at_three_tags_of_four_is_caught(monkeypatch, transport):
    """A control: the adversary delays each pair of a pack by itself."""
    tagged.edit_kernels(monkeypatch, "setp.ne.or.b32 %late, %tag3, %tag, %late;", "")
    sizes = [64, 64, 512, 64]
    found = [adversary(tagged.run_sizes, 2, seed, transport=transport, sizes=sizes) for seed in range(4)]
    assert any(any(each) for each in found)
