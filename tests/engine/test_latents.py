"""Engines over latents, and over keys that an indexer selects: the text is that of transformers."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from latent_engine import KINDS, case, engine, generated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def kind(request, device):
    return case(request.param, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "topk", "page_size", "generation"),
    [
        ("EAGLE", 2, 1, None), ("NGRAM", 1, 16, "v1"), ("EAGLE", 1, 1, "v1"),
        ("NGRAM", 1, 1, "v2"), ("EAGLE", 1, 16, "v3"),
    ],
)  # fmt: skip
def test_the_text_is_that_of_generate(kind, algorithm, topk, page_size, generation):
    assert len({tuple(tokens) for tokens in kind.expected}) == len(kind.expected)
    made = engine(kind.model, algorithm, topk=topk, page_size=page_size, generation=generation)
    assert generated(made) == kind.expected
