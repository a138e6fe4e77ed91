"""MTP layers that ``models.load(draft="mtp")`` reads compute what those of transformers compute."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from graphkit import models
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.running import attending
from mtp_folders import save_with_mtp
from small_models import small_model

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def causal(call):
    """Attend to all earlier rows, without pools."""
    call = call.expanded()
    attended = scaled_dot_product_attention(
        call.query, call.key, call.value, is_causal=True, scale=call.scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)


def drafted(head, layer, ids, hidden):
    with attending(causal, torch.arange(len(ids))):
        hidden = head(layer, ids, hidden, torch.arange(len(ids)))
    return hidden, head.logits(hidden)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_a_chain_computes_what_transformers_computes(kind, tmp_path):
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = small_model(kind, num_mtp_layers=2)
    save_with_mtp(model, tmp_path, 1, count=2)
    head = models.load(tmp_path, draft="mtp", device="cpu").draft.module
    target = type(model).from_pretrained(tmp_path)
    target._keys_to_ignore_on_load_unexpected = [r"layers\.[2-9]"]  # published models have 61
    theirs = MtpModel.from_pretrained(target)
    ids, hidden = torch.randint(128, (9,)), torch.randn(9, 64)
    own = hidden
    cache = MtpCache(config=target.config.get_mtp_config())
    for layer in range(2):
        own, logits = drafted(head, layer, ids, own)
        positions = torch.arange(9)[None] + layer + 1
        hidden = theirs.forward_layer(
            layer, hidden.view(1, 9, 64), positions, cache, input_ids=ids[None]
        )
        torch.testing.assert_close(own, hidden[0])
        torch.testing.assert_close(logits, theirs._project_to_logits(hidden)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_its_parts_compute(kind, tmp_path):
    """The published formula, by hand, around the target's own decoder layer."""
    model = small_model(kind)
    save_with_mtp(model, tmp_path, 1)
    loaded = models.load(tmp_path, draft="mtp", device="cpu")
    stored, (layer,) = load_file(tmp_path / "model.safetensors"), loaded.draft.module.chain
    is_behind = kind in ("deepseek_v3", "glm4_moe")
    stem = "model.layers.2." if is_behind else "mtp."
    names = (
        ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if is_behind
        else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    )
    enorm, hnorm, projection, norm = (stored[f"{stem}{name}.weight"] for name in names)

    def normed(rows, weight):
        scale = rows.pow(2).mean(-1, keepdim=True).add(model.config.rms_norm_eps).rsqrt()
        return rows * scale * (weight if is_behind else 1 + weight)

    ids, hidden = torch.randint(128, (9,)), torch.randn(9, 64)
    embedded = loaded.original.get_input_embeddings()(ids)
    merged = torch.cat([normed(embedded, enorm), normed(hidden, hnorm)], -1) @ projection.T
    rotation = layer.decoder.rotary_emb(merged[None], torch.arange(9)[None])
    with attending(causal, torch.arange(9)):
        out = layer.block(
            merged[None], position_embeddings=rotation, position_ids=torch.arange(9)[None]
        )
    expected = normed(out[0], norm)
    found, logits = drafted(loaded.draft.module, 0, ids, hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, loaded.original.lm_head(expected))


def test_the_layers_share_embedding_and_head_and_have_weights_of_their_own(tmp_path):
    save_with_mtp(small_model("deepseek_v3"), tmp_path, 1)
    loaded = models.load(tmp_path, draft="mtp", device="cpu")
    shared = {id(weight) for weight in loaded.model.parameters()}
    own = dict(loaded.draft.module.named_parameters())
    assert {name for name, weight in own.items() if id(weight) in shared} == {
        name for name in own if "embed_tokens" in name
    }
    stored = load_file(tmp_path / "model.safetensors")
    block = loaded.draft.module.chain[0].block
    torch.testing.assert_close(
        block.self_attn.o_proj.weight, stored["model.layers.2.self_attn.o_proj.weight"]
    )
    torch.testing.assert_close(
        block.mlp.experts.gate_up_proj[3, 32:],
        stored["model.layers.2.mlp.experts.3.up_proj.weight"],
    )


@pytest.mark.parametrize("part", ["embedding", "output head"])
def test_a_stored_copy_that_is_another_tensor_is_a_warning(tmp_path, caplog, part):
    save_with_mtp(small_model("deepseek_v3"), tmp_path, 1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copies = {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }
    tensors |= {copy: tensors[name].clone() for copy, name in copies.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    models.load(tmp_path, draft="mtp", device="cpu", check=False)
    assert "MTP layers share" not in caplog.text
    name = [*copies][part == "output head"]
    save_file(tensors | {name: tensors[name] + 1}, file, metadata={"format": "pt"})
    models.load(tmp_path, draft="mtp", device="cpu", check=False)
    assert f"has {name}, which is not used: MTP layers share the {part}" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r"layers\.2\.", None, "no MTP layers"),
        (r"2\.hnorm", None, "has no hnorm.weight"),
        (
            r"2\.mlp\.experts\.1\.up_proj",
            None,
            r"has 3 of 4 experts of .*\.mlp\.experts\.gate_up_proj",
        ),
        (r"2\.eh_proj", torch.zeros(64, 64), r"eh_proj.weight has shape \[64, 64\]"),
    ],
)
def test_a_folder_without_fitting_layers_is_refused_in_a_line(
    tmp_path, pattern, replacement, message
):
    save_with_mtp(small_model("deepseek_v3"), tmp_path, 1)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: replacement if re.search(pattern, name) else tensor
        for name, tensor in load_file(file).items()
        if replacement is not None or not re.search(pattern, name)
    }
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as caught:
        models.load(tmp_path, draft="mtp", device="cpu", check=False)
    assert "\n" not in str(caught.value)


def test_a_model_object_has_no_mtp_layers():
    with pytest.raises(ConfigError, match="Load the folder"):
        models.load(small_model("deepseek_v3"), draft="mtp", device="cpu", check=False)


def test_a_chain_drafts_at_most_one_step_per_layer(tmp_path):
    save_with_mtp(small_model("deepseek_v3"), tmp_path, 1, count=2)
    loaded = models.load(tmp_path, draft="mtp", device="cpu", check=False)
    assert loaded.engine().spec.longest.num_steps == loaded.draft.num_steps == 2
    assert loaded.engine().spec.num_steps == (0, 2)
    with pytest.raises(ConfigError, match="folder has 2 MTP layers"):
        loaded.engine(num_steps=3)
    first = models.load(tmp_path, draft="mtp", algorithm="EAGLE", device="cpu", check=False)
    assert first.engine(num_steps=3).spec.num_steps == 3
