"""What is passed to ``models.load`` instead of a folder or a model is refused with advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaForSequenceClassification,
    LlamaModel,
)

from graphkit import models
from graphkit.errors import ConfigError, GraphkitError
from small_models import small_config, small_model


class Adapted(nn.Module):
    """As peft wraps a model."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.peft_config = model, {}


def compiled_in_part(model):
    model.model = torch.compile(model.model)
    return model


def compiled_in_place(model):
    model.compile()
    return model


def on_meta_in_part(model):
    model.model.layers[1].to("meta")
    return model


def loaded_before(model):
    models.load(model, device="cpu", check=False)
    return model


WRAPPERS = {
    "compiled": (torch.compile, "OptimizedModule.* around a LlamaForCausalLM"),
    "parallel": (nn.DataParallel, "DataParallel.* around a LlamaForCausalLM"),
    "adapted": (Adapted, "of peft .*merge_and_unload"),
    "sequence": (nn.Sequential, "is an object of Sequential"),
    "config": (lambda model: model.config, "LlamaConfig, which has no weights"),
    "state dict": (lambda model: model.state_dict(), "state dict.*load_state_dict"),
    "class": (type, "the class LlamaForCausalLM.* instance"),
    "list": (lambda model: [model], "an object of list"),
    "bytes": (lambda _: b"folder", "an object of bytes"),
    "loaded": (
        lambda model: models.load(model, device="cpu", check=False),
        "load returned is ready",
    ),
}
MODELS = {
    "no head": (lambda model: LlamaModel(model.config), "LlamaModel has no output head"),
    "classifier": (lambda model: LlamaForSequenceClassification(model.config), "no output head"),
    "meta": (
        lambda model: model.to("meta"),
        "model.embed_tokens.weight is on the meta",
    ),
    "partly meta": (on_meta_in_part, "model.layers.1.*is on the meta device"),
    "compiled in part": (compiled_in_part, "model of LlamaForCausalLM is compiled"),
    "compiled in place": (compiled_in_place, "LlamaForCausalLM is compiled"),
    "loaded before": (loaded_before, "was passed to load before"),
    "encoder-decoder": (
        lambda _: BartForConditionalGeneration(
            BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1)
        ),
        "has an encoder and a decoder",
    ),
}


@pytest.mark.parametrize("field", ["folder_or_model", "draft"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("compiled") else [])
        for name in (WRAPPERS | MODELS)
    ],
)
def test_something_else_than_a_model_is_refused_in_a_line(name, field):
    make, text = (WRAPPERS | MODELS)[name]
    passed = make(small_model("llama"))
    both = {"folder_or_model": small_model("llama"), field: passed}
    with pytest.raises(ConfigError, match=text) as caught:
        models.load(**both, device="cpu", check=False)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "", "nowhere", "Qwen/Qwen3-0.6B"])
def test_a_path_that_is_no_folder_is_refused(path):
    for options in ({}, {"draft": path}):
        with pytest.raises(GraphkitError, match=r"Pass a|config.json|cannot read") as caught:
            models.load(small_model("llama") if options else path, device="cpu", **options)
        assert len(str(caught.value)) < 600 or len(path) > 200


def test_none_is_no_model():
    with pytest.raises(ConfigError, match="an object of NoneType, expected a folder"):
        models.load(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_training_or_of_a_config_loads(dtype):
    model = AutoModelForCausalLM.from_config(small_config("llama"), dtype=dtype).train()
    assert models.load(model, device="cpu", check=False).model.training is False


def test_models_of_one_configuration_load_one_after_the_other():
    first = small_model("llama")
    second = type(first)(first.config)
    assert models.load(first, device="cpu").model is first
    assert models.load(second, device="cpu").model is second
