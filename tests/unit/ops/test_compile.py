"""The kernels of a whole step compile for sm_90 without a GPU.

The interpreter runs Python, so it accepts what the compiler refuses: a name with two types, say.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphkit.ops.kernels import quantized_linear_config
from graphkit.ops.kernels.push_collectives import (
    SPAN,
    PushMemory,
    launch_push_add_rms_norm,
    launch_push_all_gather,
    launch_push_all_reduce,
)
from graphkit.ops.kernels.step_state import begin_step_kernel
from graphkit.ops.registration import OPS
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree_sampling import tree_speculative_sampling_target_only
from graphkit.ops.verification import verify_tree_greedy

CASES = runpy.run_path(str(Path(__file__).with_name("step_cases.py")))["CASES"]
QUANTISED = runpy.run_path(str(Path(__file__).with_name("quantized_cases.py")))
LETTERS = {
    torch.bool: "i1", torch.int32: "i32", torch.int64: "i64", torch.bfloat16: "bf16",
    torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8", torch.float16: "fp16",
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


MAKERS = {name: (op, make) for name, (op, make, _) in CASES.items()} | {
    "target_probs of a large vocabulary": (target_probs, large_probs_args),
    "verify_tree_greedy": (verify_tree_greedy, walk_args),
    "tree_sampling": (tree_speculative_sampling_target_only, sampling_args),
}


def compile_only(kernel, *args, grid, warmup, num_warps=4, num_stages=3):
    """Compile a launch with the types of its arguments; None and 1 become constants."""
    types, constants, attributes = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        is_special = parameter.name not in (kernel.do_not_specialize or ())
        is_one = isinstance(value, int) and value == 1 and is_special
        if parameter.is_constexpr or value is None or is_one:
            constants[parameter.name] = value
            types[parameter.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = f"*{LETTERS[value.dtype]}"
            attributes[index,] = [["tt.divisibility", 16]]  # as memory of torch's allocator
        else:
            types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


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


@compiles
@pytest.mark.parametrize("rows", [1, 40, 200, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_quantised_weights_compile(dtype, rows, monkeypatch):
    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(quantized_linear_config, "LEAST_BLOCKS", 1)
    for args in QUANTISED["cases"](torch.device("cpu"), [dtype], [rows], shapes=((130, 384),)):
        op = OPS["quantized_linear"]
        op.launch(op.arguments(*args))
