"""Latents, windows, sinks, softcaps and selected keys: CUDA against the CPU's references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MLATokenToKVPool, ReqToTokenPool
from graphkit.ops.paged_attention import paged_attention
from graphkit.spec import ForwardMode
from sanitized import sanitized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
LENGTHS = [130, 5, 1500]


def _agrees(dtype, *, width=4, heads=8, kv_heads=2, key_dim=64, latent=0, page_size=16,
            columns=0, window=0, softcap=0.0, sinks=False, chunked=False,
            lengths=LENGTHS):  # fmt: skip
    """Compare both devices on numbers that ``dtype`` holds; keys outside all windows are NaN."""
    torch.manual_seed(0)
    requests, pages = len(lengths), -(-max(lengths) // page_size)
    slots = (requests * pages + 1) * page_size
    rounded = [
        torch.randn(size, each, key_dim).to(dtype).float()
        for size, each in ((requests * width, heads), (slots, kv_heads), (slots, kv_heads))
    ]
    table = (torch.randperm(requests * pages) + 1).view(requests, pages).int()
    for cache in rounded[1:]:
        cache[:page_size] = torch.nan
        for b, length in enumerate(lengths):
            begin = length - width + 1 - window if window else 0
            begin = (length - width) // window * window if chunked else begin
            outside = torch.arange(max(0, begin))
            cache[table[b, outside // page_size].long() * page_size + outside % page_size] = (
                torch.nan
            )
    mask = None
    if columns:
        mask = torch.rand(requests, width, columns) < 0.5
        mask[:, torch.arange(width), columns - width + torch.arange(width)] = True
    starts = torch.arange(0, (requests + 1) * width, width, dtype=torch.int32)

    def run(device, kind):
        query, key, value = (each.to(device, kind) for each in rounded)
        value = key[..., :latent] if latent else value
        tensors = [each if each is None else each.to(device) for each in
                   (table, torch.tensor(lengths, dtype=torch.int32), starts, mask)]  # fmt: skip
        sinks_N = torch.linspace(-1, 3, heads).to(device) if sinks else None
        return paged_attention(
            query,
            key,
            value,
            *tensors,
            key_dim**-0.5,
            page_size,
            width,
            window,
            softcap,
            sinks_N,
            chunked=chunked,
        )

    got, want, limit = run("cuda", dtype), run("cpu", torch.float32), TOLERANCE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.float().cpu(), want, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, *sanitized(16), 64])
@pytest.mark.parametrize("columns", [0, 4, 12], ids=["chain", "tree", "draft tree"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(dtype, page_size, columns, heads):
    _agrees(dtype, heads=heads, kv_heads=1, key_dim=576, latent=512, page_size=page_size,
            columns=columns)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("key_dim", [40, 96])
def test_small_latents(dtype, width, key_dim):
    _agrees(dtype, width=width, kv_heads=1, key_dim=key_dim, latent=key_dim - 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4, 70])
@pytest.mark.parametrize("key_dim", [320, 512])
def test_large_heads(dtype, width, key_dim):
    _agrees(dtype, width=width, heads=8, key_dim=key_dim, lengths=[130, 75, 1500])


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_that_are_not_aligned_to_16_bytes(page_size):
    _agrees(torch.float16, kv_heads=1, key_dim=36, latent=32, page_size=page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize("window", [3, 4, 63, 128, 4096])
@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunked"])
def test_windows(dtype, columns, window, chunked):
    _agrees(dtype, columns=columns, window=window, chunked=chunked)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [0, 4])
@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "window": 70}],
    ids=str,
)  # fmt: skip
def test_options(dtype, columns, options):
    _agrees(dtype, columns=columns, **options)


def test_a_long_chain_over_many_tiles():
    _agrees(torch.bfloat16, width=200, lengths=[200, 333], heads=16)
    _agrees(torch.bfloat16, width=200, lengths=[200, 333], heads=16, window=64)


@pytest.mark.parametrize("backend_type", [TritonAttention, SdpaAttention])
def test_a_captured_layer_of_latents(backend_type):
    torch.manual_seed(0)
    requests = ReqToTokenPool(3, 64, "cuda")
    pool = MLATokenToKVPool(192, 1, torch.float32, 32, 16, 1, "cuda")
    requests.req_to_token[1:] = torch.arange(1, 193, dtype=torch.int32).view(3, 64)
    for tensor in pool.tensors().values():
        tensor.normal_()
    inputs = SimpleNamespace(
        req_pool_indices=torch.tensor([2, 1, 3], device="cuda"),
        seq_lens=torch.tensor([9, 30, 17], dtype=torch.int32, device="cuda"),
        batch_size=3, num_tokens=12, tokens_per_request=4, custom_mask=None,
    )  # fmt: skip
    query = torch.randn(12, 8, 48, device="cuda")
    latents, rotated = (torch.randn(12, 1, size, device="cuda") for size in (32, 16))
    places = inputs.seq_lens[:, None] + torch.arange(4, device="cuda")
    loc = requests.req_to_token[inputs.req_pool_indices[:, None], places].flatten().long()

    def step(kind):
        backend = kind(requests, pool, scale=0.2)
        metadata = backend.metadata(ForwardMode.TARGET_VERIFY, inputs)
        return backend.attend(0, query, latents, rotated, loc, metadata, window=12)

    step(backend_type)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(backend_type)
    for _ in range(2):
        query.normal_()
        graph.replay()
        torch.testing.assert_close(out, step(SdpaAttention), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [TritonAttention, SdpaAttention])
def test_a_captured_layer_follows_the_selected_keys(kind):
    """Replays attend to the positions of the moment, as the eager layer on the CPU."""
    made = {}
    for device in ("cuda", "cpu"):
        requests, pool = (
            ReqToTokenPool(3, 64, device),
            MLATokenToKVPool(192, 1, torch.float32, 32, 16, 1, device),
        )
        requests.req_to_token[1:] = torch.arange(1, 193, dtype=torch.int32).view(3, 64)
        torch.manual_seed(0)
        pool.get_key_buffer(0).copy_(torch.randn(193, 1, 48))
        inputs = SimpleNamespace(
            req_pool_indices=torch.tensor([2, 1, 3], device=device),
            seq_lens=torch.tensor([9, 30, 17], dtype=torch.int32, device=device),
            batch_size=3, num_tokens=12, tokens_per_request=4, custom_mask=None,
        )  # fmt: skip
        query, positions = torch.randn(12, 8, 48), torch.randint(-1, 9, (12, 6)).sort().values
        made[device] = requests, pool, inputs, query.to(device), positions.flip(1).to(device)

    def step(device):
        requests, pool, inputs, query, positions = made[device]
        backend = kind(requests, pool, scale=0.2)
        metadata = backend.metadata(ForwardMode.TARGET_VERIFY, inputs)
        return backend.attend_positions(0, query, positions, metadata)

    step("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step("cuda")
    for _ in range(2):
        for device in made:
            query, positions = made[device][3:]
            query.copy_(query.flip(0))
            positions.copy_(positions.roll(1, 0))
        graph.replay()
        torch.testing.assert_close(out.cpu(), step("cpu"), atol=1e-4, rtol=1e-4)
