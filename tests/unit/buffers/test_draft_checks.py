"""Draft-extend batches that contradict themselves, as far as the host can see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from graphkit.buffers import AcceptedCounts, DraftExtendInputs, MultiLayerDraftExtendInputs
from graphkit.errors import InputError


def extend(tokens, drafts=None, rows=None, cls=DraftExtendInputs, width=4, **over):
    """A batch of these counts; in v1's form if no ``rows`` per request are given."""
    tokens = np.array(tokens, np.int32)
    total = int(tokens.sum()) if rows is None else rows * len(tokens)
    fields = {
        "req_pool_indices": np.arange(len(tokens)),
        "extend_seq_lens": tokens if rows is None else np.full(len(tokens), rows, np.int32),
        "num_accepted_drafts": tokens - 1 if drafts is None else np.array(drafts, np.int32),
        "num_accepted_tokens": tokens,
        "input_ids": np.zeros(total),
        "select_index": np.arange(len(tokens)) * width + tokens - 1,
    }
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{**{k: v for k, v in fields.items() if k in names}, **over})


@pytest.mark.parametrize("on", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("batch", "ragged", "text"),
    [
        (extend([2, 3], drafts=[2, 3]), True, "drafts \\+ 1"),
        (extend([2, 3], drafts=[1, 1]), False, "drafts \\+ 1"),
        (extend([2, 5]), True, "to 5, but a request has 1 to 4 rows"),
        (extend([2, 5], rows=4), False, "to 5, but a request has 1 to 4 rows"),
        (extend([2, 3], input_ids=np.zeros(4)), True, "sums to 5, but the batch has 4"),
        (extend([2, 3], input_ids=np.zeros(8)), True, "sums to 5, but the batch has 8"),
        (extend([0, 3], drafts=[-1, 2]), True, "drafts \\+ 1"),
    ],
)
def test_counts_that_contradict(batch, ragged, text, on):
    for name in ("num_accepted_drafts", "num_accepted_tokens"):
        batch = dataclasses.replace(batch, **{name: on(np.asarray(getattr(batch, name)))})
    with pytest.raises(InputError, match=text) as caught:
        DraftExtendInputs.check(batch, batch.num_tokens, 4, ragged)
    assert caught.value.field == "num_accepted_tokens"


@pytest.mark.parametrize(
    ("batch", "ragged"),
    [
        (extend([1]), True),
        (extend([4, 1, 3]), True),
        (extend([4, 1, 3], rows=4), False),
        (extend([]), True),
        (extend([2, 2], num_accepted_drafts=None), True),
        (extend([2, 2], num_accepted_drafts=None, num_accepted_tokens=None), False),
        (extend([2, 2], num_accepted_tokens=torch.empty(2, device="meta")), True),
    ],
)
def test_counts_that_agree_or_cannot_be_seen(batch, ragged):
    DraftExtendInputs.check(batch, batch.num_tokens, 4, ragged)


@pytest.mark.parametrize(
    ("batch", "ragged", "field"),
    [
        (extend([2, 3], extend_seq_lens=np.array([3, 2])), True, "extend_seq_lens"),
        (extend([2, 3], rows=4, extend_seq_lens=np.array([5, 3])), False, "extend_seq_lens"),
        (extend([2, 3], rows=4, extend_seq_lens=np.array([4, -1])), False, "extend_seq_lens"),
        (extend([2, 3], rows=4, extend_seq_lens=np.array([4, 0])), False, "extend_seq_lens"),
        (
            extend([2, 3], rows=4, extend_seq_lens=np.array([0, 4], np.int32)),
            False,
            "extend_seq_lens",
        ),
        (extend([2, 3], num_accepted_tokens=[1, 9]), True, "num_accepted_tokens"),
        (extend([9, 3], num_accepted_drafts=None), True, "num_accepted_tokens"),
    ],
)
def test_what_else_the_host_can_see(batch, ragged, field):
    """Lengths that reach into the next request's rows; lists; one count bound, the other wrong."""
    with pytest.raises(InputError) as caught:
        DraftExtendInputs.check(batch, batch.num_tokens, 4, ragged)
    assert caught.value.field == field


@pytest.mark.parametrize("select_index", [[3, 3], [0, 8], [-1, 4]])
def test_a_select_index_outside_its_request_is_refused(select_index):
    """Clamped in the graph it would select another token than the caller's."""
    batch = extend(
        [2, 3], rows=4, cls=MultiLayerDraftExtendInputs, select_index=np.array(select_index)
    )
    with pytest.raises(InputError) as caught:
        MultiLayerDraftExtendInputs.check(batch, batch.num_tokens, 4, False)
    assert caught.value.field == "select_index"


def test_a_pair_made_by_accepted_counts_passes():
    counts = AcceptedCounts.from_drafts(np.array([0, 3, 1], np.int32)).fields()
    DraftExtendInputs.check(extend([1, 4, 2], **counts), 7, 4, True)


@pytest.mark.parametrize("cls", [DraftExtendInputs, MultiLayerDraftExtendInputs])
@pytest.mark.parametrize(
    "lengths", [np.zeros(0, np.int32), np.int32(4), np.full((2, 1), 4, np.int32)]
)
def test_lengths_of_another_shape_are_left_to_the_writer(cls, lengths):
    """It refuses them by name and shape."""
    batch = extend([2, 3], rows=4, cls=cls, extend_seq_lens=lengths)
    cls.check(batch, batch.num_tokens, 4, False)


@pytest.mark.parametrize("select_index", [np.int64(3), 3, np.zeros((2, 1), np.int64)])
def test_a_select_index_of_another_shape_is_left_to_the_writer(select_index):
    batch = extend([2, 3], rows=4, cls=MultiLayerDraftExtendInputs, select_index=select_index)
    MultiLayerDraftExtendInputs.check(batch, batch.num_tokens, 4, False)
