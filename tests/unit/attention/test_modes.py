"""Ragged rows, draft trees and pads in each mode, on both backends, against loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.engine.attention import TritonAttention
from graphkit.errors import AttentionError
from graphkit.ops.paged_attention import paged_attention
from graphkit.spec import ForwardMode
from op_devices import CPU, CUDA, by

DRAFT, V1, V2 = ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
MODES = [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, DRAFT, V1, V2]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [[4, 1, 3], [1, 1, 1], [4, 4, 4], [2, 4, 1]], ids=str)
def test_accepted_rows_alone_extend(make_case, assert_attends, backend_type, page_size, rows):
    case = make_case([15, 0, 9], mode=V1, width=4, rows=rows, page_size=page_size, pads=2)
    out = case.attend(backend_type)
    assert_attends(out, case)
    assert out[sum(rows) + 2 :].eq(0).all()  # behind the pads' one row each


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_batch_may_bring_no_more_rows_than_it_has(make_case, assert_attends, backend_type, rows):
    case = make_case([7, 3], mode=V1, width=5, rows=[rows, 1])
    case.inputs.num_tokens = case.live_rows
    for name in ("query", "key", "value", "out_cache_loc"):
        setattr(case, name, getattr(case, name)[: case.live_rows])
    assert_attends(case.attend(backend_type), case)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_uniform_rows_extend(make_case, assert_attends, backend_type, width):
    case = make_case([15, 0, 9], mode=V2, width=width, page_size=4, pads=2)
    metadata = backend_type(case.requests, case.pool).metadata(V2, case.inputs)
    assert metadata.cache_seqlens.tolist() == [15 + width, width, 9 + width, 1, 1]
    assert metadata.cu_seqlens_q.tolist() == [width * b for b in range(6)]
    assert (metadata.max_seqlen_q, metadata.mask) == (width, None)
    assert_attends(case.attend(backend_type), case)


def test_the_rows_of_a_pad_before_its_one_key_see_nothing(make_case, backend_type):
    case = make_case([15], mode=V2, width=4, pads=1)
    case.key[4:], case.value[4:] = 1.0, 2.0
    out = case.attend(backend_type)
    assert out[4:7].eq(0).all()
    assert out[7].eq(2).all()


def test_a_dummy_slot_of_nan_stays_with_the_rows_that_see_it(
    make_case, assert_attends, backend_type
):
    case = make_case([15], mode=V2, width=4, pads=2)
    out = case.attend(backend_type)
    assert_attends(out, case)
    assert out[4:7].eq(0).all()


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (2, 3), (4, 2), (3, 5)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_draft_branches_see_their_ancestors(
    make_case, assert_attends, backend_type, topk, steps, page_size
):
    # Of K * S draft slots the last K are this step's; those before belong to the history here.
    lengths = [15 + topk * (steps - 1), topk * (steps - 1)]
    case = make_case(
        lengths, mode=DRAFT, width=topk, columns=topk * steps, tree=True, page_size=page_size,
        pads=1, heads=4,
    )  # fmt: skip
    metadata = backend_type(case.requests, case.pool).metadata(DRAFT, case.inputs)
    assert metadata.mask is case.inputs.custom_mask
    assert metadata.cache_seqlens.tolist() == [length + topk for length in [*lengths, 1]]
    assert_attends(case.attend(backend_type), case)


def test_columns_before_the_first_key_do_not_exist(make_case, assert_attends, backend_type):
    case = make_case([1, 0, 2], mode=DRAFT, width=3, columns=7, tree=True)
    assert_attends(case.attend(backend_type), case)


def test_a_draft_slot_that_no_branch_sees_cannot_leak(make_case, assert_attends, backend_type):
    case = make_case([15, 9], mode=DRAFT, width=2, columns=6, tree=True)
    case.inputs.custom_mask[0, :, 1] = False
    hidden = case.requests.req_to_token[case.inputs.req_pool_indices[0], 15 + 2 - 6 + 1]
    case.pool.get_key_buffer(1)[hidden] = torch.nan
    case.pool.get_value_buffer(1)[hidden] = torch.nan
    assert_attends(case.attend(backend_type), case)


@by(CPU, CUDA)
@pytest.mark.parametrize("mode", [*MODES, ForwardMode.IDLE])
def test_no_requests_in_any_mode(run, make_case, backend_type, mode):
    device = run.torch_device
    case = make_case([5], context=20, page_size=4, device=device)
    case.inputs = SimpleNamespace(
        req_pool_indices=torch.zeros(0, dtype=torch.int64, device=device),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.zeros(0, dtype=torch.int32, device=device),
        batch_size=0, num_tokens=0, tokens_per_request=0, custom_mask=None,
    )  # fmt: skip
    backend = backend_type(case.requests, case.pool)
    metadata = backend.metadata(mode, case.inputs)
    assert metadata.cache_seqlens.shape == (0,)
    assert metadata.cu_seqlens_q.tolist() == metadata.cu_seqlens_k.tolist() == [0]
    assert metadata.page_table.shape == (0, 5)
    tensors = (metadata.cache_seqlens, metadata.cu_seqlens_q, metadata.cu_seqlens_k)
    assert {tensor.dtype for tensor in (*tensors, metadata.page_table)} == {torch.int32}
    nothing = case.key[:0]
    out = backend.attend(1, case.query[:0], nothing, nothing, case.out_cache_loc[:0], metadata)
    assert out.shape == (0, 2, 16)


def test_requests_may_have_no_rows_at_all(make_case, backend_type):
    case = make_case([7, 3], mode=V1, width=3)
    case.inputs.num_accepted_tokens.zero_()
    case.inputs.num_tokens = 0
    for name in ("query", "key", "value", "out_cache_loc"):
        setattr(case, name, getattr(case, name)[:0])
    assert case.attend(backend_type).shape == (0, 2, 16)


@pytest.mark.parametrize("pages", [0, 2])
def test_rows_without_requests_or_pages_get_zeros(make_case, pages):
    args = list(make_case([7, 3]).op_args())
    args[3] = args[3][: 2 - pages, :pages]
    args[4], args[5] = args[4][: 2 - pages], args[5][: 3 - pages]
    assert torch.equal(paged_attention(*args), torch.zeros(2, 2, 16))


def test_more_rows_than_the_bound_leave_the_others_right(make_case, assert_attends):
    case = make_case([7, 3], mode=V1, width=3, rows=[2, 3])
    out = paged_attention(*case.op_args()[:9], 2)
    assert out.shape == case.query.shape
    case.histories.pop()
    case.own_rows.pop()
    assert_attends(out, case)


def test_packed_metadata(make_case):
    case = make_case([7, 3, 0], mode=V1, width=5, rows=[2, 5, 1], pads=2)
    metadata = TritonAttention(case.requests, case.pool).metadata(V1, case.inputs)
    assert metadata.cache_seqlens.tolist() == [9, 8, 1, 1, 1]
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 7, 8, 9, 10]
    assert metadata.cu_seqlens_k.tolist() == [0, 9, 17, 18, 19, 20]
    assert torch.equal(metadata.page_table, case.page_table())
    assert (metadata.max_seqlen_q, metadata.mask) == (5, None)


def test_a_request_without_rows_owns_none(make_case, assert_attends):
    case = make_case([7, 3, 9], mode=V1, width=3, rows=[2, 3, 1])
    args = list(case.op_args())
    args[3], args[4] = args[3][[0, 0, 1, 2]], args[4][[0, 0, 1, 2]]
    args[5] = torch.tensor([0, 0, 2, 5, 6], dtype=torch.int32)
    assert_attends(paged_attention(*args), case)


@pytest.mark.parametrize(
    ("mode", "changes", "text"),
    [
        (V2, {"num_tokens": 0}, "DRAFT_EXTEND_V2 batch of 2 requests has 0 rows.*to one width"),
        (V2, {"num_tokens": 3}, "of 2 requests has 3 rows"),
        (V2, {"custom_mask": torch.ones(2, 3, 3)}, "V2 batch has a custom_mask.*extends chains"),
        (V1, {"custom_mask": torch.ones(2, 3, 3)}, "EXTEND batch has a custom_mask"),
        (V1, {"tokens_per_request": 0}, "tokens_per_request is 0: set it to the most rows"),
        (V1, {"num_tokens": 7}, "of 2 requests has 7 rows, but tokens_per_request is 3"),
        (V1, {"num_accepted_tokens": None}, "has no num_accepted_tokens"),
        (V1, {"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, "extend_lens_B is .3."),
        (V1, {"num_accepted_tokens": torch.ones(2)}, "extend_lens_B is .2. float32"),
        (DRAFT, {"custom_mask": torch.ones(2, 3, 2)}, r"\[2, 3, 2\]: a DRAFT .* takes \[2, 3, 3\]"),
        (DRAFT, {"custom_mask": torch.ones(2, 2, 4)}, r"takes \[2, 3, 3\]"),
        (ForwardMode.TARGET_VERIFY, {"custom_mask": torch.ones(2, 3, 4)}, r"takes \[2, 3, 3\]"),
        (ForwardMode.IDLE, {}, "no paged attention metadata for IDLE: expected one of DECODE"),
    ],
)
def test_what_does_not_fit_is_refused(make_case, mode, changes, text):
    case = make_case([3, 3], width=3)
    vars(case.inputs).update(changes)
    with pytest.raises(AttentionError, match=text):
        TritonAttention(case.requests, case.pool).metadata(mode, case.inputs)
