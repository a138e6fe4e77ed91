"""Sparse attention against loops over the keys of each row with the largest index scores."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.attention import IndexRows, SdpaAttention, SparseAttention, TritonAttention
from graphkit.engine.kv import DSATokenToKVPool
from graphkit.errors import AttentionError, ConfigError
from graphkit.ops.index_scores import dequantised, index_scores
from graphkit.spec import ForwardMode

HEADS, ELEMENTS = 8, 12  # with so many heads, hardly any score is zero: equal scores are ambiguous
BACKENDS = [SdpaAttention, TritonAttention]


@pytest.fixture
def sparse_case(make_case):
    """``sparse_case(lengths, ...)``: a batch of latents with random index keys in every slot."""

    def make(lengths, **options):
        case = make_case(lengths, heads=4, head_dim=24, latent=16, **options)
        dense = case.pool
        pool = DSATokenToKVPool(
            dense.size, dense.page_size, torch.float32, 16, 8, 2, "cpu", ELEMENTS
        )  # fmt: skip
        pool.get_key_buffer(1).copy_(dense.get_key_buffer(1))
        slots = torch.arange(len(pool.get_index_k_buffer(1)))
        pool.set_index_k_buffer(1, slots, torch.randn(len(slots), ELEMENTS))
        case.pool = pool
        tokens = len(case.query)
        case.index = IndexRows(
            torch.randn(tokens, HEADS, ELEMENTS), torch.randn(tokens, HEADS),
            torch.randn(tokens, ELEMENTS),
        )  # fmt: skip
        return case

    torch.manual_seed(0)
    return make


def attend(case, topk, kind=TritonAttention):
    backend = SparseAttention(case.requests, case.pool, scale=case.scale, topk=topk, kind=kind)
    metadata = backend.metadata(case.mode, case.inputs)
    return backend.attend_selected(
        1, case.query, *case.stored, case.index, case.out_cache_loc, metadata
    )


def by_loops(case, topk):
    """The live rows, one at a time, in float64; every slot holds its keys by now."""
    out = torch.zeros(case.live_rows, 4, 16, dtype=torch.float64)
    index_keys = dequantised(case.pool.get_index_k_buffer(1)).double()
    rows, keys = case.pool.get_key_buffer(1)[:, 0].double(), case.key_counts.tolist()
    for b, count in enumerate(case.own_rows):
        table = case.requests.req_to_token[case.inputs.req_pool_indices[b], : keys[b]].long()
        for i in range(count):
            t = sum(case.own_rows[:b]) + i
            sees = table[[s for s in range(keys[b]) if case._sees(b, i, s, keys[b])]]
            products = (index_keys[sees] @ case.index.query[t].double().T).relu()
            scores = products @ case.index.weights[t].double()
            chosen = rows[sees[scores.topk(min(topk, len(sees))).indices]]
            weights = (case.query[t].double() @ chosen.T * case.scale).softmax(-1)
            out[t] = weights @ chosen[:, :16]
    return out


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 5, 64])
@pytest.mark.parametrize(
    "shape",
    [
        {"width": 3},
        {"width": 3, "tree": True},
        {"width": 2, "columns": 6, "tree": True, "mode": ForwardMode.DRAFT},
        {"width": 4, "rows": [1, 4], "mode": ForwardMode.DRAFT_EXTEND},
    ],
    ids=str,
)
def test_rows_attend_to_their_best_keys(sparse_case, kind, page_size, topk, shape):
    case = sparse_case([20, 6], page_size=page_size, pads=1, **shape)
    out = attend(case, topk, kind)
    want = by_loops(case, topk)
    torch.testing.assert_close(out[: case.live_rows].double(), want, atol=2e-5, rtol=2e-5)


def test_enough_keys_are_all_keys(sparse_case, assert_attends):
    case = sparse_case([20, 0], width=3, tree=True)
    assert_attends(attend(case, 64), case)


def test_a_layer_without_an_indexer_attends_to_all_keys(sparse_case, assert_attends):
    case = sparse_case([20, 3], width=3)
    backend = SparseAttention(case.requests, case.pool, scale=case.scale, topk=2)
    assert_attends(case.attend_by(backend), case)


def test_a_captured_layer_follows_its_inputs(sparse_case):
    from graphkit.graphs import backend_for

    case = sparse_case([20, 6], width=3)
    recorder = backend_for("cpu")
    with recorder.session():
        graph = recorder.capture(lambda: attend(case, 5))
    case.reorder([1, 0])
    case.index.query.copy_(case.index.query.flip(0))
    graph.replay()
    torch.testing.assert_close(graph.output.double(), by_loops(case, 5), atol=2e-5, rtol=2e-5)


def test_latents_without_index_keys_are_refused(make_case):
    case = make_case([6], head_dim=24, latent=16)
    with pytest.raises(ConfigError, match="must be of type DSATokenToKVPool, got MLATokenToKVPool"):
        SparseAttention(case.requests, case.pool, scale=1.0, topk=4)


def test_topk_must_be_positive(sparse_case):
    case = sparse_case([6])
    with pytest.raises(ConfigError, match=r"SparseAttention\.topk must be an int >= 1"):
        SparseAttention(case.requests, case.pool, scale=1.0, topk=0)


def test_scores_refuse_a_cache_of_other_elements(sparse_case):
    case = sparse_case([6])
    cache = case.pool.get_index_k_buffer(1)[:, 1:]
    args = (case.index.query, case.index.weights, cache, case.page_table(), case.key_counts,
            case.row_sums, None, 1, 1)  # fmt: skip
    with pytest.raises(AttentionError, match=r"index_cache is \[10, 15\] uint8"):
        index_scores(*args)


def test_tracers_see_shapes(sparse_case):
    case = sparse_case([6, 2], width=2, tree=True)
    args = (
        case.index.query, case.index.weights, case.pool.get_index_k_buffer(1), case.page_table(),
        case.key_counts, case.row_sums, case.inputs.custom_mask, 1, 2,
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.graphkit.index_scores.default, args, test_utils=checks)
