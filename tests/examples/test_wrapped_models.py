"""Wrappers of transformers models that drop what their model needs are found or refused."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.attention import SdpaAttention
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.testing import check_wrapper
from graphkit.verify.wrapper import compare_wrapper

transformers = pytest.importorskip("transformers")
examples = pytest.importorskip("tools.examples.transformers_models")

pytestmark = pytest.mark.slow

CONTEXT, REQUESTS, CHUNK = examples.CONTEXT, examples.REQUESTS, 16


def random_model(kind, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama4():
    return random_model(
        "llama4_text", **examples.SMALL, intermediate_size_mlp=128, num_local_experts=2,
        attention_chunk_size=CHUNK, no_rope_layers=[1, 0], interleave_moe_layer_step=2,
    )  # fmt: skip


def test_chunked_attention_is_found_at_the_first_row_of_the_second_chunk():
    """Llama 4 marks chunks in the mask alone, which the wrapper replaces."""
    with pytest.raises(AssertionError) as failure:
        check_wrapper(examples.wrapped(llama4(), "cpu"), device="cpu")
    text = str(failure.value)
    assert f"(position {CHUNK} of request 0)" in text
    assert "computed in `model.layers.0.self_attn`" in text
    assert f"attention_chunk_size of the model is {CHUNK}" in text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"chunk_size": 8}, "passes chunk_size to its attention"),
        ({"scaling": 0.5}, "passes scaling 0.5 to its attention"),
        ({"dropout": 0.1}, "passes dropout to its attention"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "passes a mask to its attention"),
    ],
)
def test_the_example_refuses_what_its_attention_does_not_serve(changed, text):
    model = examples.random_model("llama")
    target = examples.wrapped(model, "cpu")

    def attend(*rows, **options):
        rows = (*rows[:4], changed.get("attention_mask", rows[4]))
        options |= {name: value for name, value in changed.items() if name != "attention_mask"}
        return examples.paged(*rows, **options)

    transformers.AttentionInterface.register("changed", attend)
    model.config._attn_implementation = "changed"
    with pytest.raises(gk.CaptureError, match=text):
        gk.capture_target(target, batch_sizes=[2], device="cpu")


@pytest.mark.parametrize("kind", examples.KINDS)
def test_a_right_wrapper_agrees_in_bfloat16(kind):
    if kind == "deepseek_v32":
        pytest.skip("its index keys are in FP8")
    target = examples.wrapped(examples.random_model(kind, torch.bfloat16), "cpu")
    assert compare_wrapper(target, target.model, device="cpu").difference is None


LEARNT = {
    "opt": (
        {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": True}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
        1.0,
        "model.decoder",
    ),
    "gpt2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
        0.25,
        "transformer",
    ),
}
"""Settings, scale, and the module that computes positions, of models with learnt positions."""


def without_mask(module, query, key, value, _mask, **options):
    return examples.paged(module, query, key, value, None, **options)


def learnt_positions_target(kind, passes_positions=True):
    settings, scale, _ = LEARNT[kind]
    model = random_model(
        kind, vocab_size=256, max_position_embeddings=CONTEXT, pad_token_id=1, **settings
    )
    own = examples.with_own_attention(model)
    transformers.AttentionInterface.register("without_mask", without_mask)
    model.config._attn_implementation = "without_mask"
    requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu")
    table = 1 + torch.arange(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT)
    requests.req_to_token[1:] = table
    pool = MHATokenToKVPool(REQUESTS * CONTEXT, 1, torch.float32, 4, 16, 2, "cpu")
    backend = SdpaAttention(requests, pool, scale=scale)

    def forward(inputs):
        logits = model(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None] if passes_positions else None,
            attention_mask=torch.ones(1, inputs.num_tokens),  # OPT counts positions in it
            use_cache=False,
            inputs=inputs,
            backend=backend,
        ).logits
        return gk.ForwardOutput(next_token_logits=logits[0])

    return gk.CaptureTarget(
        name=kind,
        spec=gk.SpecConfig("NGRAM", num_steps=3, topk=1, num_draft_tokens=4),
        sizes=gk.BufferSizes(REQUESTS, CONTEXT, 64, 256, torch.float32),
        forwards={gk.ForwardMode.TARGET_VERIFY: forward},
        sample_batch=examples.Samples(table, 256),
        attention=backend,
        model=own,
    )


@pytest.mark.parametrize("kind", LEARNT)
def test_learnt_positions_agree_if_they_are_passed(kind):
    check_wrapper(learnt_positions_target(kind), device="cpu")


@pytest.mark.parametrize("kind", LEARNT)
def test_learnt_positions_that_are_not_passed_are_found_without_a_declaration(kind):
    target = learnt_positions_target(kind, passes_positions=False)
    found = compare_wrapper(target, target.model, device="cpu").difference
    assert found.batch == "the drafts of request 0"
    assert found.module.startswith(LEARNT[kind][2])
    assert found.source


def test_a_capture_of_a_lossy_wrapper_fails(capsys):
    from graphkit.cli import main

    target = "tools.examples.broken.dropped_window:target"
    assert main(["capture", target, "--device", "cpu", "--batch-sizes", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "9 live batches replayed: each equals" in printed
    assert "The wrapper differs from its model: TARGET_VERIFY: row 8 of the prompt of" in printed
    assert "mistral/modeling_mistral.py:" in printed
