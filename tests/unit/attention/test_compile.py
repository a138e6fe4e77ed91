"""The CUDA kernels compile for sm_90 without a GPU.

The interpreter runs Python, so it accepts what the compiler refuses: a name with two types, say.
"""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphkit.ops.kernels.join_splits import join_splits_kernel
from graphkit.ops.kernels.move_kv import move_kv_kernel
from graphkit.ops.kernels.paged_attention import paged_attention_kernel
from graphkit.ops.kernels.paged_metadata import paged_metadata_kernel
from graphkit.ops.kernels.store_kv import store_kv_kernel

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


def test_store():
    pointers = dict.fromkeys(("key_cache", "value_cache"), "*bf16")
    pointers |= {"loc_T": "*i64", "key": "*fp32", "value": "*fp32"}
    sizes = {"KEY_ROW": 80, "VALUE_ROW": 128, "KEY_SLOT": 208, "VALUE_SLOT": 208, "BLOCK": 128}
    _compile(store_kv_kernel, pointers, sizes)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_m", "block_n", "columns", "is_split"),
    [
        ("bf16", 128, 64, 64, 4, True),
        ("fp16", 80, 16, 64, 0, False),
        ("fp32", 256, 16, 16, 20, True),
    ],
)
def test_attention(dtype, head_dim, block_m, block_n, columns, is_split):
    out = "*fp32" if is_split else f"*{dtype}"
    pointers = dict.fromkeys(("query", "key_cache", "value_cache"), f"*{dtype}")
    pointers |= {"out": out, "lse": out, "mask": "*u8", "scale_log2": "fp32"}
    pointers |= dict.fromkeys(("page_table", "cache_seqlens_B", "cu_seqlens_q_B1"), "*i32")
    constants = {
        "PAGE_SIZE": 4, "GROUP": 4, "HEAD_DIM": head_dim, "MASK_ROWS": 4, "MASK_COLUMNS": columns,
        "IS_SPLIT": is_split, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "HEADS_FIRST": True,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": triton.next_power_of_2(head_dim),
    }  # fmt: skip
    absent = {} if columns else {"mask": None, "row_tiles": 1}
    _compile(paged_attention_kernel, pointers, constants | absent)
    if is_split:
        pointers = {"out": f"*{dtype}", "partial": "*fp32", "lse": "*fp32"}
        _compile(
            join_splits_kernel, pointers, {"HEAD_DIM": head_dim, "BLOCK_S": 64, "BLOCK_D": 128}
        )
