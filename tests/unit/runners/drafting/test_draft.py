"""DRAFT: the trees that replays make, against trees grown by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import ForwardOutput
from graphkit.ops import build_tree

SHAPES = [
    (steps, topk, width)
    for steps in (1, 2, 3, 4)
    for topk in (1, 2, 3, 4)
    for most in [1 + topk + (steps - 1) * topk * topk]
    for width in (
        [steps + 1] if topk == 1 else sorted({2, topk + 2, most} & set(range(2, most + 1)))
    )
]
"""(num_steps, topk, num_draft_tokens)"""
TREE = (3, 2, 6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_makes_the_tree_by_hand(draft_case, poison, assert_in_step, shape, assert_same):
    """Also in buffers full of garbage, and at every size that holds the batch."""
    case = draft_case(*shape)
    runner = case.runner()
    for seed, requests in enumerate((4, 1, 3)):
        batch = case.batch(requests, seed=seed)
        poison(runner)
        output = runner.replay(batch, clone=True)
        case.check(output, batch)
        assert_same(runner.replay(batch, padded_batch_size=4), output)
        assert_same(runner.run_padded(batch), output)
        assert_same(runner.fall_back(batch), output)
        assert output.parent_list.shape == (requests, shape[1] * (shape[0] - 1) + 1)
        assert {rows.dtype for rows in output.tensors().values()} == {torch.int64}
    assert_in_step(runner)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_sizes_grow_and_shrink(draft_case, kind):
    case = draft_case(*TREE)
    runner = case.runner()
    calls = case.model.calls
    for seed, requests in enumerate([4, 1, 3, 2, 2, 4, 1, 1, 3, 4]):
        batch = case.batch(requests, seed=seed, kind=kind)
        case.check(runner.replay(batch), batch)
    assert case.model.calls == calls, "Python ran again"
    assert runner.stats.padded_rows == (1 + 1) * 2


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_one_forward_less_than_steps(draft_case, steps):
    case = draft_case(steps, 2, 3)
    case.runner(capture=False).fall_back(case.batch(3))
    assert case.model.calls == steps - 1


def test_a_staged_batch_is_a_batch(draft_case, stage):
    case = draft_case(*TREE)
    runner = case.runner()
    for seed in range(6):
        batch = case.batch(3, seed=seed)
        staged = stage(runner, batch)
        assert staged.out_cache_loc.shape == (3 * 2 * 3,)
        assert staged.topk_p.shape == staged.topk_index.shape == (3, 2)
        case.check(staged.replay(), batch)


@pytest.mark.parametrize("shape", [(3, 2, 6), (4, 3, 9), (4, 1, 5), (1, 4, 3), (2, 4, 21)], ids=str)
def test_build_tree_links_what_was_drafted(draft_case, shape):
    case = draft_case(*shape)
    steps, topk, width = shape
    batch = case.batch(3, seed=5)
    output = case.runner().replay(batch)
    seq_lens = torch.from_numpy(batch.seq_lens)
    mask, positions, _, _, _, tokens = build_tree(
        torch.tensor([7, 8, 9]), output.parent_list, output.top_scores_index,
        output.draft_tokens, seq_lens, steps, topk, width,
    )  # fmt: skip
    for request, hand in enumerate(case.by_hand(batch)):
        sees = hand.tree.sees(width)
        assert [set(row.nonzero().flatten().tolist()) for row in mask[request]] == sees
        depths = [seq_lens[request].item() + len(seen) - 1 for seen in sees]
        assert positions.view(3, width)[request].tolist() == depths
        chosen = [node.token for node in hand.tree.chosen(width)]
        assert tokens.view(3, width)[request].tolist() == [7 + request, *chosen]


def test_equal_probabilities_leave_one_tree(draft_case, assert_same):
    """All of a step tie: what is chosen has its parents chosen."""
    case = draft_case(4, 3, 14)

    def forward(inputs):
        return ForwardOutput(
            next_token_logits=torch.zeros(inputs.num_tokens, 31) + 0 * inputs.input_ids[:, None],
            hidden_states=torch.zeros(inputs.num_tokens, 8),
        )

    batch = case.batch(3, topk_p=np.full((3, 3), 1 / 31, np.float32))
    runner = case.runner(forward)
    output = runner.replay(batch)
    assert output.top_scores_index[:, :3].tolist() == [[0, 1, 2]] * 3
    for parent_list, chosen in zip(
        output.parent_list.tolist(), output.top_scores_index.tolist(), strict=True
    ):
        parents = [parent_list[number // 3] if number >= 3 else -1 for number in chosen]
        assert set(parents) <= {-1, *chosen}
        assert all(parent < number for parent, number in zip(parents, chosen, strict=True))
    assert_same(output, runner.fall_back(batch))


def test_other_requests_and_pads_do_not_matter(draft_case):
    case = draft_case(*TREE)
    runner = case.runner()
    whole = case.batch(4, seed=3)
    together = runner.replay(whole, clone=True)
    for request in range(4):
        rows = {"req_pool_indices": 1, "seq_lens": 1, "topk_p": 1, "topk_index": 1}
        rows |= {"hidden_states": 1, "positions": 2, "out_cache_loc": 6}
        part = {n: getattr(whole, n)[request * w : (request + 1) * w] for n, w in rows.items()}
        for size in (1, 2, 4):
            alone = runner.replay(type(whole)(**part), padded_batch_size=size)
            for name, tensor in together.tensors().items():
                assert torch.equal(getattr(alone, name)[0], tensor[request])
