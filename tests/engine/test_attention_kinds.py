"""Engines over models of every kind: the text is that of transformers' own generate."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from transformers_engine import case, engine, generated

pytestmark = pytest.mark.slow

KINDS = [
    "mixtral", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3",
    "deepseek_v32",
]  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def kind(request, device):
    return case(request.param, device)


@pytest.mark.parametrize(("algorithm", "topk"), [("NGRAM", 1), ("EAGLE", 2)])
def test_the_text_is_that_of_generate(kind, algorithm, topk):
    assert len({tuple(tokens) for tokens in kind.expected}) == len(kind.expected)
    assert generated(engine(kind.model, algorithm, topk=topk)) == kind.expected


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32"])
def latents(request, device):
    return case(request.param, device)


@pytest.mark.parametrize(
    ("algorithm", "page_size", "generation"),
    [("NGRAM", 16, "v1"), ("EAGLE", 1, "v1"), ("NGRAM", 1, "v2"), ("EAGLE", 16, "v3")],
)
def test_latents_in_every_generation(latents, algorithm, page_size, generation):
    made = engine(latents.model, algorithm, generation=generation, page_size=page_size)
    assert generated(made) == latents.expected
