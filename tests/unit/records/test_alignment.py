"""Equal keys are paired in order, as many as possible."""

from __future__ import annotations

import itertools

from hypothesis import given, settings, strategies as st

from graphkit.views.diff.nodes import align

sequence = st.lists(st.sampled_from("abcd"), max_size=12)


def most_pairs(before, after):
    """The length of the longest common subsequence, by the textbook's table."""
    row = [0] * (len(after) + 1)
    for key in before:
        last = 0
        for j, other in enumerate(after, 1):
            last, row[j] = row[j], last + 1 if key == other else max(row[j], row[j - 1])
    return row[-1]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(sequence, sequence)
def test_pairs_are_equal_in_order_and_as_many_as_can_be(before, after):
    pairs = align(before, after)
    assert all(before[i] == after[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert len(pairs) == most_pairs(before, after)


def test_only_an_inserted_key_has_no_pair():
    layers = ["norm", "gemm", "gelu", "gemm"] * 300
    more = [*layers[:602], "reduce", *layers[602:]]
    assert align(layers, more) == [(i, i + (i >= 602)) for i in range(1200)]


class CountedKey(str):
    """A key that counts comparisons."""

    __slots__ = ()
    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other):
        CountedKey.comparisons += 1
        return str.__eq__(self, other)


def test_the_work_grows_with_the_square_of_the_insertions_alone():
    """Not with the product of the lengths, here 800,000, though few keys repeat often."""
    names, num_layers = ("norm", "gemm", "reduce", "reduce", "gelu"), 200
    after = [CountedKey(name) for _ in range(num_layers) for name in names]
    before = [key for at, key in enumerate(after) if at % 5 != 3]
    CountedKey.comparisons = 0
    assert len(align(before, after)) == len(before)
    assert CountedKey.comparisons < len(after) + 2 * num_layers**2


def test_unrelated_sequences_are_not_paired():
    assert align(list(range(1600)), list(reversed(range(1600)))) == []
    assert align(["a"] * 5, ["b"] * 5) == []
