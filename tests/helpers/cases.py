"""The library's own cases (``lamport_numba.selftest``) under run_ranks and under mpirun."""

from lamport_numba import run_ranks
from lamport_numba.selftest import CASES, World, run_case

TRANSPORTS = ("peer", "multicast")


def run_cases(comm, names, **options):
    """Run these cases on this rank and return their results as plain values; for ``mpirun.run``."""
    return [run_case(name, CASES[name], World(comm, options=options)).as_dict() for name in names]


def in_threads(name_or_function, ranks, *, transport, largest=None, limit=120.0, **settings):
    """Run a case in a world of threads and return its result, which is the same on every rank.

    ``settings`` are those of run_ranks: fabric, seed, residency.
    """
    function = CASES[name_or_function] if isinstance(name_or_function, str) else name_or_function

    def rank(comm):
        world = World(comm, options={"transport": transport}, largest=largest)
        return run_case(function.__name__, function, world)

    results = run_ranks(ranks, rank, timeout=limit, **settings)
    assert all(result.problems == results[0].problems for result in results)
    return results[0]


def assert_passed(result, transport=None):
    """Fail with the problems of all ranks; with ``transport``, it must have been used."""
    found = result if isinstance(result, dict) else result.as_dict()
    assert found["passed"], f"{found['name']} by {', '.join(found['transports'])}:\n" + "\n".join(found["problems"])
    if transport is not None and found["transports"]:
        assert transport in found["transports"]
