"""``generate_batch`` with a drafter gives the texts of continuous batching of transformers."""

from __future__ import annotations

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig

import graphkit as gk
from graphkit.errors import ConfigError
from small_models import small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]


def greedy(**changes):
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
    return GenerationConfig(**settings | changes)


def tokens(results):
    return [result.generated_tokens for result in results.values()]


@pytest.fixture(scope="module")
def model():
    return small_model("llama")


@pytest.fixture(scope="module")
def plain(model):
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)
    return tokens(model.generate_batch(PROMPTS, greedy(), batching, warmup=False))


@pytest.fixture(scope="module")
def loaded(model, plain):  # transformers generates before the model runs through graphkit alone
    return gk.models.load(model, algorithm="NGRAM")


@pytest.mark.slow
def test_texts_are_those_of_continuous_batching(loaded, plain):
    results = gk.models.generate_batch(loaded, PROMPTS, greedy(), num_steps=3)
    assert tokens(results) == plain
    assert [result.prompt_ids for result in results.values()] == PROMPTS
    assert all(result.is_finished() for result in results.values())


@pytest.mark.slow
def test_a_stop_token_and_the_length_end_texts(loaded, plain):
    stop = plain[0][4]
    results = gk.models.generate_batch(loaded, PROMPTS, greedy(eos_token_id=[stop]))
    for text, whole in zip(tokens(results), plain, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert text == whole[:end]
    short = gk.models.generate_batch(loaded, PROMPTS, greedy(), max_new_tokens=3)
    assert tokens(short) == [text[:3] for text in plain]


@pytest.mark.parametrize(
    "changes", [{"num_return_sequences": 2, "do_sample": True}, {"guidance_scale": 2.0}]
)
def test_settings_that_are_not_computed_are_refused(loaded, changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        gk.models.generate_batch(loaded, PROMPTS, greedy(**changes))
