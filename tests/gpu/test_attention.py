"""The CUDA kernels against float64, eager and in a captured graph, up to 64 requests of 4096."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphkit.config import BufferSizes
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.ops.paged_metadata import paged_metadata
from graphkit.spec import ForwardMode
from launched_kernels import launches
from sanitized import sanitized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


class Batch:
    """Live requests, then pads; NaN in every slot that no live row may see."""

    def __init__(self, lengths, dtype, *, width=4, heads=4, kv_heads=2, head_dim=64, page_size=1,
                 tree=False, pads=1, context=None):  # fmt: skip
        torch.manual_seed(0)
        live, self.width, self.lengths = len(lengths), width, lengths
        batch = live + pads
        pages = [-(-(length + width) // page_size) for length in lengths]
        context = context or max(lengths) + width
        self.pool = MHATokenToKVPool(
            sum(pages) * page_size, page_size, dtype, kv_heads, head_dim, 1, "cuda"
        )
        self.keys, self.values = self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)
        self.requests = ReqToTokenPool(batch, context, "cuda")
        free = torch.randperm(sum(pages)) + 1
        self.slots = []
        self.loc = torch.zeros(batch * width, dtype=torch.int64, device="cuda")
        for b, length in enumerate(lengths):
            mine, free = free[: pages[b]], free[pages[b] :]
            slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()
            slots = slots[: length + width].cuda()
            self.requests.req_to_token[live - b, : length + width] = slots.int()
            self.loc[b * width : (b + 1) * width] = slots[length:]
            self.slots.append(slots)
        for cache in (self.keys, self.values):
            for slots, length in zip(self.slots, lengths, strict=True):
                cache[slots[:length]] = _randn(length, kv_heads, head_dim, dtype=dtype)
        masks = torch.zeros(batch, width, width, dtype=torch.bool)
        for b in range(live):
            for node in range(width):
                masks[b, node] |= masks[b, int(torch.randint(max(node, 1), ()))]
                masks[b, node, node] = True
        self.inputs = SimpleNamespace(
            req_pool_indices=torch.tensor([live - b for b in range(live)] + [0] * pads).cuda(),
            seq_lens=torch.tensor(lengths + [1] * pads, dtype=torch.int32).cuda(),
            batch_size=batch,
            num_tokens=batch * width,
            custom_mask=masks.cuda() if tree else None,
        )
        self.query = _randn(batch * width, heads, head_dim, dtype=dtype)
        self.new = [_randn(batch * width, kv_heads, head_dim, dtype=dtype) for _ in "kv"]
        for rows in self.new:
            rows[live * width :] = torch.nan

    def attend(self, backend):
        metadata = backend.metadata(ForwardMode.TARGET_VERIFY, self.inputs)
        return backend.attend(0, self.query, *self.new, self.loc, metadata)

    def check(self, out):
        """Compare the live rows, whose keys and values lie in the pool by now."""
        heads, head_dim = self.query.shape[1:]
        group, width = heads // self.pool.head_num, self.width
        for b, (length, slots) in enumerate(zip(self.lengths, self.slots, strict=True)):
            own = slice(b * width, (b + 1) * width)
            keys, values = (x[slots].double().repeat_interleave(group, 1)
                            for x in (self.keys, self.values))  # fmt: skip
            scores = torch.einsum("wnd,lnd->nwl", self.query[own].double(), keys) * head_dim**-0.5
            mask = torch.ones(width, width, dtype=torch.bool, device="cuda").tril()
            if self.inputs.custom_mask is not None:
                mask = self.inputs.custom_mask[b]
            scores[:, :, length:].masked_fill_(~mask, -torch.inf)
            want = torch.einsum("nwl,lnd->wnd", scores.softmax(-1), values)
            limit = TOLERANCE[out.dtype]
            torch.testing.assert_close(out[own].double(), want, atol=limit, rtol=limit)


def _randn(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def _attends(batch):
    batch.check(batch.attend(TritonAttention(batch.requests, batch.pool)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, *sanitized(3), 4, 8])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_matches_float64(dtype, page_size, width, tree):
    _attends(Batch([5, 15, 16, 17, 130], dtype, width=width, page_size=page_size, tree=tree))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("head_dim", [16, 24, 80, 128, 256])
def test_groups_and_head_sizes(dtype, group, head_dim):
    _attends(Batch([66, 3], dtype, heads=2 * group, head_dim=head_dim, tree=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_several_row_tiles(dtype, head_dim):
    _attends(Batch([9, 300], dtype, width=20, heads=16, head_dim=head_dim, tree=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("live", [*sanitized(1), 64])
def test_long_contexts(dtype, live):
    lengths = [4092 - 61 * b for b in range(live)]
    _attends(Batch(lengths, dtype, heads=16, kv_heads=4, head_dim=128, page_size=16, tree=True,
                   context=4096))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_backend_agrees(dtype):
    batch = Batch([5, 16, 130], dtype, page_size=4, tree=True)
    batch.check(batch.attend(SdpaAttention(batch.requests, batch.pool)))


@pytest.mark.parametrize("backend_type", [TritonAttention, SdpaAttention])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_captured_graph_follows_its_inputs(backend_type, tree):
    batch = Batch([70, 300, 16], torch.bfloat16, page_size=4, tree=tree, context=512)
    backend = backend_type(batch.requests, batch.pool)
    backend.init_state(BufferSizes(4, 512, 1, 1, torch.bfloat16, 4), max_tokens=16)
    batch.attend(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.attend(backend)
    order = torch.tensor([2, 0, 1, 3], device="cuda")
    rows = (order[:, None] * batch.width + torch.arange(batch.width, device="cuda")).flatten()
    per_request = [batch.inputs.req_pool_indices, batch.inputs.seq_lens]
    per_request += [batch.inputs.custom_mask] if tree else []
    for _ in range(2):
        for tensor in per_request:
            tensor.copy_(tensor[order])
        for tensor in (batch.query, *batch.new, batch.loc):
            tensor.copy_(tensor[rows])
        batch.lengths = [batch.lengths[i] for i in order.tolist()[:3]]
        batch.slots = [batch.slots[i] for i in order.tolist()[:3]]
        out.fill_(torch.nan)
        graph.replay()
        batch.check(out)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_replays_of_split_attention_are_equal(tree):
    """The join waits for all partial results, though it starts before they are there."""
    batch = Batch([4000], torch.bfloat16, heads=32, kv_heads=8, head_dim=128, page_size=16,
                  tree=tree, pads=0)  # fmt: skip
    backend = TritonAttention(batch.requests, batch.pool)
    batch.attend(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [batch.attend(backend) for _ in range(3)]
    want = None
    for _ in range(100):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        want = outs[0].clone() if want is None else want
        assert all(torch.equal(out, want) for out in outs)
    batch.check(want)


@pytest.mark.parametrize("width", [1, 4])
def test_steps_read_the_keys_of_earlier_steps(width):
    """Attention requests older keys while the store runs, among them those of the step before."""
    steps, tokens = 8, 2 * width
    batch = Batch([500, 3000], torch.bfloat16, width=width, heads=32, kv_heads=8, head_dim=128,
                  page_size=16, pads=0)  # fmt: skip
    backend = TritonAttention(batch.requests, batch.pool)
    begins = [length - width * (steps - 1) for length in batch.lengths]
    appended = []
    for step in range(steps):
        lengths = [begin + width * step for begin in begins]
        lengths_on_device = torch.tensor(lengths, dtype=torch.int32).cuda()
        inputs = SimpleNamespace(**vars(batch.inputs) | {"seq_lens": lengths_on_device})
        own = zip(batch.slots, lengths, strict=True)
        loc = torch.cat([slots[length : length + width] for slots, length in own])
        rows = [_randn(tokens, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8)]
        appended.append((inputs, loc, rows))

    def run():
        for inputs, loc, rows in appended:
            metadata = backend.metadata(ForwardMode.TARGET_VERIFY, inputs)
            yield backend.attend(0, *rows, loc, metadata)

    def forget_rows():
        for cache in (batch.keys, batch.values):
            for slots, begin in zip(batch.slots, begins, strict=True):
                cache[slots[begin:]] = torch.nan

    forget_rows()
    want = []
    for out in run():
        torch.cuda.synchronize()
        want.append(out)
    assert all(out.isfinite().all() for out in want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = list(run())
    for _ in range(50):
        forget_rows()
        graph.replay()
        assert all(map(torch.equal, outs, want))


@pytest.mark.parametrize("requests", [1, 2, 64, 1000, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
def test_metadata_matches_the_reference(requests, page_size):
    torch.manual_seed(requests)
    table = torch.randint(0, 10**6, (requests + 1, 4096), dtype=torch.int32)
    rows = torch.randint(0, requests + 1, (requests,))
    lengths = torch.randint(0, 4096 - 4, (requests,), dtype=torch.int32)
    numbers = (page_size, -(-4096 // page_size), 4, 4)
    got = paged_metadata(rows.cuda(), lengths.cuda(), table.cuda(), *numbers)
    for one, other in zip(got, paged_metadata(rows, lengths, table, *numbers), strict=True):
        assert torch.equal(one.cpu(), other)


def test_metadata_is_one_kernel():
    batch = Batch([70, 300, 16], torch.bfloat16)
    backend = TritonAttention(batch.requests, batch.pool)
    names = launches(lambda: batch.attend(backend))
    ours = [name for name in names if name.endswith("_kernel")]
    assert ours[:3] == ["paged_metadata_kernel", "store_kv_kernel", "paged_attention_kernel"]
    assert set(ours[3:]) <= {"join_splits_kernel"}
