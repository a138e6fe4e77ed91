"""``quantization_config`` of a folder that is damaged."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import CheckpointError, ConfigError
from graphkit.quantization import stored_layout

COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    "groups", [3, {"group_0": 3}, {"group_0": {"weights": 3}}], ids=["groups", "group", "weights"]
)
def test_what_is_no_object_is_named(groups):
    config = {"quantization_config": {**COMPRESSED, "config_groups": groups}}
    with pytest.raises(CheckpointError, match=r"config_groups of .* expected objects by name"):
        stored_layout(config)


@pytest.mark.parametrize("config", [3, None, []])
def test_a_config_is_a_mapping(config):
    with pytest.raises(ConfigError, match=r"stored_layout\.config must be a mapping") as caught:
        stored_layout(config)
    assert caught.value.field == "config"


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
    ],
)
def test_tensors_of_other_shapes_are_refused(method, shapes):
    """A folder may be damaged or made by another version of its tool."""
    layout = stored_layout({"quantization_config": LAYOUTS[method]})
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError, match=f"^the tensors of layer do not fit .* {method}: "):
        layout.weight("layer", tensors)
