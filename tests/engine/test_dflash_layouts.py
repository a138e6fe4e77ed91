"""DSPARK and DFLASH 2 from folders as published, beside a reference without a cache.

The reference implements the layers again, by the names of the stored tensors.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from training.folders import save_draft_head

import graphkit as gk
from accept_loops import accept_lengths, check_engine
from graphkit.errors import CheckpointError
from graphkit.models.heads.load import head_sources, load_head
from small_llama import small_llama, target_features
from small_targets import with_draft

VOCAB, SIZE, BLOCK, CONTEXT, MASK, LAYERS, IDS = 7, 32, 5, 80, 6, 2, (-1, 0, 2)
HEADS, KEY_HEADS, HEAD, RANK, EPS, THETA = 4, 2, 8, 6, 1e-6, 10000.0
PROMPTS = [[2, 5, 0, 3], [4] * 17, [0, 1, 2, 3, 4, 5], list(range(7)) * 4]
NEW_TOKENS = 20
LAYER = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD, "rms_norm_eps": EPS, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "max_position_embeddings": CONTEXT, "num_target_layers": 4,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "use_cache": True,
    "tie_word_embeddings": False, "max_window_layers": LAYERS, "initializer_range": 0.02,
    "dtype": "float32", "transformers_version": "5.15.0",
}  # fmt: skip
BLOCKS = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": list(IDS)}
FULL, WINDOWED = ["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS


def dspark(kind):
    """The settings of DeepSpec."""
    heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if kind is None:
        heads = {"enable_confidence_head": False}
    return LAYER | BLOCKS | heads | {
        "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "layer_types": FULL,
        "sliding_window": None, "use_sliding_window": False, "bos_token_id": 1,
        "markov_rank": RANK if kind else 0, "markov_head_type": kind,
    }  # fmt: skip


def dflash2(kinds, **settings):
    """The settings of the authors of DFLASH 2."""
    more = {
        "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 4,
        "output_multiplier": 0.7, "final_logit_softcapping": 20.0,
    }  # fmt: skip
    return LAYER | {
        "architectures": ["DFlash2DraftModel"], "dflash_config": BLOCKS | more, "is_causal": False,
        "layer_types": kinds, "sliding_window": 9, "use_sliding_window": True, **settings,
    }  # fmt: skip


def dflash(**settings):
    """The settings of a DFLASH head with a window in its first layer."""
    kinds = [WINDOWED[0], FULL[0]]
    return LAYER | {
        "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "layer_types": kinds,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(IDS)},
        "sliding_window": 9, "use_sliding_window": True, **settings,
    }  # fmt: skip


CASES = {
    "dspark": dspark("vanilla"),
    "dspark gated": dspark("gated"),
    "dspark rnn": dspark("rnn"),
    "dspark without a Markov head": dspark(None),
    "dspark with its own row": dspark("vanilla") | {"sample_from_anchor": False},
    "dflash2": dflash2(WINDOWED),
    "dflash2 without windows": dflash2(FULL, use_sliding_window=False),
    "dflash with causal windows": dflash(),
    "dflash with windows": dflash(is_causal=False),
    "dflash of transformers": LAYER | BLOCKS | {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
        "layer_types": WINDOWED, "sliding_window": 8,
    },
}  # fmt: skip


def tensors(config):
    """Random tensors with the names and shapes as published."""
    nested, generator = config | config.get("dflash_config", {}), torch.Generator().manual_seed(1)
    shapes = {
        "fc.weight": (SIZE, len(IDS) * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,),
    }  # fmt: skip
    layer = {
        "input_layernorm.weight": (SIZE,), "post_attention_layernorm.weight": (SIZE,),
        "self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,),
        "self_attn.q_proj.weight": (HEADS * HEAD, SIZE),
        "self_attn.k_proj.weight": (KEY_HEADS * HEAD, SIZE),
        "self_attn.v_proj.weight": (KEY_HEADS * HEAD, SIZE),
        "self_attn.o_proj.weight": (SIZE, HEADS * HEAD), "mlp.gate_proj.weight": (48, SIZE),
        "mlp.up_proj.weight": (48, SIZE), "mlp.down_proj.weight": (SIZE, 48),
    }  # fmt: skip
    if taps := nested.get("conv_kernel_size"):
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, taps, SIZE)
            groups = SIZE // nested["conv_group_size"]
            layer[f"{name}.kernel_projection.weight"] = (2 * taps * groups, SIZE)
        shapes |= {
            "candidate_selector.predecessor_codebook": (VOCAB, RANK),
            "candidate_selector.successor_codebook": (VOCAB, RANK),
            "candidate_selector.hidden_projection.weight": (RANK, SIZE),
        }
    for number in range(LAYERS):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    if "num_anchors" in nested:
        shapes |= {"embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
    if nested.get("markov_rank"):
        for name in ("markov_w1", "markov_w2"):
            shapes[f"markov_head.{name}.weight"] = (VOCAB, RANK)
        for kind, name, size, inner in (
            ("gated", "gate_proj", RANK, SIZE + RANK),
            ("rnn", "joint_proj", 3 * RANK, SIZE + 2 * RANK),
        ):
            if nested["markov_head_type"] == kind:
                shapes[f"markov_head.{name}.weight"] = (size, inner)
                shapes[f"markov_head.{name}.bias"] = (size,)
        shapes["confidence_head.proj.weight"] = (1, SIZE + RANK)
        shapes["confidence_head.proj.bias"] = (1,)
    return {
        name: torch.randn(shape, generator=generator) * 0.4 + float(name.endswith("norm.weight"))
        for name, shape in shapes.items()
    }


def write(folder, config):
    stored = tensors(config)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def norm(rows, weight):
    return rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(heads, positions):
    """Rotate heads [T, N, D]."""
    angles = positions[:, None] / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def convolved(rows, kernels, base):
    """Add the kernels of a row times the row and those before it in the block."""
    out = torch.zeros_like(rows)
    for row in range(len(rows)):
        for tap in range(min(row + 1, len(base))):
            kernel = base[tap] + kernels[row, tap].repeat_interleave(SIZE // kernels.shape[-1])
            out[row] += kernel * rows[row - tap]
    return out


def reference(config, stored, target, text, length):
    """Return the drafts behind ``length`` tokens, by the rules of the authors."""
    data = config | config.get("dflash_config", {})
    aux = [layer + 1 for layer in IDS]
    features, _ = target_features(target, text[:length], aux)
    context = norm(linear(features, stored["fc.weight"]), stored["hidden_norm.weight"])
    model, ids = target.original, torch.full((BLOCK,), MASK)
    ids[0] = text[length]
    table = stored.get("embed_tokens.weight", model.get_input_embeddings().weight)
    rows, positions = embedding(ids, table), torch.arange(length + BLOCK)
    for number, kind in enumerate(data["layer_types"]):

        def weight(name, prefix=f"layers.{number}."):
            return stored[prefix + name]

        def around(name, rows, run):
            if f"layers.{number}.{name}.base_kernel" not in stored:  # noqa: B023
                return run(rows)
            base = weight(f"{name}.base_kernel")
            kernels = linear(rows, weight(f"{name}.kernel_projection.weight"))
            kernels = kernels.view(BLOCK, *base.shape[:2], -1)
            return convolved(run(convolved(rows, kernels[:, 0], base[0])), kernels[:, 1], base[1])

        def attend(rows):
            keys = torch.cat([context, rows])
            query, key, value = (
                linear(each, weight(f"self_attn.{name}_proj.weight")).unflatten(-1, (-1, HEAD))
                for name, each in (("q", rows), ("k", keys), ("v", keys))
            )
            query = rotated(norm(query, weight("self_attn.q_norm.weight")), positions[length:])
            key = rotated(norm(key, weight("self_attn.k_norm.weight")), positions)
            seen = torch.ones(BLOCK, length + BLOCK, dtype=torch.bool)
            if kind == WINDOWED[0]:  # noqa: B023
                distance = positions[length:, None] - positions
                is_own = data["model_type"] != "qwen3"  # of transformers: both ends are inside
                seen = distance < data["sliding_window"] + is_own
                if data.get("is_causal") is None and not is_own:
                    seen &= distance >= 0
            out = scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in (query, key, value)), seen, enable_gqa=True
            )
            return linear(out.transpose(0, 1).flatten(1), weight("self_attn.o_proj.weight"))

        def feed(rows):
            gate, up = (linear(rows, weight(f"mlp.{name}_proj.weight")) for name in ("gate", "up"))
            return linear(silu(gate) * up, weight("mlp.down_proj.weight"))

        rows = rows + around("attention_conv", norm(rows, weight("input_layernorm.weight")), attend)
        normed = norm(rows, weight("post_attention_layernorm.weight"))
        rows = rows + around("mlp_conv", normed, feed)
    rows = norm(rows, stored["norm.weight"])
    logits = linear(rows, stored.get("lm_head.weight", model.lm_head.weight))
    logits = logits * data.get("output_multiplier", 1.0)
    if bound := data.get("final_logit_softcapping"):
        logits = bound * (logits / bound).tanh()
    anchored = data.get("sample_from_anchor", "num_anchors" in data)
    token, state, drafts = ids[0], torch.zeros(RANK), []
    for row in range(0 if anchored else 1, BLOCK):
        scores = logits[row]
        if "candidate_selector.predecessor_codebook" in stored:
            best, tokens = scores.topk(data["selector_top_k"])
            key = stored["candidate_selector.predecessor_codebook"][token]
            key = key * linear(rows[row], stored["candidate_selector.hidden_projection.weight"])
            edges = stored["candidate_selector.successor_codebook"][tokens] @ key
            token = tokens[(best + edges).argmax()]
        else:
            bias = 0.0
            if data.get("markov_rank"):
                bias, state = markov(data["markov_head_type"], stored, rows[row], token, state)
            token = (scores + bias).argmax()
        drafts.append(int(token))
    return drafts


def markov(kind, stored, hidden, token, state):
    before = stored["markov_head.markov_w1.weight"][token]
    out = before
    if kind == "gated":
        inputs = torch.cat([hidden, before])
        gate = linear(
            inputs, stored["markov_head.gate_proj.weight"], stored["markov_head.gate_proj.bias"]
        )
        out = gate.sigmoid() * before
    if kind == "rnn":
        inputs = torch.cat([state, before, hidden])
        joint = linear(
            inputs, stored["markov_head.joint_proj.weight"], stored["markov_head.joint_proj.bias"]
        )
        gate, new, out = joint.chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
        out = out.tanh()
    return linear(out, stored["markov_head.markov_w2.weight"]), state


@pytest.fixture(scope="module")
def target(device):
    return small_llama(
        device=device, vocab_size=VOCAB, num_hidden_layers=4, max_position_embeddings=CONTEXT
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_and_accept_lengths_are_those_of_plain_loops(case, target, tmp_path):
    config = CASES[case]
    stored = {name: each.to(target.device) for name, each in write(tmp_path, config).items()}
    head = load_head("DFLASH", tmp_path, head_sources(target.model, target.layout))
    loaded = with_draft(target, head)
    width = BLOCK + head.options.sample_from_anchor
    options = {
        "num_steps": loaded.spec().num_steps, "max_batch_size": 4, "max_context_len": CONTEXT,
        "batch_sizes": [4], "chunked_prefill_size": 6,
    }  # fmt: skip
    with loaded.engine(algorithm="NONE", **options) as engine:
        sampling = gk.SamplingParams(max_new_tokens=NEW_TOKENS + width)
        texts = [[*r.prompt_ids, *r.output_ids] for r in engine.generate(PROMPTS, sampling)]

    def drafts(known):
        with torch.device(target.device):
            return reference(config, stored, loaded, torch.tensor(known), len(known) - 1)

    expected = [
        accept_lengths(drafts, text, len(prompt), NEW_TOKENS)
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    for generation in ("v1", "v2", "v3"):
        with loaded.engine(num_draft_tokens=width, generation=generation, **options) as engine:
            engine.capture()
            check_engine(engine, PROMPTS, NEW_TOKENS, expected)
            drawn = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, seed=5)
            sampled = [request.output_ids for request in engine.generate(PROMPTS, drawn)]
            assert engine.stats.fallbacks == {}
        with loaded.engine(algorithm="NONE", **options) as engine:
            assert sampled == [each.output_ids for each in engine.generate(PROMPTS, drawn)]
    check_drafts(loaded, drafts, width, options)
    check_drafts(loaded, drafts, 3, options)


def check_drafts(loaded, drafts, width, options):
    """Compare the drafts of each step: with random weights few are accepted."""
    seen = []
    with loaded.engine(num_draft_tokens=width, page_size=4, **options) as engine:
        drafter = engine._spec_step.drafter
        draft = drafter.draft

        def recorded(rows, seq_lens, bonus):
            tree = draft(rows, seq_lens, bonus)
            drafted = tree.draft_tokens.view(len(rows), -1)[:, 1:].tolist()
            seen.extend(zip(rows.tolist(), seq_lens.tolist(), drafted, strict=True))
            return tree

        drafter.draft = recorded
        (request,) = engine.generate(PROMPTS[3:], gk.SamplingParams(max_new_tokens=30))
    text = [*request.prompt_ids, *request.output_ids]
    steps = [(length, drafted) for row, length, drafted in seen if row]
    assert len({token for _, drafted in steps for token in drafted}) > 1, "drafts differ"
    for length, drafted in steps:
        assert drafted == drafts(text[: length + 1])[: width - 1], length


@pytest.mark.parametrize("case", CASES)
def test_a_head_is_written_as_it_is_read(case, target, tmp_path):
    sources = head_sources(target.model, target.layout)
    write(tmp_path, CASES[case])
    head = load_head("DFLASH", tmp_path, sources)
    save_draft_head(head, tmp_path / "again")
    again = load_head("DFLASH", tmp_path / "again", sources)
    assert (again.options, again.block_size) == (head.options, BLOCK)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_the_confidence_head_is_named(target, tmp_path, caplog):
    write(tmp_path, CASES["dspark"])
    load_head("DFLASH", tmp_path, head_sources(target.model, target.layout))
    assert (
        "confidence_head.proj.bias, confidence_head.proj.weight, which is not used" in caplog.text
    )


WRONG = [
    ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
    ("dspark", {"markov_rank": 0}, "markov_head"),
    ("dspark", {"model_type": "gemma4_text"}, "model_type 'gemma4_text'"),
    ("dspark", {"sample_from_anchor": "yes"}, "sample_from_anchor must be true or false"),
    ("dspark", {"input_embedding_scale": 2.0}, "input_embedding_scale"),
    (
        "dspark",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
        "yarn",
    ),
    ("dflash2", {"use_sliding_window": False}, "use_sliding_window is not true"),
    ("dflash2", {"sliding_window": None}, "sliding_window must be an int"),
    ("dflash2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("dflash2", {"dflash_config": BLOCKS | {"selector_rank": 4}}, "selector_top_k=0"),
    ("dflash2", {"dflash_config": BLOCKS | {"output_multiplier": "a"}}, "must be a number"),
    ("dflash2", {"dflash_config": BLOCKS}, "candidate_selector"),
    ("dflash2", {"layer_types": FULL, "is_causal": True}, "is_causal"),
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_what_is_not_computed_is_refused_by_name(case, changes, message, target, tmp_path):
    write(tmp_path, CASES[case])
    (tmp_path / "config.json").write_text(json.dumps(CASES[case] | changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head("DFLASH", tmp_path, head_sources(target.model, target.layout))
    assert "\n" not in str(caught.value)
