"""xgrammar's matchers constrain requests to a JSON schema; the tokens are bytes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from engine_runs import finish
from graphkit.engine import FinishReason, SamplingParams, TokenMatcher
from graphkit.errors import InputError
from table_models import table_engine

xgrammar = pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-e]{2,6}$"},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    },
    "required": ["name", "level", "tags"],
    "additionalProperties": False,
}
SAMPLES = (
    b'{"name": "abcd", "level": 42, "tags": []}\0',
    b'{"name": "bead", "level": 7, "tags": ["new", "old"]}\0',
    b"[1, 2, {}]\0",
)
"""Texts whose bigrams the target follows, most of them inside of the schema."""


def matches(text):
    """Whether a text follows the schema."""
    record = json.loads(text)
    name, level, tags = record["name"], record["level"], record["tags"]
    return (
        len(record) == 3
        and 2 <= len(name) <= 6
        and set(name) <= set("abcde")
        and isinstance(level, int)
        and 0 <= level <= 99
        and len(tags) <= 3
        and set(tags) <= {"new", "old"}
    )


@pytest.fixture(scope="module")
def logits(device):
    """After each byte, [256, 256]: noise, and the bytes that follow it in the samples."""
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for sample in SAMPLES:
        for before, after in pairwise(sample):
            table[before, after] += 4
    return table.to(device)


@pytest.fixture(scope="module")
def compiler():
    vocabulary = xgrammar.TokenizerInfo(
        [bytes([token]) for token in range(256)],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=256,
        stop_token_ids=[0],
    )
    return xgrammar.GrammarCompiler(vocabulary)


@pytest.fixture(scope="module")
def grammar(compiler):
    return compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


def settings():
    return [
        SamplingParams(max_new_tokens=90, temperature=temperature, top_p=0.95, seed=seed)
        for seed, temperature in enumerate([0.0, 0.5, 0.8, 1.0, 1.0, 1.2, 1.5, 0.0])
    ]


def run(engine, grammar, constrained):
    """Texts of a request per setting, and the engine's mean of accepted tokens."""
    with engine:
        requests = [
            engine.submit([10], each, matcher=xgrammar.GrammarMatcher(grammar) if is_one else None)
            for each, is_one in zip(settings(), constrained, strict=True)
        ]
        finish(engine)
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_every_text_follows_the_schema(logits, grammar, topk, generation):
    """Requests without a matcher get the tokens of an engine without structured output."""
    constrained = [True, True, False, True, True, True, True, False]
    engine = table_engine(logits, topk, generation=generation, structured_output=True)
    requests = run(engine, grammar, constrained)
    plain = run(table_engine(logits, topk, generation=generation), grammar, [False] * 8)
    for request, other, is_constrained in zip(requests, plain, constrained, strict=True):
        if not is_constrained:
            assert request.output_ids == other.output_ids
            continue
        assert request.finish_reason is FinishReason.STOP
        *text, end = request.output_ids
        assert end == 0
        assert matches(bytes(text)), bytes(text)
        assert request.matcher.is_terminated()
        request.matcher.rollback(len(request.output_ids))  # it has accepted these, and no others
        again = all(request.matcher.accept_token(token) for token in request.output_ids)
        assert again
    assert engine.stats.accept_length > 1.3
    assert engine.stats.fallbacks == {}


def test_xgrammar_is_a_token_matcher_of_its_own_layout(grammar):
    matcher = xgrammar.GrammarMatcher(grammar)
    assert isinstance(matcher, TokenMatcher)
    logits, bitmask = torch.randn(2, 256), xgrammar.allocate_token_bitmask(2, 256)
    matcher.fill_next_token_bitmask(bitmask, 1)
    ours, theirs = logits.clone(), logits.clone()
    torch.ops.graphkit.apply_token_bitmask(ours, bitmask)
    xgrammar.apply_token_bitmask_inplace(theirs, bitmask)
    assert torch.equal(ours, theirs)
    assert (ours[1] > -torch.inf).nonzero().flatten().tolist() == [ord("{")]


def test_a_grammar_of_another_vocabulary_is_refused(logits):
    vocabulary = xgrammar.TokenizerInfo(["a", "b", "\0"], vocab_size=3, stop_token_ids=[2])
    grammar = xgrammar.GrammarCompiler(vocabulary).compile_grammar('root ::= "a" "b"')
    with (
        table_engine(logits, 1, structured_output=True) as engine,
        pytest.raises(InputError, match=r"cannot fill a bitmask of 256 tokens, \[1, 8\]"),
    ):
        engine.submit([1], matcher=xgrammar.GrammarMatcher(grammar))
