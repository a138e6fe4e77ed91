"""The bytes of weights that a step reads, and the bandwidth that bounds its time."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from graphkit import models
from graphkit.cli.benchmarks import WeightBytes, copy_bandwidth, step_bound
from graphkit.engine.step import SpecStepInputs
from graphkit.models import reference, shapes
from graphkit.models.heads.config import layer_config
from graphkit.models.heads.dflash_parts import BlockOptions
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import HeadSources
from graphkit.models.reference import ALGORITHMS, default_checkpoint
from graphkit.models.shapes import shape_config
from small_targets import drafted_llama


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "topk"),
    [(name, topk) for name in ALGORITHMS for topk in (1, 2) if (name, topk) != ("DFLASH", 2)],
)
def test_a_step_reads_the_weights_of_its_linear_layers(algorithm, topk):
    folder, kind = default_checkpoint(), reference._DRAFTS.get(algorithm)
    model = models.load(
        folder, draft=None if kind is None else default_checkpoint(kind), algorithm=algorithm,
        device="cpu", fuse=False, check=False, dtype=torch.float32,
    )  # fmt: skip
    spec = model.spec(num_steps=2, topk=topk)
    read = WeightBytes.of(model, spec.num_steps)
    drafts = [] if model.draft is None else [model.draft.module]
    options = {"max_batch_size": 1, "max_context_len": 64, "generation": "v3"}
    with model.engine_with(spec, **options) as engine:
        request = engine.submit([1, 2, 3])
        engine.step()
        rows = SpecStepInputs(req_pool_indices=np.array([request.row]))
        with linear_bytes(model.model, *drafts) as counted, torch.no_grad():
            engine.runners[0].run(rows)
    if algorithm == "MULTI_LAYER_EAGLE":  # each layer calls the forward of the target's head
        counted += [model.head.weight.nbytes] * spec.num_steps
    # Norms are a thousandth of the weights. An embedding would be two hundredths.
    assert sum(counted) < read.total < 1.005 * sum(counted)
    assert (read.drafts > 0) == bool(drafts)


def test_a_dspark_step_reads_its_own_head_once_and_the_markov_head_for_each_draft():
    block = {"target_layer_ids": (0,), "block_size": 3, "mask_token_id": 3}
    options = BlockOptions(sample_from_anchor=True, markov_rank=64)
    plain, biased = (
        drafted_llama("DFLASH", **block, **more)
        for more in ({}, {"options": options, "has_head": True})
    )
    bias = biased.draft.module.markov_head.markov_w2.weight.nbytes
    assert WeightBytes.of(biased, 3).drafts == WeightBytes.of(plain, 3).drafts + 3 * bias


@pytest.fixture(scope="module")
def llama_8b():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config("llama-8b"), dtype=torch.bfloat16)


def read_with(model, head, num_steps):
    """Return the bytes of a step of a model and a head, both without memory."""
    draft = SimpleNamespace(module=head.bfloat16())
    return WeightBytes.of(SimpleNamespace(model=model, head=model.lm_head, draft=draft), num_steps)


def test_a_step_of_the_8b_shape_reads_19_7_gigabytes(llama_8b):
    with torch.device("meta"):
        read = read_with(llama_8b, shapes._draft_head("EAGLE", llama_8b), 3)
    assert read.verify == 15_009_849_344
    assert round(read.total / 1e9, 1) == 19.7


@pytest.mark.parametrize("num_steps", [3, 5])
def test_an_eagle_3_step_of_the_8b_shape_reads_the_layer_and_the_small_head(llama_8b, num_steps):
    """Each draft step reads 0.75 GB, where that of EAGLE reads 1.56; the features merge once."""
    with torch.device("meta"):
        read = read_with(llama_8b, shapes._draft_head("EAGLE3", llama_8b), num_steps)
    hidden, intermediate, keys_and_values = 4096, 14336, 2048
    layer = hidden * (2 * hidden + 2 * keys_and_values + hidden + 3 * intermediate)
    norms, output_head, merge = 4 * hidden, 32_000 * hidden, 3 * hidden * hidden
    assert read.verify == 15_009_849_344
    assert read.drafts == 2 * (num_steps * (layer + norms + output_head) + merge)


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
def test_a_draft_reads_one_output_head_its_own_or_that_of_the_target(llama_8b, kind):
    config = layer_config({**llama_8b.config.to_dict(), "num_hidden_layers": 1})
    sources = HeadSources(llama_8b.get_input_embeddings(), llama_8b.lm_head, 32)
    with torch.device("meta"):
        heads = [kind(config, sources, has_head=has_head) for has_head in (False, True)]
    shared, own = (read_with(llama_8b, head, 3) for head in heads)
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
