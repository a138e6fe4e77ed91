"""Metadata: every field, the bounds that a runner sets, and what is refused."""

from __future__ import annotations

import pytest
import torch

from graphkit.buffers import AttentionBackend
from graphkit.config import BufferSizes
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.errors import AttentionError, ConfigError
from graphkit.ops.paged_metadata import paged_metadata
from graphkit.spec import ForwardMode
from op_devices import CPU, CUDA, INTERPRETER, by, by_each

VERIFY = ForwardMode.TARGET_VERIFY


def _sizes(context, page_size=4):
    return BufferSizes(8, context, 16, 32, torch.float32, page_size)


def _backend(case):
    return TritonAttention(case.requests, case.pool)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 4])
def test_fields(make_case, page_size, width):
    lengths = [15, 16, 17, 3]
    case = make_case(lengths, width=width, page_size=page_size, pads=2, context=50)
    metadata = _backend(case).metadata(VERIFY, case.inputs)

    keys = [length + width for length in [*lengths, 1, 1]]
    assert metadata.cache_seqlens.tolist() == keys
    assert metadata.cu_seqlens_q.tolist() == [width * b for b in range(7)]
    assert metadata.cu_seqlens_k.tolist() == [sum(keys[:b]) for b in range(7)]
    assert torch.equal(metadata.page_table, case.page_table())
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (width, 50)
    assert metadata.mask is None
    tensors = (metadata.cache_seqlens, metadata.cu_seqlens_q, metadata.cu_seqlens_k)
    assert {tensor.dtype for tensor in (*tensors, metadata.page_table)} == {torch.int32}


def test_stale_slots_stay_out_of_the_page_table(make_case):
    case = make_case([2, 9, 10], width=2, page_size=4, context=32, pads=1)
    for row, length in zip(case.inputs.req_pool_indices, case.inputs.seq_lens, strict=True):
        case.requests.req_to_token[row, length + 2 :] = 77_777
    assert torch.equal(_backend(case).metadata(VERIFY, case.inputs).page_table, case.page_table())


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, VERIFY, ForwardMode.DRAFT])
def test_width_comes_from_the_batch(make_case, mode):
    case = make_case([3, 9], width=3, context=20)
    del case.inputs.custom_mask, case.inputs.num_accepted_tokens
    case.inputs.tokens_per_request = 7
    metadata = _backend(case).metadata(mode, case.inputs)
    assert metadata.max_seqlen_q == 3
    assert metadata.cache_seqlens.tolist() == [6, 12]


def test_mask_is_passed_on(make_case):
    case = make_case([3, 9], width=3, tree=True)
    assert _backend(case).metadata(VERIFY, case.inputs).mask is case.inputs.custom_mask


def test_init_state_bounds_the_page_table_and_never_shrinks_it(make_case):
    case = make_case([3], width=2, page_size=4, context=50)
    backend = _backend(case)
    assert backend.metadata(VERIFY, case.inputs).page_table.shape == (1, 13)
    for context, pages, most in ((30, 8, 30), (21, 8, 30), (50, 13, 50)):
        backend.init_state(_sizes(context), max_tokens=16)
        metadata = backend.metadata(VERIFY, case.inputs)
        assert metadata.page_table.shape == (1, pages)
        assert metadata.max_seqlen_k == most


def test_init_state_refuses_what_the_pools_cannot_hold(make_case):
    backend = _backend(make_case([3], page_size=4, context=50))
    with pytest.raises(ConfigError, match=r"max_context_len is 51, but .* holds 50") as too_long:
        backend.init_state(_sizes(51), 16)
    assert too_long.value.field == "max_context_len"
    with pytest.raises(ConfigError, match=r"page_size is 2, but kv_pool has pages of 4"):
        backend.init_state(_sizes(50, page_size=2), 16)


def test_supported_modes(make_case):
    backend = SdpaAttention(*_pools(make_case))
    assert isinstance(backend, AttentionBackend)
    assert backend.seq_len_fill_value == 1
    assert not hasattr(backend, "before_replay")
    supported = {mode for mode in ForwardMode if backend.supports(mode)}
    extending = {ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}
    assert supported == {ForwardMode.DECODE, VERIFY, ForwardMode.DRAFT} | extending


def _pools(make_case):
    case = make_case([3])
    return case.requests, case.pool


@pytest.mark.parametrize(("requests", "rows"), [(2, 3), (2, 0), (0, 3)])
def test_ragged_rows_are_refused(make_case, requests, rows):
    case = make_case([3, 3])
    case.inputs.batch_size, case.inputs.num_tokens = requests, rows
    with pytest.raises(AttentionError, match=f"batch of {requests} requests has {rows} rows"):
        _backend(case).metadata(VERIFY, case.inputs)


def test_a_mask_of_another_width_is_refused(make_case):
    case = make_case([3, 3], width=3, tree=True)
    case.inputs.custom_mask = case.inputs.custom_mask[:, :2]
    with pytest.raises(AttentionError, match=r"shape \[2, 2, 3\].* takes \[2, 3, 3\]"):
        _backend(case).metadata(VERIFY, case.inputs)


def test_pools_on_two_devices_are_refused():
    requests = ReqToTokenPool(1, 8, "meta")
    pool = MHATokenToKVPool(4, 1, torch.float32, 1, 16, 1, "cpu")
    with pytest.raises(ConfigError, match="req_to_token_pool is on meta and kv_pool on cpu"):
        TritonAttention(requests, pool)


def _op_args(**changes):
    args = {
        "req_pool_indices_B": torch.tensor([1, 0]),
        "seq_lens_B": torch.tensor([3, 1], dtype=torch.int32),
        "req_to_token": torch.arange(16, dtype=torch.int32).view(2, 8),
        "page_size": 2, "max_pages": 4, "tokens_per_request": 2, "appended": 2,
    }  # fmt: skip
    return args | changes


@by(CPU, INTERPRETER, CUDA)
def test_lengths_and_rows_out_of_range_read_nothing_else(run):
    lengths = torch.tensor([100, 100], dtype=torch.int32)
    rows = torch.tensor([-5, 70])
    args = _op_args(seq_lens_B=lengths, req_pool_indices_B=rows, max_pages=6)
    *_, table = run(paged_metadata, **args)
    assert table.tolist() == [[0, 1, 2, 3, 0, 0], [4, 5, 6, 7, 0, 0]]


@by_each("requests", interpreter=(0, 1, 2, 5, 20, 130), cuda=(0, 1, 2, 5, 20, 64, 1000, 1024))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_kernels_compute_what_the_reference_computes(run, requests, page_size):
    torch.manual_seed(requests)
    context, width = 4096 if run is CUDA else (1100 if requests < 20 else 40), 3
    table = torch.randint(0, 10**6, (requests + 1, context), dtype=torch.int32)
    rows = torch.randint(0, requests + 1, (requests,))
    lengths = torch.randint(0, context - width, (requests,), dtype=torch.int32)
    ragged = torch.randint(0, width + 1, (requests,), dtype=torch.int32)
    for extra, appended, extend_lens in ((0, width, None), (2, 0, ragged)):
        pages = -(-context // page_size) + extra
        args = (rows, lengths, table, page_size, pages, width, appended, extend_lens)
        for got, want in zip(run(paged_metadata, *args), paged_metadata(*args), strict=True):
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert torch.equal(got, want)


def test_appended_rows_may_be_none_of_the_step():
    lengths, cu_q, cu_k, _ = paged_metadata(**_op_args(appended=0))
    assert (lengths.tolist(), cu_q.tolist(), cu_k.tolist()) == ([3, 1], [0, 2, 4], [0, 3, 4])


@pytest.mark.parametrize("extend_lens", [[2, 1], [0, 0], [5, 0]])
def test_rows_may_vary(extend_lens):
    rows = torch.tensor(extend_lens, dtype=torch.int32)
    _, cu_q, *others = paged_metadata(**_op_args(appended=0, extend_lens_B=rows))
    assert cu_q.dtype == torch.int32
    assert cu_q.tolist() == [0, extend_lens[0], sum(extend_lens)]
    _, _, *uniform = paged_metadata(**_op_args(appended=0))
    assert all(map(torch.equal, others, uniform))


def test_no_requests_at_all():
    none = torch.ones(0, dtype=torch.int32)
    changes = {"seq_lens_B": none, "req_pool_indices_B": none.long()}
    for extend_lens in (None, none):
        made = paged_metadata(**_op_args(**changes, extend_lens_B=extend_lens))
        assert [tensor.tolist() for tensor in made] == [[], [0], [0], []]
        assert made[3].shape == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("extend_lens_B", [None, torch.tensor([2, 1], dtype=torch.int32)])
def test_fake_shapes_agree_with_the_real_ones(extend_lens_B):
    torch.library.opcheck(
        torch.ops.graphkit.paged_metadata.default, (), _op_args(extend_lens_B=extend_lens_B),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seq_lens_B": torch.tensor([3, 1])}, r"seq_lens_B is \[2\] int64"),
        ({"req_pool_indices_B": torch.tensor([1])}, r"req_pool_indices_B is \[1\]"),
        ({"extend_lens_B": torch.tensor([1])}, r"extend_lens_B is \[1\] int64"),
        ({"extend_lens_B": torch.ones(3, dtype=torch.int32)}, r"extend_lens_B is \[3\]"),
        ({"req_to_token": torch.zeros(2, 8)}, r"req_to_token is \[2, 8\] float32"),
        ({"page_size": 0}, "page_size is 0, expected at least 1"),
        ({"seq_lens_B": torch.ones(1025, dtype=torch.int32),
          "req_pool_indices_B": torch.ones(1025, dtype=torch.int64)},
         r"seq_lens_B is \[1025\] .*\[B <= 1024\]"),
    ],
)  # fmt: skip
def test_op_refuses(changes, text):
    with pytest.raises(AttentionError, match=text):
        paged_metadata(**_op_args(**changes))
