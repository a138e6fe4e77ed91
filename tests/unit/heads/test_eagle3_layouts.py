"""EAGLE-3 heads in the layouts of the authors, SpecForge and Speculators."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from training.folders import save_draft_head

from causal_attention import causal_attend, run_head
from graphkit.errors import CheckpointError
from graphkit.models.heads.eagle import Eagle3Head
from graphkit.models.heads.load import load_head

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
AUTHORS = {"draft_vocab_size": 32, LAYER_IDS: [0, 1, 2]}


@pytest.fixture
def state(eagle3):
    """The tensors of the head under the names of the authors, with t2d."""
    is_drafted = torch.zeros(96, dtype=torch.bool)
    is_drafted[eagle3.token_map] = True
    return {name: each.contiguous() for name, each in eagle3.state_dict().items()} | {
        "t2d": is_drafted
    }


@pytest.fixture
def load(eagle3, target, tmp_path):
    """``load(state, config)``: the head of a folder with these tensors and entries."""

    def make(state, config):
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return load_head("EAGLE3", tmp_path, target)

    return make


@pytest.fixture
def rows():
    """Five rows with features of three layers."""
    torch.manual_seed(4)
    return torch.randint(96, (5,)), torch.randn(5, 192), torch.arange(5), causal_attend(1, 5)


def test_specforge_names_layers_by_their_outputs(eagle3, state, load, rows):
    entries = {"draft_vocab_size": 32, "eagle_config": {LAYER_IDS: [0, 1, 1]}}
    head = load(state, eagle3.config.to_dict() | entries)
    assert head.aux_layers == (1, 2, 2)
    assert torch.equal(run_head(head, *rows), run_head(eagle3, *rows))
    assert torch.equal(head.token_map, eagle3.token_map)


@pytest.mark.parametrize("is_normed", [False, True])
def test_speculators_nest_the_configuration_and_number_the_layer(
    eagle3, state, load, rows, is_normed
):
    eagle3.midlayer.norm_before_residual = is_normed
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in state.items()}
    renamed["embed_tokens.weight"] = torch.randn(96, 64)
    entries = {"transformer_layer_config": eagle3.config.to_dict(), **AUTHORS}
    head = load(renamed, entries | {"norm_before_residual": is_normed})
    assert head.aux_layers == (0, 1, 2)
    head._inputs = eagle3._inputs
    assert torch.equal(run_head(head, *rows), run_head(eagle3, *rows))
    assert torch.equal(head.embed_tokens.weight, renamed["embed_tokens.weight"])


def test_a_prefix_of_the_whole_model_is_ignored(eagle3, state, load, rows):
    prefixed = {
        name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}": each
        for name, each in state.items()
    }
    head = load(prefixed, eagle3.config.to_dict() | AUTHORS)
    assert torch.equal(head.logits(run_head(head, *rows)), eagle3.logits(run_head(eagle3, *rows)))


@pytest.mark.parametrize("is_reduced", [False, True])
def test_what_graphkit_saves_it_loads(eagle3, target, rows, tmp_path, is_reduced):
    head = eagle3
    if not is_reduced:
        head = Eagle3Head(eagle3.config, target, aux_layers=(0, 2, 1), norm_before_residual=True)
        torch.nn.init.normal_(head.fc.weight)
    save_draft_head(head.bfloat16(), tmp_path)
    loaded = load_head("EAGLE3", tmp_path, target.bfloat16())
    assert loaded.aux_layers == head.aux_layers
    assert loaded.midlayer.norm_before_residual is head.midlayer.norm_before_residual
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"norm_output": True}, "sets norm_output, which is not supported"),
        ({"fc_norm": True}, "sets fc_norm"),
        ({"norm_before_fc": True}, "sets norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state to false"),
        ({"eagle_config": 3}, "eagle_config must be an object"),
        ({LAYER_IDS: 7}, f"{LAYER_IDS} must be a list of ints, got 7"),
        ({LAYER_IDS: [0, 1, "2"]}, "must be a list of ints"),
        ({LAYER_IDS: [0, 1, 7]}, "target layers 0, 1, 7, but the target has layers 0 to 2"),
        ({LAYER_IDS: None}, "target layers 2, 1, -1, but the target has"),
        ({"norm_before_residual": 1}, "norm_before_residual must be true or false"),
    ],
)
def test_a_head_that_computes_something_else_is_refused(eagle3, state, load, entries, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        load(state, eagle3.config.to_dict() | AUTHORS | entries)
    assert "\n" not in str(caught.value)
