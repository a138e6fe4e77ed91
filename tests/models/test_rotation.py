"""Rotations that transformers changes by the largest position of a forward."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import graphkit as gk
from graphkit import models
from graphkit.errors import ConfigError
from small_models import VOCAB, small_model

LIMIT = 40
"""Positions with the initial frequencies."""
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25] * 4,
    "long_factor": [4.0, 3.0, 2.0, 5.0] * 2,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PARTIAL = DYNAMIC | {"partial_rotary_factor": 0.5}  # not fused
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {**LONGROPE, "original_max_position_embeddings": LIMIT, "factor": 3.2}
KINDS = {
    "longrope": ("phi3", {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT,
    }),
    "dynamic": ("phi", {"rope_parameters": PARTIAL, "max_position_embeddings": LIMIT}),
    "dynamic of all heads": ("llama", {
        "rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT,
    }),
    "longrope of full layers": ("gemma3_text", {
        "rope_parameters": {"full_attention": SCALED, "sliding_attention": DEFAULT},
        "tie_word_embeddings": False,
    }),
    "dynamic of windows": ("gemma3_text", {
        "rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DYNAMIC},
        "tie_word_embeddings": False, "max_position_embeddings": LIMIT,
    }),
}  # fmt: skip
"""Type and settings of a model by kind of rotation."""
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 20, 9, 17)
]
MOST_DRAFTS = 16
LONG = torch.arange(3, LIMIT + 23)[None]


def model_with(kind):
    name, changes = KINDS[kind]
    copies = {**changes, "rope_parameters": copied(changes["rope_parameters"])}
    return small_model(name, **copies)


def copied(value):
    """Return a copy of a setting: configurations add to their dicts."""
    return {key: copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def to_the_limit(model, prompt):
    ids = model.generate(
        torch.tensor([prompt]), max_length=LIMIT, eos_token_id=None, pad_token_id=0,
        do_sample=False,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


def check_texts(model, engine):
    """Generate in captured loops, until no draft fits into the context."""
    engine.capture()
    requests = engine.generate(PROMPTS, gk.SamplingParams(max_new_tokens=LIMIT))
    assert all(not runner.stats.fallbacks for runner in engine.runners)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        text = request.output_ids
        assert len(prompt) + len(text) >= LIMIT - MOST_DRAFTS
        assert text == to_the_limit(model.original, prompt)[: len(text)]
    assert len(set(chain(*(request.output_ids for request in requests)))) > 10


def rotary(model):
    (found,) = (each for each in model.modules() if hasattr(each, "rope_type"))
    return found


@pytest.fixture(scope="module", params=KINDS)
def loaded(request):
    return models.load(model_with(request.param), device="cpu")


def test_a_later_position_does_not_change_the_rotation_of_others(loaded):
    module = rotary(loaded.model)
    states, positions = torch.zeros(1, 1, 1), torch.arange(LIMIT)[None]
    layer_types = module.rope_type if isinstance(module.rope_type, dict) else [None]
    for layer_type in layer_types:
        options = {} if layer_type is None else {"layer_type": layer_type}
        forward = type(module).forward  # that of the object is omitted where heads are fused
        expected = forward(rotary(loaded.original), states, positions, **options)
        several = torch.cat([positions, torch.tensor([[LIMIT, 5 * LIMIT]])], 1)
        for got, part in zip(forward(module, states, several, **options), expected, strict=True):
            assert torch.equal(got[:, :LIMIT], part)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "NONE"}, {"num_steps": 3}, {"num_steps": 3, "topk": 2}],
    ids=["none", "chain", "tree"],
)
def test_captured_requests_of_several_lengths_have_the_text_of_transformers(loaded, settings):
    with loaded.engine(
        max_batch_size=4, max_context_len=LIMIT, batch_sizes=[4], generation="v3", **settings
    ) as engine:
        check_texts(loaded, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_has_run_a_longer_text_starts_with_the_initial_frequencies(kind):
    model, fresh = model_with(kind), model_with(kind)
    model(LONG)
    loaded = models.load(model, device="cpu", check=False)
    buffers = dict(rotary(fresh).named_buffers())
    for name, got in rotary(loaded.model).named_buffers():
        assert torch.equal(got, buffers[name])


def test_the_original_model_rotates_as_transformers_does(loaded, request):
    kind = request.node.callspec.params["loaded"]
    fresh = model_with(kind)
    assert torch.allclose(loaded.original(LONG).logits, fresh(LONG).logits, atol=1e-4)
    before = [buffer.clone() for buffer in rotary(loaded.model).buffers()]
    loaded.original(LONG)
    after = list(rotary(loaded.model).buffers())
    assert all(map(torch.equal, before, after))


def test_longer_contexts_than_the_fixed_frequencies_are_refused(loaded):
    assert loaded.longest_context == LIMIT
    assert loaded.engine(algorithm="NONE").sizes.max_context_len == LIMIT
    with pytest.raises(ConfigError, match=rf"max_context_len is {LIMIT + 1}, but ") as caught:
        loaded.engine(max_context_len=LIMIT + 1)
    rope_parameters = str(loaded.original.config.rope_parameters)
    reason = f"LongRoPE keeps its frequencies for {LIMIT} positions, and a later one would change"
    assert (reason in str(caught.value)) == ("longrope" in rope_parameters)


def test_a_draft_model_limits_the_context():
    drafted = models.load(small_model("llama"), draft=model_with("longrope"), device="cpu")
    assert drafted.longest_context == LIMIT
    with drafted.engine(max_batch_size=4, batch_sizes=[4]) as engine:
        check_texts(drafted, engine)


def test_other_rotations_keep_their_type_and_share_their_frequencies():
    loaded = models.load(small_model("llama", rope_parameters=DEFAULT), device="cpu")
    module, original = rotary(loaded.model), rotary(loaded.original)
    assert module.inv_freq is original.inv_freq
    assert loaded.longest_context == 128


def test_fixed_frequencies_are_fused():
    replaced = models.load(model_with("dynamic of all heads"), device="cpu").layout.replaced
    assert "store_rotated_heads" in replaced["model.layers.0.self_attn"]
