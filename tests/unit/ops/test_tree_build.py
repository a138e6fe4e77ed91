"""build_tree on every device against a tree built node by node in plain Python."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import ConfigError, InputError
from graphkit.graphs import RecorderBackend
from graphkit.ops.registration import OPS
from graphkit.ops.tree import build_tree, num_candidates
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy
from op_devices import CPU, CUDA, INTERPRETER, by, by_each, on_cuda

SHAPES = [(1, 1, 2), (1, 5, 4), (3, 1, 4), (2, 2, 7), (3, 2, 6), (4, 3, 17), (5, 8, 33)]
"""(num_steps, topk, num_draft_tokens)"""
HUGE = 2**62


def drafted(requests, num_steps, topk, width, seed=0):
    """Return arguments as a drafter with random scores computes them."""
    torch.manual_seed(seed)
    rows = []
    for _ in range(requests):
        scores = torch.rand(topk)
        parents, all_scores = [-1, *range(topk)], [scores]
        for step in range(1, num_steps):
            grown = (scores[:, None] * torch.rand(topk, topk)).flatten()
            scores, kept = grown.topk(topk)
            all_scores.append(grown)
            parents += (kept + topk + (step - 1) * topk * topk).tolist()
        best = torch.cat(all_scores).topk(width - 1).indices.sort().values
        rows.append((parents[: topk * (num_steps - 1) + 1], best.tolist()))
    parent_list, top_scores_index = (torch.tensor(part).long() for part in zip(*rows, strict=True))
    bonus_tokens, tokens = (
        torch.randint(0, 99, (requests,)),
        torch.randint(0, 99, (requests, width - 1)),
    )
    seq_lens = torch.randint(1, 50, (requests,), dtype=torch.int32)
    return [bonus_tokens, parent_list, top_scores_index, tokens, seq_lens, num_steps, topk, width]


def damaged(requests, num_steps, topk, width, seed=0):
    """Return arguments with any indices in any order, as NaN scores give."""
    args = drafted(requests, num_steps, topk, width, seed)
    for at in (1, 2):
        most = num_candidates(num_steps, topk) + 2
        args[at] = torch.randint(-3, most, args[at].shape)
        args[at].view(-1)[:: 5 + at] = (-1) ** at * HUGE
    return args


def parents_of(parent_list, selected, num_steps, topk):
    """Return the parent of each node of one request, by the contract."""
    parents = [None]
    for node, candidate in enumerate(selected, start=1):
        branch = candidate // topk
        above = parent_list[branch] if 1 <= branch < len(parent_list) else None
        known = above in selected and 0 <= above < num_candidates(num_steps, topk)
        parent = selected.index(above) + 1 if known else 0
        parents.append(parent if parent < node else 0)
    return parents


def expected_tree(bonus, parent_list, top_scores_index, tokens, seq_lens, num_steps, topk, width):
    requests = len(bonus)
    mask = torch.zeros(requests, width, width, dtype=torch.bool)
    positions = seq_lens.long()[:, None].repeat(1, width)
    next_token, next_sibling = torch.full((2, requests, width), -1)
    for b in range(requests):
        parents = parents_of(parent_list[b].tolist(), top_scores_index[b].tolist(), num_steps, topk)
        for node in range(width):
            children = [child for child in range(width) if parents[child] == node]
            for earlier, later in zip([None, *children], children, strict=False):
                if earlier is None:
                    next_token[b, node] = later
                else:
                    next_sibling[b, earlier] = later
            seen = node
            while seen is not None:
                mask[b, node, seen] = True
                positions[b, node] += seen != 0
                seen = parents[seen]
    ids = torch.arange(requests * width).view(requests, width)
    flat = torch.cat([bonus[:, None], tokens], 1).flatten()
    return mask, positions.flatten(), ids, next_token, next_sibling, flat


def assert_same_tree(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_tree_by_hand():
    # Candidates: 0, 1 of step 0; 2, 3 under 0 and 4, 5 under 1; then 2 each under 4 and 2.
    parent_list = torch.tensor([[-1, 0, 1, 4, 2]])
    selected = torch.tensor([[0, 1, 4, 5, 7]])  # 4 and 5 under 1, 7 under 4
    tokens = torch.tensor([[10, 11, 14, 15, 17]])
    mask, positions, ids, next_token, next_sibling, flat = build_tree(
        torch.tensor([9]), parent_list, selected, tokens, torch.tensor([100]), 3, 2, 6
    )
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 1, 0, 1],
    ]
    assert positions.tolist() == [100, 101, 101, 102, 102, 103]
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert next_token.tolist() == [[1, -1, 3, 5, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
    assert flat.tolist() == [9, 10, 11, 14, 15, 17]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [drafted, damaged])
def test_matches_the_tree_built_node_by_node(make, shape):
    for seed in range(3):
        args = make(4, *shape, seed=seed)
        assert_same_tree(build_tree(*args), expected_tree(*args))


@by_each("requests", interpreter=[3], cuda=[0, 1, 33])
@pytest.mark.parametrize("shape", [(0, 1, 1), *SHAPES, (5, 8, 64), (3, 16, 256)])
@pytest.mark.parametrize("make", [drafted, damaged])
def test_kernels_match_the_reference(run, make, shape, requests):
    if run is INTERPRETER and shape[2] > 64:
        pytest.skip("takes the interpreter long")
    args = make(max(requests, 1), *shape)
    args[:5] = [tensor[:requests] for tensor in args[:5]]
    assert_same_tree(run(build_tree, *args), build_tree(*args))


@by(INTERPRETER, CUDA)
def test_a_tree_of_spaced_rows_and_long_lengths(run):
    args = drafted(8, 3, 2, 6)
    args[:5] = [tensor[::2] for tensor in args[:5]]
    args[4] = args[4].long() + 2**33
    assert_same_tree(run(build_tree, *args), build_tree(*args))


def test_a_chain_is_a_lower_triangle():
    mask, positions, _, next_token, next_sibling, _ = build_tree(*drafted(2, 5, 1, 6))
    assert torch.equal(mask, torch.ones(2, 6, 6, dtype=torch.bool).tril())
    assert positions.view(2, 6).diff().eq(1).all()
    assert next_token.tolist() == [[1, 2, 3, 4, 5, -1]] * 2
    assert next_sibling.eq(-1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_damaged_tree_is_a_tree(shape):
    mask, _, _, next_token, next_sibling, _ = build_tree(*damaged(20, *shape))
    assert mask[:, :, 0].all()
    assert not mask.triu(1).any()
    for links in (next_token, next_sibling):
        assert ((links == -1) | (links > torch.arange(shape[2]))).all()
    linked = (next_token > 0).sum() + (next_sibling > 0).sum()
    assert linked == 20 * (shape[2] - 1)  # each node but the root hangs somewhere


@pytest.mark.parametrize(
    ("parents", "selected"),
    [
        ([-1, 0, 1, 4, 2], [0, 7]),  # 4 is not selected
        ([-1, 0, 1, 10, 2], [10, 6]),  # there is no candidate 10
        ([-1, 0, 1, -2, 2], [-2, 6]),
        ([-1, 0, 1, 7, 2], [6, 7]),  # 7 comes later than 6, and is itself
    ],
)
def test_a_node_without_a_parent_before_it_is_a_child_of_the_root(parents, selected):
    args = drafted(1, 3, 2, 3)
    args[1], args[2] = torch.tensor([parents]), torch.tensor([selected])
    _, positions, _, next_token, next_sibling, _ = build_tree(*args)
    assert next_token.tolist() == [[1, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1]]
    assert (positions - args[4]).tolist() == [0, 1, 1]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("topk", [1, 4])
def test_the_root_alone(num_steps, topk):
    branches = topk * (num_steps - 1) + 1 if num_steps else 0
    args = [torch.tensor([7, 8]), torch.zeros(2, branches).long(), torch.zeros(2, 0).long(),
            torch.zeros(2, 0).long(), torch.tensor([3, 4]), num_steps, topk, 1]  # fmt: skip
    mask, positions, ids, next_token, next_sibling, tokens = build_tree(*args)
    assert mask.tolist() == [[[True]], [[True]]]
    assert positions.tolist() == [3, 4]
    assert ids.tolist() == [[0], [1]]
    assert next_token.tolist() == next_sibling.tolist() == [[-1], [-1]]
    assert tokens.tolist() == [7, 8]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_idle_batch_has_no_tree(shape):
    width = shape[2]
    tensors = drafted(1, *shape)[:5]
    shapes = [list(tensor.shape) for tensor in build_tree(*(t[:0] for t in tensors), *shape)]
    assert shapes == [[0, width, width], [0], *[[0, width]] * 3, [0]]


@by(CPU, INTERPRETER, CUDA)
def test_one_step_needs_no_parents(run):
    args = drafted(3, 1, 5, 4)
    want = build_tree(*args)
    args[1] = args[1][:, :0]
    assert_same_tree(run(build_tree, *args), want)


def test_pad_rows_give_a_tree():
    args = drafted(2, 3, 2, 6)
    args[:5] = [tensor * 0 for tensor in args[:5]]
    assert_same_tree(build_tree(*args), expected_tree(*args))


def test_recorded_and_traced():
    args, later = drafted(3, 3, 2, 6), drafted(3, 3, 2, 6, seed=5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.graphkit.build_tree.default, args, test_utils=checks)
    graph = RecorderBackend().capture(lambda: build_tree(*args))
    for tensor, new in zip(args[:5], later[:5], strict=True):
        tensor.copy_(new)
    graph.replay()
    assert_same_tree(graph.output, expected_tree(*later))


@pytest.mark.gpu
def test_a_graph_builds_and_verifies_other_trees():
    shape, requests, vocab = (4, 3, 17), 5, 300
    tree, later = (on_cuda(drafted(requests, *shape, seed=seed)) for seed in (0, 1))
    coins = torch.randint(0, 64, (requests, 18)).cuda() / 64
    target = torch.randint(0, 3, (requests, 17)).cuda()
    probs = torch.randint(0, 16, (requests, 17, vocab)).cuda() / 64
    shapes = (requests * 17,), (requests, 5), (requests,)
    greedy, sampled = (
        [torch.full(each, -9, dtype=torch.int32, device="cuda") for each in shapes] for _ in "ab"
    )

    def step(args):
        _, _, ids, *links, tokens = build_tree(*args)
        walked = (tokens.view(ids.shape), ids, *links)
        verify_tree_greedy(*greedy, *walked, target)
        tree_speculative_sampling_target_only(
            *sampled, *walked, coins[:, :17], coins[:, 17], probs, probs * 0, 1.0, 1.0
        )

    step(tree)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(tree)
    for held, new in zip(tree[:5], later[:5], strict=True):
        held.copy_(new)
    results = []
    for run in (graph.replay, lambda: step(later)):
        for out in (*greedy, *sampled):
            out.fill_(-9)
        run()
        results.append([out.clone() for out in (*greedy, *sampled)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: t[:, None], r"bonus_tokens is \[2, 1\].* expected \[B\] int64"),
        (1, lambda t: t[:, 1:], r"parent_list is \[2, 4\] .* expected .* = \[2, 5\]"),
        (1, lambda t: t[:, :0], r"parent_list is \[2, 0\]"),
        (2, lambda t: t.int(), r"top_scores_index is \[2, 5\] int32"),
        (3, lambda t: t[:1], r"draft_tokens is \[1, 5\]"),
        (4, lambda t: t.float(), r"seq_lens .*, expected \[B\] = \[2\] int32 or int64"),
        (4, lambda t: t.to("meta"), r"seq_lens .* on meta"),
        (5, lambda _: -1, "num_steps is -1"),
        (6, lambda _: 0, "topk is 0"),
        (7, lambda _: 12, r"num_draft_tokens is 12, expected 1 to 11"),
        (7, lambda _: 0, "num_draft_tokens is 0"),
    ],
)
def test_refuses(at, change, text):
    args = drafted(2, 3, 2, 6)
    args[at] = change(args[at])
    with pytest.raises((InputError, ConfigError), match=text):
        OPS["build_tree"].run_reference(*args)  # dispatched, a meta tensor would reach the fake
