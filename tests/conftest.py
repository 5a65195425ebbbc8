"""Fixtures only; code that tests share is in tests/helpers."""

from helpers import environment

environment.of_this_process()
