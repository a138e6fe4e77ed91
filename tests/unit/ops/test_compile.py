"""The kernels of a whole step compile for sm_90 without a GPU.

The interpreter runs Python, so it accepts what the compiler refuses: a name with two types, say.
"""

from __future__ import annotations

import itertools
import re
from functools import partialmethod

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import quantized_cases
from graphkit.ops.accepted_path import compact_accepted_to_front
from graphkit.ops.decoder import add_rms_norm, embed_and_join, rms_norm, silu_and_mul
from graphkit.ops.device_loop import advance_loop
from graphkit.ops.draft_length import choose_body
from graphkit.ops.experts import choose_experts, expert_linear, expert_sum, group_by_expert
from graphkit.ops.heads import rotated_heads, store_rotated_heads
from graphkit.ops.kernels import quantized_linear_config
from graphkit.ops.kernels.attention_config import LARGE_KEYS
from graphkit.ops.kernels.paged_attention import EARLY_FP8_KEYS, EARLY_KEYS
from graphkit.ops.kernels.push_collectives import (
    SPAN,
    PushMemory,
    launch_push_add_rms_norm,
    launch_push_all_gather,
    launch_push_all_reduce,
)
from graphkit.ops.kernels.step_state import begin_step_kernel
from graphkit.ops.kv_cache import buffer_table, move_kv, store_kv
from graphkit.ops.latent_heads import store_latent_heads
from graphkit.ops.linear import linear, multiply_heads
from graphkit.ops.logits import argmax_rows
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.paged_metadata import paged_metadata
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.recurrent import update_size
from graphkit.ops.refresh import RING_WORDS, refresh
from graphkit.ops.registration import OPS
from graphkit.ops.rows import gather_rows, scatter_rows
from graphkit.ops.step_state import finish_step
from graphkit.ops.stored_tokens import store_tokens
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree import build_tree
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy
from step_cases import CASES

DEVICE = torch.device("cpu")
ACCESS = re.compile(r"^\s*(?:@\S+ )?((?:ld|st|atom|red|cp)\S*\.global\S*)", re.MULTILINE)
"""Accesses to memory in PTX; requests into a cache (``prefetch``) are none."""
LETTERS = {
    torch.bool: "i1", torch.int32: "i32", torch.int64: "i64", torch.bfloat16: "bf16",
    torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv", torch.int16: "i16",
}  # fmt: skip


def walk_args(requests, seed):
    """Arguments of ``verify_tree_greedy``, from those of ``accept_tokens``."""
    candidates, child, sibling, target, longest = CASES["accept_tokens"][1](requests, seed)
    path = torch.zeros(requests, longest, dtype=torch.int32)
    rows = torch.arange(candidates.numel()).view_as(candidates)
    predicts = torch.zeros(candidates.numel(), dtype=torch.int32)
    links = candidates, rows, child, sibling
    return predicts, path, path[:, 0].clone(), *links, target.view_as(candidates)


def sampling_args(requests, seed):
    *walk, target = walk_args(requests, seed)
    samples, probs = torch.rand(target.shape), torch.rand(*target.shape, 9)
    draft_probs = probs if seed % 2 else None
    return *walk, samples, samples[:, 0].clone(), probs, draft_probs, 1.0, 1.0


def large_probs_args(requests, seed):
    """Arguments of ``target_probs`` whose rows have several chunks."""
    _, *others, width = CASES["target_probs"][1](requests, seed)
    return torch.zeros(requests * width, 9000, dtype=torch.float64), *others, width


def in_parts(name):
    """Return the op of a case, and a maker of its arguments whose rows have several parts."""
    op, make, _ = CASES[name]

    def make_large(requests, seed):
        args = list(make(requests, seed))
        logits, token_map = (1, 3) if op is argmax_rows else (0, 4)
        args[logits] = torch.zeros(len(args[logits]), 30_000, dtype=args[logits].dtype)
        args[token_map] = None if args[token_map] is None else torch.zeros(30_000).long()
        return args

    return op, make_large


IN_PARTS = {
    f"{name} in parts": in_parts(name)
    for name in (
        "argmax_rows of bfloat16", "argmax_rows of some rows", "argmax_rows with a map",
        "top_candidates of 4", "top_candidates of some rows", "top_candidates with a map",
    )
}  # fmt: skip
MAKERS = {name: (op, make) for name, (op, make, _) in CASES.items()} | {
    **IN_PARTS,
    "target_probs of a large vocabulary": (target_probs, large_probs_args),
    "verify_tree_greedy": (verify_tree_greedy, walk_args),
    "tree_sampling": (tree_speculative_sampling_target_only, sampling_args),
}


def compile_only(kernel, *args, grid, warmup, capability=90, **options):
    """Compile a launch with the types of its arguments, as Triton specialises them.

    None and 1 become constants. Multiples of 16 are marked as such.
    """
    types, constants, attributes = {}, {}, {}

    def type_of(place, value, parameter, is_constant):
        if isinstance(value, tuple) and not is_constant:
            parts = enumerate(value)
            return tuple(type_of((*place, i), each, parameter, False) for i, each in parts)
        is_number = isinstance(value, int) and not parameter.do_not_specialize
        if is_constant or value is None or (is_number and value == 1):
            constants[place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attributes[place] = [["tt.divisibility", 16]]  # as memory of torch's allocator
            return f"*{LETTERS[value.dtype]}"
        if isinstance(value, TensorDescriptor):
            letters = LETTERS[value.base.dtype]
            return f"tensordesc<{letters}{list(value.block_shape)},{value.layout!r}>"
        if is_number and value % 16 == 0 and not parameter.do_not_specialize_on_alignment:
            attributes[place] = [["tt.divisibility", 16]]
        return "i32" if isinstance(value, int) else "fp32"

    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        types[parameter.name] = type_of((index,), value, parameter, parameter.is_constexpr)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make_source(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


compiles = pytest.mark.skipif(
    not isinstance(begin_step_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set"
)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", MAKERS)
def test_kernels_compile(name, monkeypatch):
    compiled = []

    def run(kernel, *args, **options):
        compiled.append(kernel.__name__)
        compile_only(kernel, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op, make = MAKERS[name]
    for seed in (1, 2):
        OPS[op.__name__].launch(OPS[op.__name__].arguments(*make(3, seed)))
    assert compiled
    assert compiled[: len(compiled) // 2] * 2 == compiled


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_of_pushed_words_compile(dtype, monkeypatch):
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    calls, addresses = torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    memory = PushMemory(calls, addresses, rank=0, capacity=8 * SPAN)
    x, weight = torch.zeros(2, 3 * SPAN, dtype=dtype), torch.zeros(3 * SPAN, dtype=dtype)
    launch_push_all_reduce(x, memory)
    launch_push_all_gather(x, memory)
    launch_push_add_rms_norm(x, x, weight, 1e-5, memory)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("rows", [1, 40, 200, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_quantised_weights_compile(dtype, rows, monkeypatch):
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(quantized_linear_config, "LEAST_BLOCKS", 1)
    for args in quantized_cases.cases(DEVICE, [dtype], [rows], shapes=((130, 384), (128, 512))):
        op = OPS["quantized_linear"]
        op.launch(op.arguments(*args))


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_numbers_of_four_bits_compile_for_each_capability(capability, monkeypatch):
    run = partialmethod(compile_only, capability=capability)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    op = OPS["quantized_linear"]
    for name, weight, scale, zero_point, inputs in quantized_cases.weights(DEVICE, ((64, 384),)):
        if name == "int4 asymmetric":
            x = torch.zeros(1, inputs, dtype=torch.bfloat16)
            op.launch(op.arguments(x, weight, scale, zero_point))


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("result", [{}, {"swiglu": True}, {"row_invariant": False}], ids=str)
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_stream_their_weight_compile(dtype, rows, result, monkeypatch):
    found = {}

    def run(kernel, *args, **options):
        found[kernel.__name__] = compile_only(kernel, *args, **options)
        assert found[kernel.__name__].metadata.shared <= 227 * 1024

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(quantized_linear_config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(quantized_linear_config, "has_warpgroups", lambda _: True)
    op = OPS["quantized_linear"]
    for args in quantized_cases.cases(DEVICE, [dtype], [rows], shapes=((256, 1024),)):
        op.launch(op.arguments(*args, **result))
    kernel = "streamed_linear_kernel" if rows <= 16 else "streamed_warpgroup_kernel"
    assert {name for name in found if "linear" in name or "warpgroup" in name} == {kernel}
    # Triton gives the memory of barriers to tensors after their last use. PTX forbids that.
    allocations = re.findall(
        r"local_alloc : \(\) -> !ttg.memdesc<\w+xi64", found[kernel].asm["ttgir"]
    )
    assert len(allocations) == 1, "some barriers are used for a shorter time than others"


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("result", [{}, {"swiglu": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_stream_a_weight_of_16_bits_compile(dtype, rows, result, monkeypatch):
    found = {}

    def run(kernel, *args, **options):
        found[kernel.__name__] = compile_only(kernel, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(quantized_linear_config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(quantized_linear_config, "has_warpgroups", lambda _: True)
    op = OPS["linear"]
    for args in quantized_cases.plain_cases(DEVICE, [dtype], [rows], ((6144, 512),)):
        op.launch(op.arguments(*args, **result))
    kernel = found["streamed_plain_kernel"]
    assert kernel.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_of_a_prompt_compiles(dim, dtype, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        triton.JITFunction, "run",
        lambda kernel, *args, **options: compiled.append(compile_only(kernel, *args, **options)),
    )  # fmt: skip
    monkeypatch.setattr("graphkit.ops.kernels.launch.has_dependent_launch", lambda _: True)
    monkeypatch.setattr("graphkit.ops.kernels.paged_attention.has_warpgroups", lambda _: True)
    op, ints = OPS["paged_attention"], zeros(2, dtype=torch.int32)
    cache, tables = zeros(64, 2, dim, dtype=dtype), (ints.new_zeros(2, 64), ints, ints.new_zeros(3))
    for sinks in (None, zeros(8, dtype=dtype)):
        query = zeros(512, 8, dim, dtype=dtype)
        args = query, cache, cache.clone(), *tables, None, 1.0, 1, 256, 0, 0.0, sinks
        op.launch(op.arguments(*args), splits=1)
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 * 1024
        ptx, barriers = kernel.asm["ptx"], r"local_alloc : \(\) -> !ttg.memdesc<\w+xi64"
        assert "wgmma.mma_async" in ptx
        assert not ACCESS.search(ptx.partition("griddepcontrol.wait")[0])
        # See ``test_products_that_stream_their_weight_compile``.
        assert len(re.findall(barriers, kernel.asm["ttgir"])) == 1
    assert len(compiled) == 2


@compiles
def test_copies_of_a_weight_are_not_read_while_the_kernel_before_writes_them(monkeypatch):
    """The kernels that make a tensor contiguous or aligned run before the product."""
    early = []

    def run(kernel, *args, launch_pdl=False, **options):
        if kernel.__name__ == "streamed_linear_kernel":
            early.append(launch_pdl)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(quantized_linear_config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr("graphkit.ops.kernels.launch.has_dependent_launch", lambda _: True)
    x, scale = zeros(2, 256), zeros(64, 2, dtype=torch.float32)
    numbers = torch.zeros(64 * 256 + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = numbers[: 64 * 256].view(64, 256)
    cases = (weight, scale), (numbers[1 : 64 * 256 + 1].view(64, 256), scale)
    cases += (weight, scale.t().contiguous().t()), (weight.t().contiguous().t(), scale)
    for each in cases:
        op = OPS["quantized_linear"]
        op.launch(op.arguments(x, *each))
    assert early == [True, False, False, False]


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_programs_of_many_rows_over_four_bits_fit_a_multiprocessor(dtype, monkeypatch):
    shared = []

    def run(kernel, *args, **options):
        shared.append(compile_only(kernel, *args, **options).metadata.shared)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op = OPS["quantized_linear"]
    for args in quantized_cases.cases(DEVICE, [dtype], [64], shapes=((128, 512),)):
        if args[1].dtype == torch.uint8:
            op.launch(op.arguments(*args))
    assert shared
    assert 2 * (max(shared) + 1024) <= 228 * 1024  # CUDA C++ guide, table of sm_90


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_programs_of_a_plain_product_fit_a_multiprocessor(dtype, rows, monkeypatch):
    shared = {}

    def run(kernel, *args, **options):
        shared[kernel.__name__] = compile_only(kernel, *args, **options).metadata.shared

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op = OPS["linear"]
    for args in quantized_cases.plain_cases(DEVICE, [dtype], [rows], [(4096, 14336)]):
        op.launch(op.arguments(*args))
    assert set(shared) == {"linear_kernel", "sum_parts_kernel"}
    assert 2 * (shared["linear_kernel"] + 1024) <= 228 * 1024  # CUDA C++ guide, table of sm_90


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def early_cases():
    """Yield ops of a decoder layer with arguments in bfloat16."""
    rows, weight, ints = zeros(2, 512), zeros(512), zeros(2, dtype=torch.int32)
    yield rms_norm, (rows, weight, 1e-5)
    yield add_rms_norm, (rows, rows, weight, 1e-5)
    yield add_rms_norm, (rows, rows.float(), weight, 1e-5, True)
    yield add_rms_norm, (rows, zeros(2, 1024)[:, 512:], weight, 1e-5)
    yield embed_and_join, (ints, rows, rows, weight, weight, 1e-5)
    yield embed_and_join, (ints.long(), rows, rows)
    yield silu_and_mul, (rows,)
    rotation = rows, ints, zeros(32, dtype=torch.float32), 4, 2
    yield rotated_heads, rotation
    yield rotated_heads, (*rotation, None, None, 0.0, None, 32, False, 1.25)
    cache = zeros(64, 2, 64)
    yield store_kv, (cache, cache.clone(), ints.long(), cache[:2], cache[:2])
    yield store_rotated_heads, store_args(torch.bfloat16)
    latents = zeros(64, 1, 576), ints.long(), zeros(16, 2, 512), zeros(2, 16, 64), zeros(2, 576)
    rotation = ints, zeros(32, dtype=torch.float32), zeros(512), 1e-6, 1.0, True
    yield store_latent_heads, (*latents, *rotation)
    tables = ints.new_zeros(2, 2048), ints, ints.new_zeros(3)
    yield paged_attention, (zeros(2, 4, 64), cache, cache, *tables, None, 1.0, 4, 1)
    tree = zeros(2, 1, 1, dtype=torch.bool)
    yield paged_attention, (zeros(2, 4, 64), cache, cache, *tables, tree, 1.0, 4, 1)
    yield linear, (rows, zeros(512, 512))
    yield linear, (zeros(2, 4096), zeros(512, 4096), weight)
    channel = zeros(512, 512, dtype=torch.float8_e4m3fn), zeros(512, 1, dtype=torch.float32)
    yield quantized_linear, (rows, *channel)
    yield quantized_linear, (zeros(300, 512), *channel)
    yield multiply_heads, (zeros(2, 3, 64), zeros(2, 64, 128))
    yield from expert_cases()


def expert_cases():
    """Yield ops of experts, of few rows that each program searches, and of more."""
    slots = zeros(20, dtype=torch.int64)
    for rows in (2, 20):
        experts, x = zeros(rows, 4, dtype=torch.int64), zeros(rows, 512)
        ordered = zeros(rows * 4, dtype=torch.int32), zeros(8, dtype=torch.int32)
        yield group_by_expert, (experts, 8, slots[:rows])
        more = None, slots[:rows], *ordered, True
        yield expert_linear, (x, experts, zeros(8, 512, 512), None, None, *more)
        for _, weight, scale, zero, _ in quantized_cases.weights("cpu", ((512, 512),)):
            parts = [
                each if each is None else each.repeat(8, 1, 1) for each in (weight, scale, zero)
            ]
            yield expert_linear, (x, experts, *parts, *more)
        shared = slots[:rows], zeros(rows, 512), zeros(rows, 1)
        yield expert_sum, (zeros(rows * 4, 512), zeros(rows, 4), experts, 8, *shared)
        yield choose_experts, (zeros(rows, 512), 10, True, True)


def store_args(dtype):
    """Arguments of ``store_rotated_heads`` over caches of a dtype."""
    rows, weight, ints = zeros(2, 512), zeros(64), zeros(2, dtype=torch.int32)
    caches = (zeros(48, 2, 64, dtype=dtype) for _ in "kv")
    frequencies = zeros(32, dtype=torch.float32)
    scale = zeros(2, dtype=torch.float32) if dtype == torch.float8_e4m3fn else None
    rotation = rows, ints, frequencies, 4, 2, weight, weight, 1e-6, None
    return *caches, ints.long(), *rotation, scale, scale


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_store_of_rotated_heads_compiles(dtype, monkeypatch):
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    op = OPS["store_rotated_heads"]
    op.launch(op.arguments(*store_args(dtype)))


@compiles
@pytest.mark.parametrize("pages", [4, 2048], ids=["one split", "several splits"])
def test_attention_stores_16_bytes_at_a_time(pages, monkeypatch):
    stores = []

    def run(kernel, *args, **options):
        if kernel.__name__ == "paged_attention_kernel":
            ptx = compile_only(kernel, *args, **options).asm["ptx"]
            stores.extend(re.findall(r"st\.global\S*(?=\s+\[)", ptx))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op, ints, cache = OPS["paged_attention"], zeros(2, dtype=torch.int32), zeros(64, 2, 128)
    tables = ints.new_zeros(2, pages), ints, ints.new_zeros(3)
    op.launch(op.arguments(zeros(2, 8, 128), cache, cache, *tables, None, 1.0, 4, 1))
    weights = {"st.global.b32"} if pages > 4 else set()  # one per row and split
    assert set(stores) == {"st.global.v4.b32"} | weights


EARLY_STEP = {
    "begin_step", "first_draft_rows", "draft_step_rows", "chain_candidates", "verify_rows of trees",
    "extend_rows", "argmax_rows of bfloat16", "accept_tokens", "target_samples", "accepted_moves",
    "target_probs", "top_candidates of 4", "plant_tree", "grow_tree", "choose_nodes",
    "process_logits of trees", "pack_rows", "process_logits of packed rows",
}  # fmt: skip
"""Cases of ops of a step whose kernels start early."""


def early_step_cases():
    """Yield ops that a step runs around its layers, with arguments."""
    for name in sorted(EARLY_STEP):
        op, make, _ = CASES[name]
        yield op, make(3, 3)
    for name in ("argmax_rows of bfloat16 in parts", "top_candidates of 4 in parts"):
        op, make = IN_PARTS[name]
        yield op, make(3, 3)
    ints, longs = zeros(3, dtype=torch.int32), zeros(3, dtype=torch.int64)
    tokens, table = zeros(3, 5, dtype=torch.int64), zeros(3, 64, dtype=torch.int32)
    finished = longs, tokens.view(-1), ints, tokens, ints, longs, ints, 5
    yield finish_step, finished
    words, logits = zeros(3, 5, dtype=torch.int32), zeros(15, 5)
    yield finish_step, (*finished, ints, words, words, logits, zeros(15, 3, dtype=torch.float32))
    states = zeros(3, 64), zeros(3, 5, 64)
    yield store_tokens, (longs, longs, tokens, ints, 5, *states)
    yield paged_metadata, (longs, ints, table, 16, 4, 5, 5)
    yield build_tree, (longs, tokens, tokens[:, :4], tokens[:, :4], ints, 3, 2, 5)
    yield compact_accepted_to_front, (zeros(15, 64), table[:, :4], 5)
    yield gather_rows, (zeros(15, 4096), longs)
    yield gather_rows, (zeros(4096, 15).t(), ints)
    yield scatter_rows, ([zeros(9, 4096), tokens], [zeros(3, 4096), tokens], longs)
    cache = zeros(64, 2, 64)
    yield move_kv, ([cache], buffer_table([cache]), longs, longs)
    words, pairs = zeros(64, dtype=torch.int64), zeros(3, 2, dtype=torch.int32)
    ring = zeros(RING_WORDS + 128, dtype=torch.int64)
    yield refresh, ([], ring, longs[:1], tokens, words, pairs, pairs, 2, 3, 15)


@pytest.mark.slow
@compiles
def test_kernels_that_start_early_wait_before_they_read_or_write(monkeypatch):
    """Their rules are those of ``graphkit.ops.kernels.launch``."""
    checked = "graphkit.ops.kernels.launch.has_dependent_launch"
    monkeypatch.setattr(checked, lambda device: device == DEVICE)
    seen = set()

    def run(kernel, *args, **options):
        assert options["launch_pdl"]
        ptx = compile_only(kernel, *args, **options).asm["ptx"]
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert ACCESS.search(after)
        assert not ACCESS.findall(before), kernel.__name__
        starts_next = "griddepcontrol.launch_dependents"
        if kernel.__name__ == "paged_attention_kernel":  # after the first reads, before the keys
            reads, _, after = after.partition(starts_next)
            assert ACCESS.search(reads)
            assert "cp.async" not in reads
            assert "cp.async" in after
        elif "wait_then_start_next" in kernel.src or kernel.__name__ == "expert_linear_kernel":
            assert not ACCESS.search(after.partition(starts_next)[0])
        else:
            assert starts_next in before
        seen.add(kernel.__name__)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    for function, args in (*early_cases(), *early_step_cases()):
        op = OPS[function.__name__]
        op.launch(op.arguments(*args))
    assert seen == {
        "rms_norm_kernel", "silu_and_mul_kernel", "rotated_heads_kernel", "store_kv_kernel",
        "embed_and_join_kernel",
        "paged_attention_kernel", "join_segments_kernel", "join_paths_kernel", "linear_kernel",
        "sum_parts_kernel", "widen_kernel", "multiply_heads_kernel", "latent_heads_kernel",
        "begin_step_kernel", "finish_step_kernel", "store_tokens_kernel", "paged_metadata_kernel",
        "first_draft_rows_kernel", "draft_step_rows_kernel", "verify_rows_kernel",
        "pack_rows_kernel", "extend_rows_kernel", "argmax_rows_kernel", "top_candidates_kernel",
        "chain_candidates_kernel", "build_tree_kernel", "plant_tree_kernel", "grow_tree_kernel",
        "choose_nodes_kernel", "accept_tokens_kernel", "target_samples_kernel",
        "accepted_moves_kernel", "compact_accepted_to_front_kernel", "move_kv_kernel",
        "fetch_kernel", "copy_kernel", "scan_logits_kernel", "select_weights_kernel",
        "write_probs_kernel", "join_argmax_kernel", "join_candidates_kernel",
        "gather_rows_kernel", "scatter_rows_kernel", "process_logits_kernel",
        "expert_linear_kernel", "expert_sum_kernel", "group_kernel", "choose_experts_kernel",
    }  # fmt: skip


@pytest.mark.slow
@compiles
def test_experts_that_follow_a_product_request_their_weight_before_they_wait(monkeypatch):
    monkeypatch.setattr("graphkit.ops.kernels.launch.has_dependent_launch", lambda _: True)
    seen = 0

    def run(kernel, *args, **options):
        nonlocal seen
        ptx = compile_only(kernel, *args, **options).asm["ptx"]
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert "prefetch.global.L2" in before
        assert all(access.startswith("ld.") for access in ACCESS.findall(before))
        assert "griddepcontrol.launch_dependents" in after
        assert "griddepcontrol.launch_dependents" not in before
        assert {"cp.async", "st.global"} <= {*re.findall(r"cp\.async|st\.global", after)}
        seen += 1

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op = OPS["expert_linear"]
    for function, args in expert_cases():
        if function is expert_linear:
            op.launch(op.arguments(*args)._replace(follows_product=True))
    assert seen == 18


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("decays", [1, 16], ids=["one decay", "a decay of each key"])
def test_threads_that_share_a_sum_of_a_scan_add_the_same_products(decays, monkeypatch):
    """Else the value that a thread adds to a state is not the one that another thread keeps."""
    compiled = []

    def run(kernel, *args, **options):
        ptx = compile_only(kernel, *args, **options).asm["ptx"]
        from_others = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
        added = re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx)
        assert not from_others & set(added)
        compiled.append(kernel.__name__)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op, longs, heads = OPS["linear_scan"], torch.zeros(2, dtype=torch.int64), zeros(8, 2, 16)
    numbers = {"dtype": torch.float32}
    kept = update_size(2, 2, 16, 16, decays)
    pool = zeros(6, 2, 16, 16, **numbers), zeros(3, 2, 4, kept, **numbers)
    pool += longs.new_zeros(3, 2, 4), longs.new_zeros(3, 6)
    decay = zeros(8, 2, **numbers) if decays == 1 else zeros(8, 2, 16, **numbers)
    tree = longs.new_zeros(2, 4), longs.new_zeros(2, 4)
    for begins, (parents, order) in itertools.product(
        (None, longs.new_zeros(3)), ((None, None), tree)
    ):
        if begins is None or parents is None:
            rows = longs, begins, parents, order
            given = *[heads] * 3, decay, zeros(8, 2), 4
            op.launch(op.arguments(*pool, None, *rows, *given, normalise=True))
    assert set(compiled) >= {"linear_scan_kernel"}


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [4, 8, 64])
@pytest.mark.parametrize("head_dims", [(128, 128), (576, 512)], ids=["heads", "latents"])
def test_attention_after_a_store_requests_older_keys_before_it_waits(
    head_dims, rows, dtype, monkeypatch
):
    monkeypatch.setattr("graphkit.ops.kernels.launch.has_dependent_launch", lambda _: True)
    sizes = 132, 228 * 1024
    monkeypatch.setattr("graphkit.ops.kernels.paged_attention.multiprocessors", lambda _: sizes)
    compiled = {}

    def run(kernel, *args, **options):
        compiled[kernel.__name__] = compile_only(kernel, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    op, ints, key_dim = OPS["paged_attention"], zeros(2, dtype=torch.int32), head_dims[0]
    keys = zeros(64, 1, key_dim, dtype=dtype)
    values = keys[..., : head_dims[1]] if key_dim > head_dims[1] else keys.clone()
    tables = ints.new_zeros(2, 2048), ints, ints.new_zeros(3)
    query = zeros(2 * rows, 4, key_dim)
    shape = None, 1.0, 4, rows
    flags = {"follows_store": True, "row_invariant": False}
    op.launch(op.arguments(query, keys, values, *tables, *shape, **flags))
    ptx = compiled["paged_attention_kernel"].asm["ptx"]
    wait, starts_next = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert ACCESS.search(ptx[: ptx.index(wait)])  # the page table
    assert "st.global" not in ptx[: ptx.index(starts_next)]  # which follows a wait
    copy, paced = "cp.async.cg", "cp.async.wait_all"
    events = re.findall("|".join(map(re.escape, (wait, starts_next, copy, paced))), ptx)
    events = [event for event, _ in itertools.groupby(events)]
    keys_per_row = EARLY_KEYS if dtype == torch.bfloat16 else EARLY_FP8_KEYS
    if head_dims == (128, 128) and 4 * rows * keys_per_row <= LARGE_KEYS:
        # The first wait is for rows of this call among the keys of the first block.
        assert events[:7] == [wait, copy, paced, copy, wait, starts_next, copy]
    else:
        assert events[:3] == [wait, starts_next, copy]
        assert paced not in events


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("leaves_tokens", [False, True])
@pytest.mark.parametrize("divides_rows", [False, True])
def test_the_choice_of_drafts_reads_the_clock_if_it_is_timed(
    monkeypatch, is_timed, leaves_tokens, divides_rows
):
    seen = {}

    def run(kernel, *args, **options):
        seen[kernel.__name__] = compile_only(kernel, *args, **options).asm["ptx"]

    monkeypatch.setattr(triton.JITFunction, "run", run)
    ints, longs = zeros(3, dtype=torch.int32), zeros(3, dtype=torch.int64)
    report, ledger = zeros(3, 10, dtype=torch.int32), zeros(4, dtype=torch.float64)
    columns = 4 if leaves_tokens else 3
    cases = {
        choose_body: (
            longs, ints, ints, zeros(3, 3, dtype=torch.int32),
            zeros(3, columns, dtype=torch.float32), zeros(1, 3, 2, dtype=torch.float32), longs[:1],
            ledger, ints if divides_rows else None,
            zeros(9, 3, 2, dtype=torch.float32) if divides_rows else None,
            ints if leaves_tokens else None, 4, report, 1, is_timed,
        ),
        advance_loop: (
            report, longs, longs.bool(), zeros(5, dtype=torch.int64), ints,
            zeros(RING_WORDS + 2 * (16 + 30), dtype=torch.int64), 2, None, 1, ledger,
        ),
    }  # fmt: skip
    for function, args in cases.items():
        op = OPS[function.__name__]
        op.launch(op.arguments(*args))
    assert ("globaltimer" in seen["choose_body_kernel"]) == is_timed
    assert seen["advance_loop_kernel"]
