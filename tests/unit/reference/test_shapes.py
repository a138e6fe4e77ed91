"""Shapes of published models with random weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.errors import ConfigError
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.shapes import SHAPES
from graphkit.models.sharded import LlamaModel, random_models, shapes


@pytest.mark.parametrize(
    ("shape", "parameters"), [("llama-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)]
)
def test_a_shape_has_the_parameters_of_its_model(shape, parameters):
    with torch.device("meta"):
        model = LlamaModel(SHAPES[shape])
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_weights_are_normal_and_norms_are_one():
    models = random_models("tiny", "eagle", device="cpu")
    assert (models.algorithm, models.dtype) == ("EAGLE", torch.bfloat16)
    assert isinstance(models.draft, EagleHead)
    for module in (models.target, models.draft):
        for name, weight in module.named_parameters():
            assert not weight.requires_grad
            if "norm" in name:
                assert (weight == 1).all()
            else:
                assert 0.018 < weight.float().std() < 0.022
                assert abs(weight.float().mean()) < 0.002


def test_the_eagle_3_head_drafts_a_quarter_of_a_small_vocabulary():
    models = random_models("tiny", "EAGLE3", device="cpu")
    assert isinstance(models.draft, Eagle3Head)
    assert models.draft_token_map.tolist() == list(range(0, 256, 4))
    assert models.draft.lm_head.weight.shape == (64, 32)
    assert 0.018 < models.draft.fc.weight.float().std() < 0.022


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-8b"])
def test_the_eagle_3_head_of_a_shape_is_as_published_ones(shape):
    with torch.device("meta"):
        head = shapes._draft_model("EAGLE3", LlamaModel(SHAPES[shape]), SHAPES[shape])
    layers, size = SHAPES[shape].num_hidden_layers, SHAPES[shape].hidden_size
    assert head.aux_layers == (2, layers // 2, layers - 3)
    assert head.fc.weight.shape == (size, 3 * size)
    assert head.lm_head.weight.shape == (32_000, size)
    assert not [name for name, _ in head.named_parameters() if "q_norm" in name]


def test_weights_depend_on_the_seed_alone():
    first, same = (random_models("tiny", "NONE", device="cpu").target for _ in range(2))
    other = random_models("tiny", "NONE", device="cpu", seed=1).target
    weights = [each.lm_head.weight for each in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_head_has_the_weights_of_its_own_layer_and_the_targets_embedding():
    models = random_models("tiny", device="cpu")
    ids, positions = torch.tensor([3, 4]), torch.tensor([0, 1])
    hidden = torch.ones(2, 32, dtype=torch.bfloat16)

    def attend(_layer, query, _key, _value):
        return query

    before = models.draft(ids, hidden, positions, attend)
    models.target.model.embed_tokens.weight[3] = 1
    assert not torch.equal(before[0], models.draft(ids, hidden, positions, attend)[0])


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors outside of the meta device."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith("empty") and out.device.type != "meta":
            self.bytes += out.nbytes
        return out


def test_nothing_but_the_model_is_allocated():
    with Allocations() as allocated:
        models = random_models("tiny", device="cpu")
    weights = [*models.target.parameters(), *models.draft.parameters()]
    size = sum(each.nbytes for each in weights)
    assert size <= allocated.bytes < 1.01 * size


@pytest.mark.parametrize("algorithm", ["STANDALONE", "MULTI_LAYER_EAGLE"])
def test_an_algorithm_without_a_random_draft_model_is_refused(algorithm):
    with pytest.raises(ConfigError, match=rf"{algorithm} has no draft model with random weights"):
        random_models("tiny", algorithm, device="cpu")


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match="unknown shape 'huge': shapes are llama-8b, qwen3-8b"):
        random_models("huge", device="cpu")
