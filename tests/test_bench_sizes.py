"""Sizes as the commands stress and bench take them."""

import random

import pytest

from lamport_numba.bench import sizes
from lamport_numba.bench.sizes import Span


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("16", [Span(16, 16)]),
        ("16,1K,1M", [Span(16, 16), Span(1024, 1024), Span(1 << 20, 1 << 20)]),
        (" 64k , 2KiB ", [Span(65536, 65536), Span(2048, 2048)]),
        ("16-256K", [Span(16, 262144)]),
        ("48,4K-64KB", [Span(48, 48), Span(4096, 65536)]),
    ],
)
def test_sizes_are_read(text, spans):
    assert sizes.parse(text) == spans


@pytest.mark.parametrize("text", ["", "0", "8", "17", "1.5K", "-16", "4K-1K", "16,,32", "K", "16T"])
def test_what_is_no_size_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r"size|range|bytes"):
        sizes.parse(text)


def test_ranges_double_for_the_bench():
    assert sizes.doublings(sizes.parse("16-128,96,1K")) == [16, 32, 64, 96, 128, 1024]


def test_draws_are_packs_within_the_span_and_reach_both_ends():
    rng = random.Random(1)
    drawn = {sizes.draw([Span(16, 160)], rng) for _ in range(2000)}
    assert drawn == set(range(16, 161, 16))


def test_draws_are_small_and_large_alike():
    rng = random.Random(2)
    drawn = [sizes.draw([Span(16, 262144)], rng) for _ in range(2000)]
    assert sum(size < 2048 for size in drawn) == pytest.approx(1000, abs=150)


def test_text_reads_back():
    for size in (16, 48, 1024, 1536, 65536, 1 << 20, 3 << 20):
        assert sizes.parse(sizes.text(size)) == [Span(size, size)]
