"""Rows that vary, pads and draft trees: the CUDA kernels against the CPU's references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.paged_metadata import paged_metadata
from graphkit.spec import ForwardMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
BACKENDS = [TritonAttention, SdpaAttention]


def _problem(lengths, rows, dtype, *, width, tokens=None, columns=None, page_size=1, heads=4,
             kv_heads=2, head_dim=64):  # fmt: skip
    """Arguments of ``paged_attention`` on the CPU, in numbers that ``dtype`` holds."""
    torch.manual_seed(0)
    requests, pages = len(lengths), -(-max(lengths) // page_size)
    slots = (requests * pages + 1) * page_size
    tokens = requests * width if tokens is None else tokens
    mask = None
    if columns:
        mask = torch.rand(requests, width, columns) < 0.5
        mask[:, torch.arange(width), columns - width + torch.arange(width)] = True
    starts = torch.tensor([sum(rows[:b]) for b in range(requests + 1)], dtype=torch.int32)
    query, *caches = (
        torch.randn(size, rows_of, head_dim).to(dtype).float()
        for size, rows_of in ((tokens, heads), (slots, kv_heads), (slots, kv_heads))
    )
    query[int(starts[-1]) :] = torch.nan
    for cache in caches:
        cache[:page_size] = torch.nan
    table = (torch.randperm(requests * pages) + 1).view(requests, pages).int()
    return [query, *caches, table, torch.tensor(lengths, dtype=torch.int32), starts, mask,
            head_dim**-0.5, page_size, width]  # fmt: skip


def _agrees(args, dtype):
    want = paged_attention(*args)
    on_device = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    on_device[:3] = [tensor.to(dtype) for tensor in on_device[:3]]
    # Memory that the allocator returns next has held NaN.
    [torch.full(args[0].shape, torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    got = paged_attention(*on_device)
    assert got.dtype == dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), want, atol=limit, rtol=limit)
    assert got[int(args[5][-1]) :].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("width", "rows"),
    [(4, [4, 1, 3, 2]), (4, [1] * 4), (4, [4] * 4), (5, [5, 0, 2, 1]), (8, [1, 8, 1, 8])],
    ids=str,
)
def test_ragged_rows(dtype, page_size, width, rows):
    _agrees(_problem([130, 16, 9, 700], rows, dtype, width=width, page_size=page_size), dtype)


@pytest.mark.parametrize("width", [3, 20])
@pytest.mark.parametrize("extra", [0, 1, 100])
@pytest.mark.parametrize("length", [40, 4000])
def test_rows_of_no_request(width, extra, length):
    args = _problem([length, 7, 300], [1, 3, 2], torch.bfloat16, width=width, tokens=6 + extra,
                    heads=16)  # fmt: skip
    _agrees(args, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_keys(dtype):
    _agrees(_problem([130, 1, 2, 1], [4, 4, 4, 4], dtype, width=4, page_size=4), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("topk", "steps"), [(1, 5), (2, 3), (4, 4), (3, 40)])
def test_draft_trees(dtype, topk, steps):
    lengths = [topk * steps, 64 + topk * steps, 900, 1]
    args = _problem(lengths, [topk] * 4, dtype, width=topk, columns=topk * steps, page_size=4)
    _agrees(args, dtype)


@pytest.mark.parametrize("requests", [1, 5, 64, 1000, 1024])
def test_metadata_of_ragged_rows(requests):
    torch.manual_seed(requests)
    table = torch.randint(0, 10**6, (requests + 1, 512), dtype=torch.int32)
    rows = torch.randint(0, requests + 1, (requests,))
    lengths = torch.randint(1, 512, (requests,), dtype=torch.int32)
    extend_lens = torch.randint(0, 6, (requests,), dtype=torch.int32)
    tensors = (rows, lengths, table)
    on_device = paged_metadata(*(t.cuda() for t in tensors), 4, 128, 5, 0, extend_lens.cuda())
    for got, want in zip(on_device, paged_metadata(*tensors, 4, 128, 5, 0, extend_lens),
                         strict=True):  # fmt: skip
        assert torch.equal(got.cpu(), want)


def _extending(device):
    """Two live requests of up to four rows and a pad, v1."""
    torch.manual_seed(0)
    requests = ReqToTokenPool(3, 64, device)
    pool = MHATokenToKVPool(128, 1, torch.float32, 2, 32, 1, device)
    for tensor in pool.tensors().values():
        tensor.copy_(torch.randn(tensor.shape))
    requests.req_to_token[1:3] = torch.arange(1, 129, dtype=torch.int32).view(2, 64)
    inputs = SimpleNamespace(
        req_pool_indices=torch.tensor([2, 1, 0], device=device),
        seq_lens=torch.ones(3, dtype=torch.int32, device=device),
        num_accepted_tokens=torch.ones(3, dtype=torch.int32, device=device),
        batch_size=3, num_tokens=12, tokens_per_request=4,
    )  # fmt: skip
    rows = [torch.randn(12, heads, 32).to(device) for heads in (4, 2, 2)]
    loc = torch.zeros(12, dtype=torch.int64, device=device)
    return requests, pool, inputs, rows, loc


@pytest.mark.parametrize("backend_type", BACKENDS)
def test_captured_graph_follows_accepted_tokens(backend_type):
    ours, reference = _extending("cuda"), _extending("cpu")

    def step(kind, requests, pool, inputs, rows, loc):
        backend = kind(requests, pool)
        metadata = backend.metadata(ForwardMode.DRAFT_EXTEND, inputs)
        return backend.attend(0, *rows, loc, metadata)

    step(backend_type, *ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(backend_type, *ours)
    for accepted in ([4, 1, 1], [1, 1, 1], [4, 4, 4], [2, 3, 1]):
        lengths = [40 + accepted[0], 7 + accepted[1], 1]
        places = [64 + s for s in range(41, lengths[0] + 1)] + [8 + i for i in range(accepted[1])]
        places += [0] * (12 - len(places))
        for _, _, inputs, _, loc in (ours, reference):
            inputs.num_accepted_tokens.copy_(torch.tensor(accepted))
            inputs.seq_lens.copy_(torch.tensor(lengths))
            loc.copy_(torch.tensor(places))
        out.fill_(torch.nan)
        graph.replay()
        live = accepted[0] + accepted[1]
        want = step(SdpaAttention, *reference)
        torch.testing.assert_close(out[:live].cpu(), want[:live], atol=1e-5, rtol=1e-5)
        assert out[sum(accepted) :].eq(0).all()


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("mode", [*ForwardMode], ids=lambda mode: mode.name)
def test_no_requests(backend_type, mode):
    requests, pool, inputs, rows, loc = _extending("cuda")
    for name in ("req_pool_indices", "seq_lens", "num_accepted_tokens"):
        setattr(inputs, name, getattr(inputs, name)[:0])
    inputs.batch_size = inputs.num_tokens = inputs.tokens_per_request = 0
    backend = backend_type(requests, pool)
    metadata = backend.metadata(mode, inputs)
    assert metadata.cu_seqlens_q.tolist() == metadata.cu_seqlens_k.tolist() == [0]
    assert metadata.page_table.shape == (0, 64)
    out = backend.attend(0, *(tensor[:0] for tensor in rows), loc[:0], metadata)
    assert out.shape == (0, 4, 32)
