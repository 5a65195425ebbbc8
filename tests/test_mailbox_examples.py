"""The mailbox's examples, as a user starts them: under mpirun, on whatever device there is."""

import importlib.util
import sys

import pytest
from helpers import mpirun, ranks

EXAMPLES = mpirun.ROOT / "examples"


def example(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["fused_norm", "argmax_sampling"])
def test_example_agrees_with_numpy_under_mpirun(name):
    options = ["--steps", "5", *(["--share-device"] if ranks.on_gpu() else [])]
    done = mpirun.command([str(EXAMPLES / f"{name}.py"), *options], 4, timeout=100)
    assert "4 ranks" in done.stdout  # perhaps after codes of the terminal that other ranks print as they end


def run_norm(comm, length):
    return example("fused_norm").run(comm, length=length, steps=2, timeout=20)


@pytest.mark.parametrize("world", [1, 3])
def test_the_norm_of_any_world_and_length(world):
    for length in (1, 5000):
        assert max(ranks.each(run_norm, world, length=length)) < 1e-5


def run_sampling(comm):
    return example("argmax_sampling").run(comm, vocabulary=1500, steps=6, timeout=20)


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_draws_the_same_tokens(world):
    found = ranks.each(run_sampling, world)
    assert len(set(map(tuple, found))) == 1
    assert found[0][3] == 750, "of two NaNs the first"
