"""Captured sizes by default and on request, and the size of a live batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from graphkit.errors import ConfigError, SizeError
from graphkit.graphs import SizeTable, default_batch_sizes

FUZZ = settings(deadline=None, derandomize=True, max_examples=150)


def is_default(size):
    """The rule of SGLang: 1-8 by 1, 10-32 by 2, 40-64 by 4, 72-256 by 8, then by 16."""
    if size <= 8:
        return size >= 1
    if size <= 32:
        return size % 2 == 0
    if size <= 64:
        return size >= 40 and size % 4 == 0
    return size % (8 if size <= 256 else 16) == 0


@st.composite
def tables(draw):
    largest = draw(st.integers(1, 300))
    sizes = draw(st.none() | st.sets(st.integers(1, largest)))
    return SizeTable(largest, sizes, multiple_of=draw(st.integers(1, 17)))


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, (1,)),
        (13, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13)),
        (
            300,
            (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), 272, 288, 300),
        ),
    ],
)
def test_default_sizes(largest, sizes):
    assert default_batch_sizes(largest) == sizes
    assert SizeTable(largest).sizes == sizes


@FUZZ
@given(st.integers(1, 1200))
def test_default_sizes_follow_the_rule(largest):
    wanted = {size for size in range(1, largest) if is_default(size)} | {largest}
    assert default_batch_sizes(largest) == tuple(sorted(wanted))


@pytest.mark.parametrize(
    ("given_sizes", "sizes"),
    [
        ([], (16,)),
        ([16], (16,)),
        ([4, 1, 2], (1, 2, 4, 16)),
        ((8,), (8, 16)),
        ({2, 3}, (2, 3, 16)),
        (range(5, 8), (5, 6, 7, 16)),
        (iter([1, 3]), (1, 3, 16)),
    ],
)
def test_given_sizes_are_sorted_and_include_the_largest(given_sizes, sizes):
    table = SizeTable(16, given_sizes)
    assert table.sizes == tuple(table) == sizes
    assert len(table) == len(sizes)
    assert repr(table) == f"SizeTable({list(sizes)})"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([1, 0], r"batch_sizes must hold ints >= 1, got 0"),
        ([-4], r"got -4"),
        ([1.0], r"got 1\.0"),
        ([True], r"got True"),
        (["2"], r"got '2'"),
        ([None], r"got None"),
        ([4, 17], r"batch_sizes holds 17, but max_batch_size is 16. Remove it, or raise"),
        ([1, 2, 1], r"batch_sizes holds a size twice: \[1, 2, 1\]"),
        (4, r"batch_sizes .*4"),
        ("1,2", r"batch_sizes must be an iterable of ints, got '1,2'"),
    ],
)
def test_invalid_sizes_are_refused(sizes, text):
    with pytest.raises(ConfigError, match=text) as caught:
        SizeTable(16, sizes)
    assert caught.value.field == "batch_sizes"


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_bounds_must_be_positive_ints(value):
    with pytest.raises(ConfigError) as caught:
        SizeTable(value)
    assert caught.value.field == "max_batch_size"
    with pytest.raises(ConfigError) as caught:
        SizeTable(8, multiple_of=value)
    assert caught.value.field == "multiple_of"


@pytest.mark.parametrize(
    ("largest", "sizes", "multiple", "captured"),
    [
        (6, [1, 2, 5], 4, (4, 8)),
        (8, None, 4, (4, 8)),
        (12, [3, 4, 12], 3, (3, 6, 12)),
        (2, None, 16, (16,)),
    ],
)
def test_aligned_sizes_are_rounded_up(largest, sizes, multiple, captured):
    table = SizeTable(largest, sizes, multiple_of=multiple)
    assert table.sizes == captured
    assert table.largest == captured[-1]


@FUZZ
@given(tables())
def test_every_batch_gets_the_smallest_size_that_holds_it(table):
    assert all(size % table.multiple_of == 0 for size in table)
    assert list(table) == sorted(set(table))
    assert table.largest >= table.max_batch_size
    for live in range(1, table.largest + 1):
        assert table.fits(live)
        assert table.fit(live) == min(size for size in table if size >= live)


@FUZZ
@given(tables(), st.integers(1, 1000))
def test_a_batch_beyond_the_largest_size_is_refused(table, more):
    live = table.largest + more
    assert not table.fits(live)
    with pytest.raises(SizeError, match=f"batch of {live} .*largest is {table.largest}") as caught:
        table.fit(live)
    assert (caught.value.batch_size, caught.value.largest) == (live, table.largest)


def test_an_empty_batch_has_size_0():
    table = SizeTable(8, [4])
    assert table.fits(0)
    assert table.fit(0) == 0


@pytest.mark.parametrize("batch_size", [-1, 1.0, "1", None, True])
def test_a_batch_size_must_be_a_count(batch_size):
    for ask in (SizeTable(16).fits, SizeTable(16).fit):
        with pytest.raises(ConfigError, match="batch_size must be an int >= 0, got ") as caught:
            ask(batch_size)
        assert caught.value.field == "batch_size"
