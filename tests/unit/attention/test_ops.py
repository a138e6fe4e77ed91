"""The torch references of the attention ops: results, refusals, schemas and fakes."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import AttentionError
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

CHECKS = ("test_schema", "test_faketensor")


def test_reference_matches_loops(make_case, assert_attends):
    case = make_case([15, 16, 17], width=4, heads=14, page_size=16, tree=True, pads=1, context=64)
    assert_attends(paged_attention(*case.op_args()), case)


def test_a_query_without_visible_keys_gets_zeros(make_case):
    case = make_case([0, 3], width=2, tree=True)
    case.inputs.custom_mask[0] = False
    out = paged_attention(*case.op_args())
    assert out[:2].eq(0).all()
    assert not out[2:].isnan().any()


def test_a_length_beyond_the_page_table_counts_as_its_end(make_case):
    case = make_case([6], width=1)
    args = list(case.op_args())
    args[3] = args[3][:, :4].contiguous()
    keys, values = (history[:4] for history in case.histories[0])
    scores = torch.einsum("nd,lnd->nl", case.query[0], keys) * 16**-0.5
    expected = torch.einsum("nl,lnd->nd", scores.softmax(-1), values)
    torch.testing.assert_close(paged_attention(*args)[0], expected)


@pytest.mark.parametrize(
    "strided", ["", "page_table", "cache_seqlens_B", "cu_seqlens_q_B1", "mask", "key_scale_M"]
)
def test_no_kernel_reads_a_copy_before_it_waits(make_case, monkeypatch, strided):
    """A launch makes tensors contiguous, after the store that ``follows_store`` speaks of."""
    op, launched = OPS["paged_attention"], []
    monkeypatch.setattr(
        "graphkit.ops.kernels.paged_attention.launch",
        lambda kernel, grid, args, **others: launched.append(others),
    )
    case = make_case([6, 9], width=4, tree=True)
    args = op.arguments(*case.op_args()[:-2], follows_store=True)
    args = args._replace(key_scale_M=torch.ones(case.key.shape[1]))
    if strided:
        tensor = getattr(args, strided)
        args = args._replace(**{strided: torch.stack([tensor, tensor], -1)[..., 0]})
    op.launch(args)
    assert launched[0]["FOLLOWS_STORE"] == (not strided)


def test_tracers_see_shapes_and_mutations(make_case):
    case = make_case([6, 2], width=2, tree=True)
    args = case.op_args()
    for tensor in case.pool.tensors().values():
        tensor.zero_()
    torch.library.opcheck(torch.ops.graphkit.paged_attention.default, args, test_utils=CHECKS)
    latent = make_case([6], latent=12, sinks=True)
    for tensor in latent.pool.tensors().values():
        tensor.zero_()
    rows = latent.op_args()
    torch.library.opcheck(torch.ops.graphkit.paged_attention.default, rows, test_utils=CHECKS)
    store = (args[1], args[2], case.out_cache_loc, case.key, case.value)
    torch.library.opcheck(torch.ops.graphkit.store_kv.default, store, test_utils=CHECKS)


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (
            0,
            lambda q: q[:, :, :8],
            r"query_TND is \[4, 2, 8\] .* \[T, N, D\] = \[4, 2, 16\]",
        ),
        (0, lambda q: q[:, :1], "query_TND has 1 heads, expected a multiple of the cache's 2"),
        (0, lambda q: q.double(), "float64 .* expected .* float16 or bfloat16 or float32"),
        (1, lambda k: k[1:], r"value_cache is .* expected \[slots, M, E\]"),
        (1, lambda k: k.mT.contiguous().mT, "contiguous in the head size"),
        (3, lambda p: p.long(), r"page_table is \[2, 8\] int64 .* expected \[B, P\]"),
        (4, lambda c: c[:1], r"cache_seqlens_B is \[1\] int32 .* = \[2\]"),
        (5, lambda c: c[1:], r"cu_seqlens_q_B1 is \[2\] int32 .* = \[3\]"),
        (5, lambda c: c.long(), r"cu_seqlens_q_B1 is \[3\] int64 .* = \[3\] int32"),
        (6, lambda m: m[:, :, 1:], r"mask is \[\d+, 2, 1\] .*\[B, W, C >= W\]"),
        (
            6,
            lambda m: m[:1],
            r"mask is \[1, 2, 2\] .* = \[2, 2, C\]",
        ),
        (6, lambda m: m.flatten(1), r"mask is \[2, 4\] .*, expected \[B, W, C >= W\] bool"),
        (6, lambda m: m.int(), r"mask is \[2, 2, 2\] int32 .* bool"),
        (8, lambda _: 0, "page_size is 0, expected at least 1"),
        (8, lambda _: 4, "the caches have 15 slots, expected whole pages of 4"),
        (10, lambda _: -1, "window is -1, expected at least 0"),
        (11, lambda _: -1.0, "softcap is -1.0, expected at least 0"),
        (15, lambda _: True, "chunked is True and window is 0, expected the tokens of a chunk"),
        (12, lambda _: torch.zeros(3), r"sinks_N is \[3\] .* = \[2\]"),
        (
            2,
            lambda v: torch.cat([v, v], 2),
            "the head size of keys is 16, expected 32, the head",
        ),
        (4, lambda c: c.to("meta"), "cache_seqlens_B is .* on meta, expected .* on cpu"),
    ],
)
def test_attention_refuses(make_case, at, change, text):
    args = list(make_case([6, 2], width=2, tree=True).op_args())
    args[at] = change(args[at])
    with pytest.raises(AttentionError, match=text):
        # Through the dispatcher, the fake of a meta tensor would run, which checks nothing.
        OPS["paged_attention"].run_reference(*args)
