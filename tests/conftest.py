"""Fixtures only; code that tests share is in tests/helpers."""

import logging
import signal

import pytest
from helpers import environment

environment.of_this_process()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _answers_for_its_own_leaks_only():
    from helpers import leaks

    leaks.forgive()


def pytest_unconfigure():
    """Some tests abandon ranks on purpose, and each has answered for its own leaks: nothing of it is told at exit."""
    from lamport_numba import emulator

    emulator.configure(leak_report=False)
    logging.getLogger("lamport_numba").setLevel(logging.ERROR)
