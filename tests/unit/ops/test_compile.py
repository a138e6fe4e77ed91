"""The kernels of a whole step compile for sm_90 without a GPU.

The interpreter runs Python, so it accepts what the compiler refuses: a name with two types, say.
"""

from __future__ import annotations

import re
import runpy
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from graphkit.ops.kernels import quantized_linear as quantized_kernels
from graphkit.ops.kernels import quantized_linear_config
from graphkit.ops.kernels.push_collectives import (
    SPAN,
    PushMemory,
    launch_push_add_rms_norm,
    launch_push_all_gather,
    launch_push_all_reduce,
)
from graphkit.ops.kernels.step_state import begin_step_kernel
from graphkit.ops.logits import argmax_rows
from graphkit.ops.registration import OPS
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

DEVICE = torch.device("cpu")
CASES = runpy.run_path(str(Path(__file__).with_name("step_cases.py")))["CASES"]
QUANTISED = runpy.run_path(str(Path(__file__).with_name("quantized_cases.py")))
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


def compile_only(
    kernel, *args, grid, warmup, num_warps=4, num_stages=3, launch_pdl=False, capability=90
):
    """Compile a launch with the types of its arguments; None and 1 become constants."""
    types, constants, attributes = {}, {}, {}

    def type_of(place, value, is_constant, is_special):
        if isinstance(value, tuple) and not is_constant:
            parts = enumerate(value)
            return tuple(type_of((*place, i), each, False, is_special) for i, each in parts)
        is_one = isinstance(value, int) and value == 1 and is_special
        if is_constant or value is None or is_one:
            constants[place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attributes[place] = [["tt.divisibility", 16]]  # as memory of torch's allocator
            return f"*{LETTERS[value.dtype]}"
        return "i32" if isinstance(value, int) else "fp32"

    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        is_special = parameter.name not in (kernel.do_not_specialize or ())
        types[parameter.name] = type_of((index,), value, parameter.is_constexpr, is_special)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make_source(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


compiles = pytest.mark.skipif(
    not isinstance(begin_step_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set"
)


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
    for args in QUANTISED["cases"](DEVICE, [dtype], [rows], shapes=((130, 384), (128, 512))):
        op = OPS["quantized_linear"]
        op.launch(op.arguments(*args))


@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_numbers_of_four_bits_compile_for_each_capability(capability, monkeypatch):
    """PTX subtracts bfloat16 from sm_90 on."""
    checked, has_subtraction = [], capability >= 90

    def has_bfloat16_subtraction(device):
        checked.append(device)
        return has_subtraction

    monkeypatch.setattr(quantized_kernels, "has_bfloat16_subtraction", has_bfloat16_subtraction)
    run = partialmethod(compile_only, capability=capability)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    op = OPS["quantized_linear"]
    for name, weight, scale, zero_point, inputs in QUANTISED["weights"](DEVICE, ((64, 384),)):
        if name == "int4 asymmetric":
            x = torch.zeros(1, inputs, dtype=torch.bfloat16)
            op.launch(op.arguments(x, weight, scale, zero_point))
    assert checked


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("result", [{}, {"gated": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_stream_their_weight_compile(dtype, rows, result, monkeypatch):
    compiled = []

    def run(kernel, *args, **options):
        compiled.append(kernel.__name__)
        assert compile_only(kernel, *args, **options).metadata.shared <= 227 * 1024

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(quantized_linear_config, "has_dependent_launch", lambda _: True)
    op = OPS["quantized_linear"]
    for args in QUANTISED["cases"](DEVICE, [dtype], [rows], shapes=((256, 1024),)):
        op.launch(op.arguments(*args, **result))
    assert "streamed_linear_kernel" in compiled
