"""Both backends against plain loops, over widths, groups, pages, trees and pads."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool
from graphkit.errors import AttentionError, ConfigError
from graphkit.spec import ForwardMode
from op_devices import CPU, CUDA, by

VERIFY = ForwardMode.TARGET_VERIFY
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTHS = {1: [5, 1, 9], 4: [3, 4, 5, 8, 1], 16: [15, 16, 17, 31]}


def cases():
    """Yield what cases have in common, the lengths of their requests, and their options."""
    for page_size, width, tree in product((1, 4, 16), (1, 3, 4, 8), (False, True)):
        shape = {"width": width, "page_size": page_size, "tree": tree, "pads": 2}
        yield "pages", LENGTHS[page_size], shape
    for group, head_dim in product((1, 2, 4, 7), (16, 24, 80)):
        shape = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "tree": True}
        yield "groups", [6, 2], {"width": 4, **shape}
    for dtype in TOLERANCES:
        yield "half", [7, 12], {"width": 3, "page_size": 4, "dtype": dtype, "pads": 1}
    yield "no history", [0, 4], {"width": 3, "page_size": 4}
    for page_size, tree in product((1, 16), (False, True)):
        shape = {"page_size": page_size, "tree": tree, "heads": 8, "head_dim": 24, "latent": 16}
        yield "latents", LENGTHS[page_size], {"width": 3, "pads": 1, **shape}
    for tree, chunked in product((False, True), (False, True)):
        shape = {"tree": tree, "chunked": chunked}
        for window in (4, 5, 30):
            more = {"width": 4, "page_size": 4, "pads": 1, "window": window}
            yield "windows", [5, 1, 29, 31], shape | more
        yield "windows within the rows", [5, 0, 7], {"width": 8, "window": 3, **shape}
    for latent, option in product((0, 8), ({"softcap": 0.5}, {"sinks": True}, {"window": 4})):
        shape = {"width": 3, "heads": 4, "pads": 1, "latent": latent, **option}
        yield "options", [6, 0, 9], shape
    shape = {"width": 3, "tree": True, "window": 5, "softcap": 0.5, "sinks": True}
    yield "all options", [6, 9], shape
    # Slots behind a request's last key hold NaN.
    shape = {"width": 4, "rows": [1, 4, 2], "page_size": 4, "window": 3}
    yield "fewer rows", [9, 3, 17], {"mode": ForwardMode.DRAFT_EXTEND, **shape}


@by(CPU, CUDA)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [pytest.param(*case, id=f"{name}-{case[1]}") for name, *case in cases()],
)
def test_attention_is_that_of_loops(run, make_case, assert_attends, backend_type, lengths, options):
    case = make_case(lengths, device=run.torch_device, **options)
    assert_attends(case.attend(backend_type), case, TOLERANCES.get(options.get("dtype"), 2e-5))


def test_a_hidden_row_does_not_change_the_output(make_case, assert_attends, backend_type):
    case = make_case([6, 3], width=4, tree=True)
    case.inputs.custom_mask[0, :, 3] = False
    case.key[3], case.value[3] = torch.nan, torch.nan
    assert_attends(case.attend(backend_type), case)


def test_a_row_in_a_new_chunk_reads_no_key_before(make_case, assert_attends, backend_type):
    case = make_case([8], window=4, chunked=True)
    before = case.requests.req_to_token[case.inputs.req_pool_indices[0], :8].long()
    case.pool.get_key_buffer(1)[before] = torch.nan
    case.pool.get_value_buffer(1)[before] = torch.nan
    assert torch.equal(case.attend(backend_type), case.value)


def test_keys_outside_the_window_are_not_read(make_case, assert_attends, backend_type):
    case = make_case([20], width=2, window=4)
    outside = case.requests.req_to_token[case.inputs.req_pool_indices[0], :17].long()
    case.pool.get_key_buffer(1)[outside] = torch.nan
    case.pool.get_value_buffer(1)[outside] = torch.nan
    assert_attends(case.attend(backend_type), case)


def test_rows_attend_to_the_positions_that_they_name(make_case, assert_attends, backend_type):
    case = make_case([5, 0, 9], width=3, page_size=4, tree=True, heads=4, sinks=True)
    position_TK = torch.full((case.live_rows + 1, 12), -1)
    for b in range(3):
        for i in range(3):
            keys = case.visible_keys(b, i)[::-1]
            position_TK[3 * b + i, : len(keys)] = torch.tensor(keys)
    backend = case.backend(backend_type)
    metadata = backend.metadata(case.mode, case.inputs)
    backend.store(1, *case.stored, case.out_cache_loc)
    query = torch.cat([case.query, case.query[:1]])  # the last row belongs to no request
    out = backend.attend_positions(1, query, position_TK, metadata, **case.options)
    assert_attends(out[:-1], case)
    assert out[-1].eq(0).all()


def test_pages_before_the_window_may_be_gone(make_case, assert_attends, backend_type):
    """Their entries of the page table are not read, whatever they hold."""
    case = make_case([20], width=2, page_size=4, window=4)
    case.requests.req_to_token[case.inputs.req_pool_indices[0], :12] = 4 << 20
    assert_attends(case.attend(backend_type), case)


def test_layers_with_a_window_may_have_a_pool_of_their_own(make_case, assert_attends, backend_type):
    """The second pool has other slots and pages, and as few tokens as its windows need."""
    full = make_case([9, 20], width=3, page_size=4)
    split = make_case([9, 20], width=3, window=5)
    split.requests.req_to_token[split.inputs.req_pool_indices[1], :16] = 0  # reused since
    backend = backend_type(
        full.requests, full.pool, window_req_to_token_pool=split.requests,
        window_kv_pool=split.pool,
    )  # fmt: skip
    metadata = backend.metadata(full.mode, full.inputs)
    assert metadata.page_table.tolist() == full.page_table().tolist()
    assert metadata.window_page_table.tolist() == split.page_table().tolist()
    for case in (full, split):
        rows = (case.query, case.key, case.value, case.out_cache_loc)
        assert_attends(backend.attend(1, *rows, metadata, **case.options), case)


def test_a_pool_of_windows_needs_both_parts(make_case):
    case = make_case([6])
    text = "window_req_to_token_pool must be a ReqToTokenPool, got None"
    with pytest.raises(ConfigError, match=text):
        SdpaAttention(case.requests, case.pool, window_kv_pool=case.pool)
    with pytest.raises(ConfigError, match="window_kv_pool must be of type MHATokenToKVPool or"):
        SdpaAttention(case.requests, case.pool, window_req_to_token_pool=case.requests)


def test_a_pool_that_a_backend_cannot_read_is_refused_by_name(make_case):
    class DenseAttention(SdpaAttention):
        pool_types = (MHATokenToKVPool,)

    case = make_case([6], head_dim=24, latent=16)
    text = "DenseAttention.kv_pool must be of type MHATokenToKVPool, got MLATokenToKVPool"
    with pytest.raises(ConfigError, match=text):
        DenseAttention(case.requests, case.pool, scale=1.0)
    with pytest.raises(ConfigError, match="MLATokenToKVPool, got ReqToTokenPool"):
        SdpaAttention(case.requests, case.requests)


def test_latents_need_a_scale(make_case):
    case = make_case([6], head_dim=24, latent=16)
    with pytest.raises(ConfigError, match="TritonAttention needs a scale with an MLATokenToKVPool"):
        TritonAttention(case.requests, case.pool)


def test_scale_can_be_chosen(make_case):
    case = make_case([6], width=2)
    flat = TritonAttention(case.requests, case.pool, scale=0.0)
    metadata = flat.metadata(VERIFY, case.inputs)
    out = flat.attend(1, case.query, case.key, case.value, case.out_cache_loc, metadata)
    seen = torch.cat([case.histories[0][1], case.value[:1]])
    torch.testing.assert_close(out[0], seen.mean(0))


def test_a_layer_leaves_the_others_alone(make_case):
    case = make_case([6], width=2)
    case.attend(TritonAttention)
    assert case.pool.get_key_buffer(0).isnan().all()
    assert not case.pool.get_key_buffer(1)[case.out_cache_loc].isnan().any()


def test_each_op_is_seen_as_one(make_case, called_ops):
    case = make_case([6, 2], width=2, tree=True)
    with called_ops:
        case.attend(TritonAttention)
    ours = ["paged_metadata", "store_kv", "paged_attention"]
    assert called_ops.names == [f"graphkit.{name}.default" for name in ours]


def test_sdpa_shows_no_host_synchronisation(make_case, called_ops):
    case = make_case([6, 2], width=2, tree=True)
    with called_ops:
        case.attend(SdpaAttention)
    barred = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique")
    assert not [name for name in called_ops.names if any(word in name for word in barred)]


def test_a_wrong_layer_is_refused(make_case):
    case = make_case([6])
    case.layer = 2
    with pytest.raises(AttentionError, match="no layer 2: it has 2"):
        case.attend(TritonAttention)
