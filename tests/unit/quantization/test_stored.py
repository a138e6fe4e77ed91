"""``quantization_config`` of a folder that is damaged."""

from __future__ import annotations

import pytest

from graphkit.errors import CheckpointError
from graphkit.quantization import stored_layout

COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    "groups", [3, {"group_0": 3}, {"group_0": {"weights": 3}}], ids=["groups", "group", "weights"]
)
def test_what_is_no_object_is_named(groups):
    config = {"quantization_config": {**COMPRESSED, "config_groups": groups}}
    with pytest.raises(CheckpointError, match=r"config_groups of .* expected objects by name"):
        stored_layout(config)
