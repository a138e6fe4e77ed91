"""As many places as can be are paired, in order."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from graphkit.diff.alignment import align

sequence = st.lists(st.sampled_from("abcd"), max_size=12)


def most_pairs(before, after):
    """The length of the longest common subsequence, by the textbook's table."""
    row = [0] * (len(after) + 1)
    for key in before:
        last = 0
        for j, other in enumerate(after, 1):
            last, row[j] = row[j], last + 1 if key == other else max(row[j], row[j - 1])
    return row[-1]


@settings(deadline=None, derandomize=True, max_examples=400)
@given(sequence, sequence)
def test_pairs_are_equal_in_order_and_as_many_as_can_be(before, after):
    pairs = align(before, after)
    assert all(before[i] == after[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert len(pairs) == most_pairs(before, after)


def test_what_was_put_in_between_is_the_only_thing_without_a_pair():
    layers = ["norm", "gemm", "gelu", "gemm"] * 300
    more = [*layers[:602], "reduce", *layers[602:]]
    assert align(layers, more) == [(i, i + (i >= 602)) for i in range(1200)]


def test_equal_layers_with_many_insertions_take_no_time():
    layers = ["norm", "gemm", "reduce", "gelu"] * 750
    more = [key for layer in range(750) for key in ("norm", "gemm", "reduce", "reduce", "gelu")]
    start = time.process_time()
    assert len(align(layers, more)) == len(layers)
    assert time.process_time() - start < 3


def test_what_has_nothing_to_do_with_each_other_is_not_paired_by_force():
    assert align(list(range(4000)), list(reversed(range(4000)))) == []
    assert align(["a"] * 5, ["b"] * 5) == []
