"""verify_tree_greedy on every device against a walk in plain Python."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import InputError
from graphkit.graphs import RecorderBackend
from graphkit.ops.registration import OPS
from graphkit.ops.verification import verify_tree_greedy
from op_devices import by_each

UNTOUCHED = -7
CHAIN = [1, 2, 3, -1], [-1, -1, -1, -1]
#     0
#   / | \
#  1  2  4    3 and 5 under 2, 6 under 5
TREE = [1, -1, 3, -1, -1, 6, -1], [-1, 2, 4, 5, -1, -1, -1]


def results(requests, width, columns):
    """Return outputs filled with values that the op must replace."""
    return (
        torch.full((requests * width,), UNTOUCHED, dtype=torch.int32),
        torch.full((requests, columns), 99, dtype=torch.int32),
        torch.full((requests,), 99, dtype=torch.int32),
    )


def verify(links, tokens, target, columns=4, dtype=torch.int64):
    """(predicts, accept_index, accept_token_num) of one request, as lists."""
    out = results(1, len(tokens), columns)
    ids = torch.arange(len(tokens))[None]
    tensors = [torch.tensor([part]) for part in links]
    target = torch.tensor([target], dtype=dtype)
    verify_tree_greedy(*out, torch.tensor([tokens]), ids, *tensors, target)
    predicts, accept_index, num = out
    return predicts.tolist(), accept_index[0].tolist(), int(num)


def random_args(requests, width, seed, damaged):
    """Trees of few distinct tokens, so that walks go deep; damaged links are any numbers."""
    torch.manual_seed(seed)
    links = torch.full((2, requests, width), -1)
    for b in range(requests):
        last_child = {}
        for node in range(1, width):
            parent = int(torch.randint(node, ()))
            at = (0, b, parent) if parent not in last_child else (1, b, last_child[parent])
            links[at] = node
            last_child[parent] = node
    if damaged:
        links = torch.randint(-2, width + 2, links.shape)
        links.view(-1)[::5] = 2**40
    ids = torch.arange(requests * width).view(requests, width)
    if damaged:
        ids[:, ::3], ids[:, 1::5] = 2**40, -3
    tokens, target = torch.randint(0, 3, (2, requests, width))
    return tokens, ids, *links, target


def walk(predicts, accept_index, accept_token_num, tokens, ids, next_token, next_sibling, target):
    """The contract, request by request."""
    requests, width = tokens.shape
    columns = accept_index.shape[1]
    for b in range(requests):
        path, tries = [0], 0
        child = int(next_token[b, 0])
        while 0 <= child < width and tries < width - 1 and len(path) < columns:
            tries += 1
            if tokens[b, child] == target[b, path[-1]]:
                path.append(child)
                child = int(next_token[b, child])
            else:
                child = int(next_sibling[b, child])
        accept_index[b] = -1
        accept_index[b, : len(path)] = ids[b, path]
        accept_token_num[b] = len(path) - 1
        for node in path:
            if 0 <= ids[b, node] < len(predicts):
                predicts[ids[b, node]] = target[b, node]


def test_all_of_a_chain():
    got = verify(CHAIN, tokens=[9, 5, 6, 7], target=[5, 6, 7, 8])
    assert got == ([5, 6, 7, 8], [0, 1, 2, 3], 3)


def test_none_of_a_chain():
    got = verify(CHAIN, tokens=[9, 5, 6, 7], target=[1, 6, 7, 8])
    assert got == ([1, UNTOUCHED, UNTOUCHED, UNTOUCHED], [0, -1, -1, -1], 0)


def test_a_miss_ends_the_walk_though_later_drafts_would_fit():
    got = verify(CHAIN, tokens=[9, 5, 6, 7], target=[5, 1, 7, 8])
    assert got == ([5, 1, UNTOUCHED, UNTOUCHED], [0, 1, -1, -1], 1)


def test_a_path_between_siblings():
    target = [12, 0, 15, 0, 0, 16, 88]
    predicts, accept_index, drafts = verify(TREE, [9, 11, 12, 13, 14, 15, 16], target)
    assert predicts == [12, UNTOUCHED, 15, UNTOUCHED, UNTOUCHED, 16, 88]
    assert (accept_index, drafts) == ([0, 2, 5, 6], 3)


def test_the_first_of_two_equal_siblings_is_taken():
    target = [12, 0, 15, 0, 15, 0, 0]
    _, accept_index, drafts = verify(TREE, [9, 12, 12, 13, 12, 15, 16], target)
    assert (accept_index, drafts) == ([0, 1, -1, -1], 1)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 6])
def test_columns_bound_the_path(columns):
    predicts, accept_index, drafts = verify(
        CHAIN, tokens=[9, 5, 6, 7], target=[5, 6, 7, 8], columns=columns
    )
    accepted = min(columns, 4)
    assert predicts == [5, 6, 7, 8][:accepted] + [UNTOUCHED] * (4 - accepted)
    assert accept_index == [0, 1, 2, 3][:accepted] + [-1] * (columns - accepted)
    assert drafts == accepted - 1


@by_each("width", cpu=[1, 2, 3, 8, 33], interpreter=[1, 4, 17], cuda=[1, 4, 6, 17, 64, 256])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("requests", [0, 1, 9, 33])
def test_matches_a_walk_in_plain_python(run, width, damaged, requests):
    for seed, columns in enumerate((1, 3, 9, width + 1)):
        *args, target = random_args(requests, width, seed, damaged)
        target = target.to((torch.int32, torch.int64)[seed % 2])
        got, want = results(requests, width, columns), results(requests, width, columns)
        run(verify_tree_greedy, *got, *args, target)
        walk(*want, *args, target)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "links",
    [
        ([0, -1, -1], [-1, -1, -1]),  # the root is its own child
        ([1, 0, -1], [-1, -1, -1]),
        ([1, 1, -1], [-1, 1, -1]),
        ([1, -1, -1], [-1, 2, 1]),  # siblings in a ring
        ([3, -1, -1], [-1, -1, -1]),
        ([-5, -1, -1], [-1, -1, -1]),
    ],
)
@pytest.mark.parametrize("target", [[5, 5, 5], [6, 6, 6]])
def test_a_walk_ends_for_links_with_cycles(links, target):
    predicts, accept_index, drafts = verify(links, [5, 5, 5], target)
    assert 0 <= drafts <= 2
    assert accept_index[0] == 0
    assert set(predicts) <= {UNTOUCHED, target[0]}


def test_requests_do_not_mix():
    width, columns = 4, 4
    out = results(3, width, columns)
    links = [torch.tensor([part] * 3) for part in CHAIN]
    tokens = torch.tensor([[9, 5, 6, 7]] * 3)
    target = torch.tensor([[5, 6, 7, 8], [0, 6, 7, 8], [5, 6, 0, 8]], dtype=torch.int32)
    verify_tree_greedy(*out, tokens, torch.arange(12).view(3, 4), *links, target)
    assert out[1].tolist() == [[0, 1, 2, 3], [4, -1, -1, -1], [8, 9, 10, -1]]
    assert out[2].tolist() == [3, 0, 2]
    assert out[0].view(3, 4).tolist() == [
        [5, 6, 7, 8],
        [0, UNTOUCHED, UNTOUCHED, UNTOUCHED],
        [5, 6, 0, UNTOUCHED],
    ]


def test_recorded_and_traced():
    args, later = (random_args(5, 8, seed, damaged=False) for seed in (0, 1))
    got, want = results(5, 8, 4), results(5, 8, 4)
    checks = ("test_schema", "test_faketensor")
    overload = torch.ops.graphkit.verify_tree_greedy.default
    torch.library.opcheck(overload, (*results(5, 8, 4), *args), test_utils=checks)
    graph = RecorderBackend().capture(lambda: verify_tree_greedy(*got, *args))
    for tensor, new in zip((*got, *args), (*want, *later), strict=True):
        tensor.copy_(new)
    graph.replay()
    walk(*want, *later)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: t.long(), r"predicts is \[16\] int64 .* = \[16\] int32"),
        (0, lambda t: t[:-1], r"predicts is \[15\]"),
        (0, lambda t: t.repeat(2)[::2], "predicts has strides .* contiguous"),
        (1, lambda t: t[:, :0], r"accept_index is \[2, 0\]"),
        (1, lambda t: t.mT.contiguous().mT, "accept_index has strides .* contiguous"),
        (2, lambda t: t[:1], "accept_token_num"),
        (3, lambda t: t[0], "candidates"),
        (3, lambda t: t[:, :0], "candidates"),
        (4, lambda t: t.int(), "retrieve_index"),
        (5, lambda t: t[:, 1:], "retrieve_next_token"),
        (6, lambda t: t.to("meta"), "retrieve_next_sibling .* on meta"),
        (7, lambda t: t.float(), "target_predict .* int64 or int32"),
    ],
)
def test_refuses(at, change, text):
    args = [*results(2, 8, 4), *random_args(2, 8, 0, damaged=False)]
    args[at] = change(args[at])
    with pytest.raises(InputError, match=text) as caught:
        OPS["verify_tree_greedy"].run_reference(*args)  # not dispatched: a fake checks nothing
    assert caught.value.field
