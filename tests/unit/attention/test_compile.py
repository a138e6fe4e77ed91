"""The CUDA kernels compile for sm_90 without a GPU.

The interpreter runs Python, so it accepts what the compiler refuses: a name with two types, say.
"""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphkit.ops.kernels.kv_cache import move_kv_kernel, store_kv_kernel
from graphkit.ops.kernels.paged_metadata import paged_metadata_kernel
from graphkit.ops.paged_attention import paged_attention
from graphkit.ops.registration import OPS

pytestmark = pytest.mark.skipif(
    not isinstance(store_kv_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set"
)
SHARED_BYTES = 227 * 1024
"""What one program may use on sm_90."""


def _compile(kernel, pointers, constants, stages=3):
    """Compile with every argument that is neither given nor a constant as an int32."""
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("one", [False, True], ids=["many", "ones"])
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_metadata(one, ragged):
    """Triton turns an argument of 1 into a constant, which takes other paths."""
    pointers = {"req_pool_indices_B": "*i64"} | dict.fromkeys(
        (
            "seq_lens_B",
            "req_to_token",
            "extend_lens_B",
            "cache_seqlens",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "page_table",
        ),
        "*i32",
    )
    ones = dict.fromkeys(("requests", "rows", "max_pages", "row_blocks", "appended"), 1)
    blocks = {"PAGE_SIZE": 4, "RAGGED": ragged, "BLOCK_B": 16, "BLOCK_P": 256}
    blocks |= {} if ragged else {"extend_lens_B": None}
    _compile(paged_metadata_kernel, pointers, blocks | (ones if one else {}))


@pytest.mark.parametrize("scatter", [False, True], ids=["gather", "scatter"])
@pytest.mark.parametrize(("word", "letter"), [(8, "i64"), (4, "i32"), (2, "i16"), (1, "i8")])
def test_move(scatter, word, letter):
    pointers = dict.fromkeys(("table", "tgt_loc", "src_loc"), "*i64") | {"scratch": f"*{letter}"}
    _compile(move_kv_kernel, pointers, {"WORD": word, "BLOCK": 256, "SCATTER": scatter})


@pytest.mark.parametrize("fp8", [False, True])
def test_store(fp8):
    pointers = dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv" if fp8 else "*bf16")
    pointers |= {"loc_T": "*i64", "key": "*fp32", "value": "*fp32"}
    sizes = {"KEY_ROW": 80, "VALUE_ROW": 128, "KEY_SLOT": 208, "VALUE_SLOT": 208, "BLOCK": 128}
    sizes |= {"HEADS": 8, "IS_FP8": fp8}
    scales = ("key_scale_M", "value_scale_M")
    if fp8:
        pointers |= dict.fromkeys(scales, "*fp32")
    else:
        sizes |= dict.fromkeys(scales)
    _compile(store_kv_kernel, pointers, sizes)


LETTERS = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32",
    torch.uint8: "u8", torch.int16: "i16", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that launchers launch, which are compiled instead."""
    compiled = []

    def run(kernel, *args, grid, warmup, launch_pdl=False, **options):
        compiled.append(kernel.__name__ + " (early)" * launch_pdl)
        types, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=False)):
            types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, torch.Tensor):
                types[parameter.name] = f"*{LETTERS[value.dtype]}"
                attributes[index,] = [["tt.divisibility", 16]]
            elif parameter.name.endswith("stride"):
                attributes[index,] = [["tt.divisibility", 16]]
            if parameter.is_constexpr or value is None:
                types[parameter.name], constants[parameter.name] = "constexpr", value
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
        options |= {"launch_pdl": launch_pdl}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= SHARED_BYTES

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "value_dim", "splits", "options"),
    [
        (torch.bfloat16, 32, 8, 128, 1, {}),
        (torch.bfloat16, 32, 8, 128, 1, {"columns": 8, "sinks": True}),
        (torch.bfloat16, 32, 8, 128, 4, {"columns": 4, "window": 4096, "sinks": True}),
        (torch.float16, 2, 2, 80, 1, {"softcap": 50.0, "window": 128}),
        (torch.float32, 16, 4, 256, 4, {"columns": 20}),
        (torch.bfloat16, 128, 1, 512, 4, {"columns": 4}),
        (torch.float16, 16, 1, 512, 1, {"window": 64}),
        (torch.bfloat16, 32, 8, 128, 4, {"columns": 4, "window": 8192, "chunked": True}),
        (torch.bfloat16, 16, 2, 512, 4, {"columns": 4, "apart": True}),
        (torch.bfloat16, 32, 2, 512, 1, {"apart": True}),
        (torch.float32, 16, 2, 512, 4, {"apart": True}),
        (torch.bfloat16, 8, 2, 512, 4, {"apart": True, "fp8": True}),
        (torch.bfloat16, 32, 2, 512, 1, {"apart": True, "fp8": True}),
        (torch.float32, 4, 1, 512, 4, {}),
        (torch.bfloat16, 32, 8, 128, 4, {"columns": 4, "fp8": True}),
        (torch.float16, 32, 8, 64, 1, {"window": 64, "fp8": True}),
        (torch.float32, 32, 8, 128, 4, {"fp8": True}),
    ],
    ids=str,
)
def test_attention(compiled, dtype, heads, kv_heads, value_dim, splits, options):
    """The blocks that the launcher chooses fit the memory of sm_90. Latents have 64 more."""
    is_latent = value_dim == 512 and "apart" not in options
    key_dim, width, columns = value_dim + 64 * is_latent, 4, options.get("columns", 0)
    keys = torch.zeros(64, kv_heads, key_dim, dtype=dtype)
    scales = (None, None)
    if "fp8" in options:
        keys, scales = keys.to(torch.float8_e4m3fn), (torch.ones(kv_heads),) * 2
    values = keys[..., :value_dim] if key_dim > value_dim else torch.zeros_like(keys)
    ints = {"dtype": torch.int32}
    given = OPS[paged_attention.__name__].arguments(
        torch.zeros(2 * width, heads, key_dim, dtype=dtype), keys, values,
        torch.zeros(2, 16, **ints), torch.zeros(2, **ints), torch.zeros(3, **ints),
        torch.zeros(2, width, columns, dtype=torch.bool) if columns else None, 1.0, 4, width,
        options.get("window", 0), options.get("softcap", 0.0),
        torch.zeros(heads) if "sinks" in options else None, *scales,
        options.get("chunked", False),
    )  # fmt: skip
    OPS["paged_attention"].launch(given, splits)
    joins = ["join_paths_kernel"] if columns else ["join_segments_kernel"] * (splits > 1)
    assert compiled == ["paged_attention_kernel", *joins]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_float8_with_its_instructions(
    compiled, monkeypatch, dtype, width, page_size
):
    """Blocks of 64 rows take other instructions of the tensor cores than smaller ones."""
    checked = "graphkit.ops.kernels.paged_attention.has_float8_cvt"
    monkeypatch.setattr(checked, lambda device: device.type == "cpu")
    keys = torch.zeros(64, 8, 128).to(torch.float8_e4m3fn)
    ints = {"dtype": torch.int32}
    given = OPS[paged_attention.__name__].arguments(
        torch.zeros(2 * width, 32, 128, dtype=dtype), keys, keys.clone(),
        torch.zeros(2, 16, **ints), torch.zeros(2, **ints), torch.zeros(3, **ints),
        None, 1.0, page_size, width,
    )  # fmt: skip
    OPS["paged_attention"].launch(given, 4)
    assert compiled == ["paged_attention_kernel", "join_segments_kernel"]


def test_kernels_that_start_early(compiled, monkeypatch):
    checked = "graphkit.ops.kernels.launch.has_dependent_launch"
    monkeypatch.setattr(checked, lambda device: device.type == "cpu")
    keys, lengths = torch.zeros(64, 8, 128, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    given = OPS[paged_attention.__name__].arguments(
        torch.zeros(2, 32, 128, dtype=torch.bfloat16), keys, keys, lengths.new_zeros(2, 16),
        lengths, lengths.new_zeros(3), None, 1.0, 4, 1,
    )  # fmt: skip
    OPS["paged_attention"].launch(given, 4)
    assert compiled == ["paged_attention_kernel (early)", "join_segments_kernel (early)"]
