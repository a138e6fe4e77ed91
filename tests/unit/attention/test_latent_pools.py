"""The pools of latents and of index keys: layout, writes, refusals."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.kv import DSATokenToKVPool, MLATokenToKVPool
from graphkit.errors import AttentionError
from launched_kernels import launches
from op_devices import CPU, CUDA, by, captured

MLA = {
    "size": 8, "page_size": 4, "dtype": torch.bfloat16, "kv_lora_rank": 12,
    "qk_rope_head_dim": 5, "layer_num": 3, "device": "cpu",
}  # fmt: skip
DSA = MLA | {"index_head_dim": 16}
BOTH = [(MLATokenToKVPool, MLA), (DSATokenToKVPool, DSA)]


@pytest.fixture(params=BOTH, ids=["MLA", "DSA"])
def made(request):
    pool_type, arguments = request.param
    return pool_type, arguments


def test_a_row_is_the_latent_and_the_rotated_part(made):
    pool_type, arguments = made
    pool = pool_type(**arguments)
    for layer in range(3):
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        assert keys is pool.tensors()[f"kv.{layer}"]
        assert (keys.shape, values.shape) == ((12, 1, 17), (12, 1, 12))
        assert keys.data_ptr() == values.data_ptr()
        assert keys.dtype == torch.bfloat16
        assert keys.eq(0).all()
    assert (pool.kv_lora_rank, pool.qk_rope_head_dim) == (12, 5)


@by(CPU, CUDA)
def test_a_token_is_written_into_one_layer(run, made):
    pool_type, arguments = made
    device = run.torch_device
    pool = pool_type(**arguments | {"device": device})
    latent, rotated = torch.randn(3, 1, 12, device=device), torch.randn(3, 1, 5, device=device)
    loc = torch.tensor([11, 0, 4], device=device)
    pool.set_mla_kv_buffer(1, loc, latent, rotated)
    assert torch.equal(pool.get_key_buffer(1)[loc], torch.cat([latent, rotated], -1).bfloat16())
    assert torch.equal(pool.get_value_buffer(1)[loc], latent.bfloat16())
    rest = [slot for slot in range(12) if slot not in loc.tolist()]
    assert pool.get_key_buffer(1)[rest].eq(0).all()
    assert sum(int(tensor.any()) for tensor in pool.tensors().values()) == 1
    pool.set_mla_kv_buffer(1, loc[:0], latent[:0], rotated[:0])


def test_slices_of_a_fused_projection_are_taken(made):
    pool_type, arguments = made
    pool = pool_type(**arguments)
    fused = torch.randn(2, 1, 20).bfloat16()
    pool.set_mla_kv_buffer(0, torch.tensor([5, 6]), *fused[..., :17].split([12, 5], -1))
    assert torch.equal(pool.get_key_buffer(0)[[5, 6]], fused[..., :17])


@by(CPU, CUDA)
def test_a_captured_write_follows_its_tensors(run, made):
    pool_type, arguments = made
    pool = pool_type(**arguments | {"device": run.torch_device})
    latent, rotated = (torch.ones(1, 1, size, device=pool.device) for size in (12, 5))
    loc = torch.tensor([5], device=pool.device)
    graph = captured(run, lambda: pool.set_mla_kv_buffer(0, loc, latent, rotated))
    loc.fill_(7)
    latent.fill_(2)
    graph.replay()
    assert pool.get_key_buffer(0)[7, 0].tolist() == [2.0] * 12 + [1.0] * 5


@pytest.mark.gpu
def test_slots_outside_the_pool_are_written_by_one_kernel_to_nowhere():
    pool = DSATokenToKVPool(**DSA | {"device": "cuda"})
    latent, rotated, keys = (torch.ones(5, size, device="cuda") for size in (12, 5, 16))
    outside = torch.tensor([-1, 12, 10**12, -12, 13], device="cuda")
    rows = latent[:, None], rotated[:, None]
    assert launches(lambda: pool.set_mla_kv_buffer(1, outside, *rows)) == ["store_kv_kernel"]
    assert launches(lambda: pool.set_index_k_buffer(1, outside, keys)) == ["store_kv_kernel"]
    assert not any(tensor.any() for tensor in pool.tensors().values())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer": 3}, "no layer 3: it has 3"),
        ({"loc": torch.tensor([1], dtype=torch.int32)}, "loc_T is .1. int32"),
        ({"cache_k_nope": torch.zeros(1, 12)}, r"key_TMD is \[1, 12\]"),
        ({"cache_k_nope": torch.zeros(2, 1, 12)}, r"key_TMD is \[2, 1, 12\]"),
        ({"cache_k_rope": torch.zeros(1, 1, 12)}, r"value_TMD is \[1, 1, 12\]"),
        (
            {"cache_k_rope": torch.zeros(1, 1, 5).int()},
            "rows for a floating-point cache",
        ),
    ],
)
def test_writes_are_checked(made, changes, text):
    pool_type, arguments = made
    given = {
        "layer": 0, "loc": torch.tensor([1]), "cache_k_nope": torch.zeros(1, 1, 12),
        "cache_k_rope": torch.zeros(1, 1, 5),
    }  # fmt: skip
    with pytest.raises(AttentionError, match=text):
        pool_type(**arguments).set_mla_kv_buffer(**given | changes)


@by(CPU, CUDA)
@pytest.mark.parametrize("size", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_come_back(run, dtype, size):
    pool = DSATokenToKVPool(**DSA | {"index_head_dim": size, "device": run.torch_device})
    keys = torch.randn(3, size, device=pool.device).to(dtype)
    loc = torch.tensor([11, 4, 5], device=pool.device)
    graph = captured(run, lambda: pool.set_index_k_buffer(2, loc, keys))
    pool.get_index_k_buffer(2).zero_()
    graph.replay()
    assert torch.equal(pool.get_index_k_buffer(2)[loc], keys.bfloat16())
    assert pool.get_index_k_buffer(2)[[0, 1, 2, 3, 6, 7, 8, 9, 10]].eq(0).all()
    assert sum(int(tensor.any()) for tensor in pool.tensors().values()) == 1


def test_index_layout():
    pool = DSATokenToKVPool(**DSA)
    assert [f"index_k.{layer}" for layer in range(3)] == list(pool.tensors())[3:]
    for layer in range(3):
        buffer = pool.get_index_k_buffer(layer)
        assert buffer is pool.tensors()[f"index_k.{layer}"]
        assert (buffer.shape, buffer.dtype) == ((12, 16), torch.bfloat16)
    assert pool.index_head_dim == 16


@pytest.mark.parametrize(
    ("layer", "keys", "text"),
    [
        (3, torch.zeros(1, 16), "no layer 3"),
        ("0", torch.zeros(1, 16), "no layer '0'"),
        (0, torch.zeros(1, 15), r"index_k_TI is \[1, 15\] float32 .* = \[T, 16\]"),
        (0, torch.zeros(2, 16), r"key_TMD is \[2, 1, 8\]"),
        (0, torch.zeros(1, 1, 16), r"index_k_TI is \[1, 1, 16\]"),
        (0, torch.zeros(1, 16).int(), r"\[1, 16\] int32 .* floating-point dtype"),
    ],
)
def test_index_keys_are_checked(layer, keys, text):
    with pytest.raises(AttentionError, match=text):
        DSATokenToKVPool(**DSA).set_index_k_buffer(layer, torch.tensor([4]), keys)
