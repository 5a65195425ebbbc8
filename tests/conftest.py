"""Fixtures only; code that tests share is in tests/helpers."""

import pytest
from helpers import environment

environment.of_this_process()


@pytest.fixture(autouse=True)
def _answers_for_its_own_leaks_only():
    from helpers import leaks

    leaks.forgive()
