"""The launcher of ``quantized_linear`` against its reference; see ``test_interpreted.py``.

The interpreter multiplies no bfloat16.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch

from graphkit.ops.kernels import quantized_linear as kernels
from graphkit.ops.kernels import quantized_linear_config as config
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.ops.registration import OPS

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("quantized_cases.py")))
CPU = torch.device("cpu")


def check(dtypes, rows, **options):
    op = OPS["quantized_linear"]
    for args in CASES["cases"](CPU, dtypes, rows, **options):
        got = op.launch(op.arguments(*args))
        CASES["assert_close"](got, quantized_linear(*args), args[0].shape[1])


def test_the_kernel_matches_the_reference():
    check((torch.float32, torch.float16), (0, 1, 3))


def test_tiles_of_rows_match_the_reference():
    check((torch.float32,), (64, 65, 130), shapes=((40, 72), (130, 200)))


def test_split_inputs_match_the_reference(monkeypatch):
    monkeypatch.setattr(config, "LEAST_BLOCKS", 2)  # several blocks in each part
    launched = []
    launch = kernels.launch

    def note(kernel, *args, **options):
        launched.append(kernel.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(kernels, "launch", note)
    check((torch.float32, torch.float16), (1, 33), shapes=((40, 648), (264, 600)))
    assert "sum_parts_kernel" in launched


def test_many_rows_run_over_the_dequantised_weight(monkeypatch):
    monkeypatch.setattr(config, "MOST_ROWS", 2)
    check((torch.float32, torch.float16), (3,))


@pytest.mark.parametrize("inputs", [128, 640, 4096, 14336])
@pytest.mark.parametrize("tiles", [1, 32, 192, 896])
def test_parts_of_the_inputs_are_not_empty(inputs, tiles):
    parts = config.choose_splits(inputs, tiles, 264)
    blocks = inputs // 128
    assert (parts - 1) * -(-blocks // parts) < blocks <= parts * -(-blocks // parts)
