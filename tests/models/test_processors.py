"""Processors of logits against those of transformers, with drafts, in every generation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import graphkit as gk
from graphkit import models
from small_models import small_model

PROMPT, NEW = [5, 17, 3, 17, 3, 17, 9, 5, 17], 20
SUPPRESSED, STOPS = list(range(40, 70)), [7, 33, 90, 101]


@pytest.fixture(scope="module")
def loaded():
    model = small_model("llama", eos_token_id=STOPS, pad_token_id=0)
    return models.load(model, device="cpu", check=False, fuse=False)


def of_transformers(model, processors):
    """The greedy text with some processors, and log-probabilities by the logits before them."""
    out = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, logits_processor=LogitsProcessorList(processors),
    )  # fmt: skip
    text = out.sequences[0, len(PROMPT) :]
    logprobs = torch.stack(out.logits)[:, 0].log_softmax(-1).gather(1, text[:, None])
    return text.tolist(), logprobs[:, 0].tolist()


def cases():
    """Processors of transformers, and the parameters of the same request."""
    penalty = RepetitionPenaltyLogitsProcessor(1.4), {"repetition_penalty": 1.4}
    reward = RepetitionPenaltyLogitsProcessor(0.8), {"repetition_penalty": 0.8}
    suppress = (
        SuppressTokensLogitsProcessor(SUPPRESSED),
        {"logit_bias": dict.fromkeys(SUPPRESSED, -math.inf)},
    )
    least = (
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 15, STOPS, device="cpu"),
        {"min_tokens": 15},
    )
    for some in ([penalty], [reward], [suppress], [least], [penalty, suppress, least]):
        processors, parameters = zip(*some, strict=True)
        yield [*processors], {key: value for each in parameters for key, value in each.items()}


@pytest.fixture(scope="module")
def expected(loaded):
    """Parameters of requests, with texts and log-probabilities of transformers."""
    return [
        (parameters, of_transformers(loaded.original, processors))
        for processors, parameters in cases()
    ]


@pytest.mark.parametrize(("generation", "topk"), [("v1", 2), ("v2", 1), ("v3", 2)])
def test_text_and_log_probabilities_are_those_of_transformers(generation, topk, loaded, expected):
    with loaded.engine(
        algorithm="NGRAM", num_steps=3, topk=topk, max_batch_size=5, max_context_len=64,
        batch_sizes=[5], generation=generation,
    ) as engine:  # fmt: skip
        engine.capture()
        requests = [
            engine.submit(
                PROMPT,
                gk.SamplingParams(
                    max_new_tokens=NEW, stop_token_ids=STOPS, logprobs=True, **parameters
                ),
            )
            for parameters, _ in expected
        ]
        while engine.has_work:
            engine.step()
    for request, (_, (text, logprobs)) in zip(requests, expected, strict=True):
        assert request.output_ids == text
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len({tuple(request.output_ids) for request in requests}) == len(requests)
