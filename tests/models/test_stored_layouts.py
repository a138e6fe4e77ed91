"""``quantization_config`` of a folder that is damaged."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import CheckpointError
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.quantization.stored import stored_layout, unpack_fp8_experts

COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    "groups", [3, {"group_0": 3}, {"group_0": {"weights": 3}}], ids=["groups", "group", "weights"]
)
def test_what_is_no_object_is_named(groups):
    config = {"quantization_config": {**COMPRESSED, "config_groups": groups}}
    with pytest.raises(CheckpointError, match=r"config_groups of .* expected objects by name"):
        stored_layout(config)


LAYOUTS = {
    "awq": {"quant_method": "awq"},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "compressed-tensors": COMPRESSED
    | {"config_groups": {"all": {"weights": {"num_bits": 4, "strategy": "channel"}}}},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
}


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("awq", {"qweight": (8,), "qzeros": (8, 8), "scales": (8, 8)}),
        ("awq", {"qweight": (8, 8), "qzeros": (8, 8), "scales": (8,)}),
        ("awq", {"qweight": (), "qzeros": (8, 8), "scales": (8, 8)}),
        ("gptq", {"qweight": (8,), "qzeros": (8, 8), "scales": (8, 8)}),
        ("gptq", {"qweight": (8, 8), "qzeros": (8, 8), "scales": (0, 8), "g_idx": (64,)}),
        (
            "compressed-tensors",
            {"weight_packed": (8, 8), "weight_scale": (8, 1), "weight_shape": ()},
        ),
        (
            "compressed-tensors",
            {"weight_packed": (8, 8), "weight_scale": (8,), "weight_shape": (2,)},
        ),
        ("fbgemm_fp8", {"weight": (8,), "weight_scale": (8, 1)}),
        ("fbgemm_fp8", {"weight": (8, 8), "weight_scale": (8, 1, 1)}),
        ("fbgemm_fp8", {"weight": (384, 256), "weight_scale": (3,)}),
        ("fbgemm_fp8", {"weight": (384, 256), "weight_scale": (1, 2)}),
        ("fbgemm_fp8", {"weight": (384, 256), "weight_scale": (384, 2)}),
        ("fbgemm_fp8", {"weight": (256, 8), "weight_scale": (2, 2, 1, 1)}),
        ("fbgemm_fp8", {"weight": (8, 8), "weight_scale": (8, 1), "weight_scale_inv": (8, 1)}),
    ],
)
def test_tensors_of_other_shapes_are_refused(method, shapes):
    """A folder may be damaged or made by another version of its tool."""
    layout = stored_layout({"quantization_config": LAYOUTS[method]})
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError, match=f"^the tensors of layer do not fit .* {method}: "):
        layout.weight("layer", tensors)


def words(*shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


FP8_NUMBERS = torch.randn(136, 192).to(torch.float8_e4m3fn)
STORED = {
    "awq": (LAYOUTS["awq"], {
        "qweight": words(192, 17), "qzeros": words(2, 17), "scales": torch.rand(2, 136).half(),
    }),
    "gptq": (LAYOUTS["gptq"], {
        "qweight": words(24, 136), "qzeros": words(2, 17), "scales": torch.rand(2, 136).half(),
        "g_idx": torch.arange(192) // 128,
    }),
    "compressed": (LAYOUTS["compressed-tensors"], {
        "weight_packed": words(136, 24), "weight_scale": torch.rand(136, 2),
        "weight_zero_point": words(17, 2), "weight_shape": torch.tensor([136, 192]),
    }),
    "tensor": (LAYOUTS["fbgemm_fp8"], {"weight": FP8_NUMBERS, "weight_scale": torch.rand(())}),
    "channel": (LAYOUTS["fbgemm_fp8"], {"weight": FP8_NUMBERS, "weight_scale": torch.rand(136)}),
    "blocks": ({"quant_method": "fp8"}, {
        "weight": FP8_NUMBERS, "weight_scale_inv": torch.rand(2, 2),
    }),
    "exponents": ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, {
        "weight": FP8_NUMBERS, "weight_scale_inv": torch.randint(120, 130, (2, 2)).byte(),
    }),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, {
        "weight": FP8_NUMBERS, "weight_scale": torch.rand(2, 1, 2, 1),
    }),
}  # fmt: skip
"""Layers of 136 outputs and 192 inputs: the last group and the last block have fewer."""


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_words_of_another_size_are_refused(name, dtype):
    settings, tensors = STORED[name]
    layout = stored_layout({"quantization_config": settings})
    wrong = {layout.numbers: tensors[layout.numbers].to(dtype)}
    with pytest.raises(CheckpointError, match=f"its words are {dtype}, expected torch.int32"):
        layout.weight("layer", tensors | wrong)


@pytest.mark.parametrize("name", STORED)
def test_weights_are_those_of_the_formula(name):
    settings, tensors = STORED[name]
    layout = stored_layout({"quantization_config": settings})
    weight = layout.weight("layer", tensors).dequantized(torch.float32)
    expected = stored_rows(layout.method, tensors, torch.arange(136))
    torch.testing.assert_close(weight, expected)


def test_experts_are_those_of_the_formula():
    layout = stored_layout({"quantization_config": {"quant_method": "fp8"}})
    numbers = torch.stack([FP8_NUMBERS.view(torch.uint8)] * 3).view(torch.float8_e4m3fn)
    for shape in [(3,), (3, 1, 1), (3, 136), (3, 136, 1), (3, 1, 192), (3, 2, 2)]:
        tensors = {"weight": numbers, "weight_scale": torch.rand(shape)}
        weight = layout.unpacked("experts", tensors, unpack_fp8_experts)
        for expert in range(3):
            one = {suffix: tensor[expert] for suffix, tensor in tensors.items()}
            expected = stored_rows("fp8", one, torch.arange(136))
            torch.testing.assert_close(weight[expert], expected)


@pytest.mark.parametrize("scale", [(2,), (3, 4), (3, 136, 5), (3, 3, 2), (3, 136, 2), (3, 2, 1)])
def test_experts_with_other_scales_are_refused(scale):
    layout = stored_layout({"quantization_config": {"quant_method": "fp8"}})
    tensors = {"weight": torch.zeros(3, 136, 192), "weight_scale": torch.rand(scale)}
    with pytest.raises(CheckpointError, match=r"experts do not fit the layout of fp8"):
        layout.unpacked("experts", tensors, unpack_fp8_experts)


@pytest.mark.parametrize("key", ["sparsity_config", "transform_config", "kv_cache_scheme"])
@pytest.mark.parametrize("value", ["text", 3, [1]])
def test_settings_of_another_type_are_refused_or_not_used(key, value):
    settings = LAYOUTS["compressed-tensors"] | {key: value}
    if key == "kv_cache_scheme":
        assert stored_layout({"quantization_config": settings}) is not None
    else:
        with pytest.raises(CheckpointError, match=key):
            stored_layout({"quantization_config": settings})
