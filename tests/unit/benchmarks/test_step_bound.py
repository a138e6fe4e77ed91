"""The bytes of weights that a step reads, and the bandwidth that bounds its time."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from graphkit.cli.benchmarks import WeightBytes, copy_bandwidth, step_bound
from graphkit.engine.step import SpecStepInputs
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.reference import ALGORITHMS
from graphkit.models.shapes import SHAPES
from graphkit.models.sharded import (
    EngineModels,
    LlamaModel,
    engine_of,
    load_models,
    shapes,
    spec_of,
)


@contextmanager
def linear_bytes(*modules):
    """List the bytes of the weights of every linear layer that runs in a block."""
    layers = (each for module in modules for each in module.modules())
    counted = []
    hooks = [
        each.register_forward_hook(lambda layer, *_: counted.append(layer.weight.nbytes))
        for each in layers
        if isinstance(each, nn.Linear)
    ]
    yield counted
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("algorithm", "topk"),
    [(name, topk) for name in ALGORITHMS for topk in (1, 2) if (name, topk) != ("DFLASH", 2)],
)
def test_a_step_reads_the_weights_of_its_linear_layers(algorithm, topk):
    models, spec = load_models(algorithm, device="cpu"), spec_of(algorithm, 2, topk)
    read = WeightBytes.of(models, spec.num_steps)
    drafts = [] if models.draft is None else [models.draft]
    with engine_of(models, spec, max_batch_size=1, max_context_len=64, generation="v3") as engine:
        request = engine.submit([1, 2, 3])
        engine.step()
        rows = SpecStepInputs(req_pool_indices=np.array([request.row]))
        with linear_bytes(models.target, *drafts) as counted, torch.no_grad():
            engine.runners[0].run(rows)
    # Norms are a thousandth of the weights. An embedding would be two hundredths.
    assert sum(counted) < read.total < 1.005 * sum(counted)
    assert (read.drafts > 0) == bool(drafts)


def test_a_step_of_the_8b_shape_reads_19_7_gigabytes():
    with torch.device("meta"):
        target = LlamaModel(SHAPES["llama-8b"]).bfloat16()
        head = EagleHead(replace(target.config, num_hidden_layers=1), target).bfloat16()
    read = WeightBytes.of(EngineModels("EAGLE", target, head), 3)
    assert read.verify == 15_009_849_344
    assert round(read.total / 1e9, 1) == 19.7


@pytest.mark.parametrize("num_steps", [3, 5])
def test_an_eagle_3_step_of_the_8b_shape_reads_the_layer_and_the_small_head(num_steps):
    """Each draft step reads 0.75 GB, where that of EAGLE reads 1.56; the features merge once."""
    with torch.device("meta"):
        target = LlamaModel(SHAPES["llama-8b"]).bfloat16()
        head = shapes._draft_model("EAGLE3", target, target.config).bfloat16()
    read = WeightBytes.of(EngineModels("EAGLE3", target, head), num_steps)
    hidden, intermediate, keys_and_values = 4096, 14336, 2048
    layer = hidden * (2 * hidden + 2 * keys_and_values + hidden + 3 * intermediate)
    norms, output_head, merge = 4 * hidden, 32_000 * hidden, 3 * hidden * hidden
    assert read.verify == 15_009_849_344
    assert read.drafts == 2 * (num_steps * (layer + norms + output_head) + merge)


@pytest.mark.parametrize(("kind", "algorithm"), [(EagleHead, "EAGLE"), (Eagle3Head, "EAGLE3")])
def test_a_draft_reads_one_output_head_its_own_or_that_of_the_target(kind, algorithm):
    with torch.device("meta"):
        target = LlamaModel(SHAPES["llama-8b"])
        config = replace(target.config, num_hidden_layers=1)
        heads = [kind(config, target, has_head=has_head) for has_head in (False, True)]
    shared, own = (WeightBytes.of(EngineModels(algorithm, target, head), 3) for head in heads)
    assert shared.drafts == own.drafts


def test_the_bandwidth_counts_what_a_copy_reads_and_writes(monkeypatch):
    @contextmanager
    def two_ms(_device):
        ms = []
        yield ms
        ms.append(2.0)

    monkeypatch.setattr(step_bound, "_COPIED_BYTES", 1000)
    monkeypatch.setattr(step_bound, "device_ms", two_ms)
    copies = step_bound._COPIES
    assert copy_bandwidth(torch.device("cpu")) == 2 * 1000 * copies / 2e-3
