"""The CUDA kernels that write KV pools against their references, eager and in a captured graph."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from launched_kernels import launches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS = 80


def _pools(kind, layers=3):
    """One pool on the device and one on the CPU, with the same random bytes."""
    torch.manual_seed(0)
    sizes = (SLOTS - 4, 4)
    both = []
    for device in ("cuda", "cpu"):
        if kind == "MHA":
            both.append(MHATokenToKVPool(*sizes, torch.bfloat16, 8, 128, layers, device))
        elif kind == "odd":
            both.append(MHATokenToKVPool(*sizes, torch.float16, 3, 5, layers, device))
        elif kind == "MLA":
            both.append(MLATokenToKVPool(*sizes, torch.bfloat16, 512, 64, layers, device))
        else:
            both.append(DSATokenToKVPool(*sizes, torch.bfloat16, 512, 64, layers, device, 128))
    for name, tensor in both[1].tensors().items():
        tensor.copy_(torch.randint(0, 200, tensor.shape))
        both[0].tensors()[name].copy_(tensor)
    return both


def _same(ours, reference):
    for name, tensor in reference.tensors().items():
        assert torch.equal(ours.tensors()[name].cpu(), tensor), name


KINDS = pytest.mark.parametrize("kind", ["MHA", "odd", "MLA", "DSA"])


@KINDS
@pytest.mark.parametrize(
    ("target", "source"),
    [
        ([2, 3, 4], [1, 2, 3]),
        ([1, 2, 3], [2, 3, 4]),
        ([5, 79], [79, 5]),
        ([7, 0, 0, 9, 0], [9, 0, 0, 7, 0]),
        (list(range(1, 80)), list(range(79, 0, -1))),
        ([], []),
    ],
    ids=["up", "down", "swap", "pads", "reverse", "none"],
)
def test_moves(kind, target, source):
    ours, reference = _pools(kind)
    target, source = (torch.tensor(loc, dtype=torch.int64) for loc in (target, source))
    reference.move_kv_cache(target, source)
    ours.move_kv_cache(target.cuda(), source.cuda())
    _same(ours, reference)


@KINDS
def test_slots_outside_move_nothing(kind):
    ours, reference = _pools(kind)
    target = torch.tensor([SLOTS, -1, 1, 2, 10**12], device="cuda")
    ours.move_kv_cache(target, torch.tensor([1, 2, -1, SLOTS, 0], device="cuda"))
    _same(ours, reference)


@KINDS
@pytest.mark.parametrize("layers", [1, 12])
def test_layers_cost_no_launches(kind, layers):
    ours, _ = _pools(kind, layers)
    target, source = (torch.tensor(loc, device="cuda") for loc in ([1, 2, 3], [2, 3, 4]))
    assert launches(lambda: ours.move_kv_cache(target, source)) == ["move_kv_kernel"] * 2
    assert launches(lambda: ours.move_kv_cache(target[:0], source[:0])) == []
    empty, _ = _pools(kind, 0)
    assert launches(lambda: empty.move_kv_cache(target, source)) == []


@KINDS
def test_a_captured_move_follows_its_locations(kind):
    ours, reference = _pools(kind)
    target, source = (torch.zeros(6, dtype=torch.int64, device="cuda") for _ in range(2))
    ours.move_kv_cache(target, source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.move_kv_cache(target, source)
    for slots in (([1, 2, 3, 0, 0, 0], [2, 3, 4, 0, 0, 0]), ([9, 8, 7, 6, 5, 4], range(1, 7))):
        slots = [torch.tensor(list(loc)) for loc in slots]
        target.copy_(slots[0])
        source.copy_(slots[1])
        reference.move_kv_cache(*slots)
        graph.replay()
        _same(ours, reference)


@pytest.mark.parametrize("kind", ["MLA", "DSA"])
def test_latents_are_stored_by_one_kernel(kind):
    ours, reference = _pools(kind)
    latent, rotated = torch.randn(5, 1, 512), torch.randn(5, 1, 64)
    loc = torch.tensor([79, 0, 4, 9, 5])
    reference.set_mla_kv_buffer(1, loc, latent, rotated)
    on_device = [tensor.cuda() for tensor in (loc, latent, rotated)]
    assert launches(lambda: ours.set_mla_kv_buffer(1, *on_device)) == ["store_kv_kernel"]
    _same(ours, reference)
    outside = torch.tensor([-1, SLOTS, 10**12, -SLOTS, SLOTS + 1], device="cuda")
    ours.set_mla_kv_buffer(1, outside, *on_device[1:])
    _same(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_are_stored(dtype):
    ours, reference = _pools("DSA")
    keys, loc = torch.randn(6, 128).to(dtype), torch.tensor([79, 3, 4, 9, 5, 8])
    reference.set_index_k_buffer(2, loc, keys)
    keys, places = keys.cuda(), loc.cuda()
    ours.set_index_k_buffer(2, places, keys)
    _same(ours, reference)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.set_index_k_buffer(2, places, keys)
    places.copy_(loc.flip(0))
    graph.replay()
    reference.set_index_k_buffer(2, loc.flip(0), keys.cpu())
    _same(ours, reference)


def test_the_index_cache_keeps_nothing_of_slots_outside():
    ours, reference = _pools("DSA")
    loc = torch.tensor([-1, SLOTS], device="cuda")
    ours.set_index_k_buffer(0, loc, torch.randn(2, 128, device="cuda"))
    _same(ours, reference)
