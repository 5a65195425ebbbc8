"""Fixtures only; code that tests share is in tests/helpers."""

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
