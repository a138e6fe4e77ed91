"""Lossless decoding of targets with recurrent state, for paths that end at any node."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from decaying_target import (
    CONTEXT,
    HIDDEN,
    REQUESTS,
    STEPS,
    VOCAB,
    DecayingForward,
    recurrent_engine,
)
from engine_runs import outputs, run_all
from erring_oracle import ErringOracle
from graphkit.config import BufferSizes
from graphkit.engine import EngineModel, SamplingParams, SpeculativeEngine
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, RecurrentStatePool, ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.spec import SpecConfig

NEW = 17


def mamba_forward(device: str, width: int):
    example = importlib.import_module("tools.examples.mamba")
    forward = example.MambaForward(example.small_mamba().to(device), width)

    def plain(prompt, count):
        ids = list(prompt)
        for _ in range(count):
            logits = forward.model(torch.tensor([ids], device=device), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]

    forward.plain = plain
    return forward


PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [33, 20, 11, 50], [8, 8], [60, 1, 4]]


@pytest.fixture(scope="module", params=["decaying", "mamba"])
def target(request, device):
    """Return the forwards and texts of one model, created once for all settings."""
    made = {}

    def forward_of(width):
        if width not in made:
            create = DecayingForward if request.param == "decaying" else mamba_forward
            made[width] = create(device, width)
        return made[width]

    if request.param == "mamba":
        pytest.importorskip("transformers")
    plain = forward_of(STEPS + 1).plain
    texts = [[*prompt, *plain(prompt, NEW)] for prompt in PROMPTS]
    return SimpleNamespace(forward_of=forward_of, texts=texts)


def engine_of(target, topk, *, drafter=None, **options):
    width = STEPS + 1 if topk == 1 else 1 + 2 * STEPS
    drafter = drafter or ErringOracle(target.texts, NEW, topk)
    return recurrent_engine(target.forward_of(width), drafter, topk, **options)


def run(engine):
    """Run all prompts; two join later, in rows that other requests have used."""
    with engine:
        requests = run_all(engine, PROMPTS, SamplingParams(max_new_tokens=NEW))
        return outputs(requests), engine.stats


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_output_is_that_of_plain_decoding(target, device, topk, generation, captured):
    drafter = ErringOracle(target.texts, NEW, topk)
    engine = engine_of(
        target, topk, drafter=drafter, generation=generation, batch_sizes=[1, 4],
        chunked_prefill_size=6,
    )  # fmt: skip
    if captured:
        engine.capture()
    outputs, stats = run(engine)
    assert outputs == [text[-NEW:] for text in target.texts]
    assert not drafter.wrong_paths
    assert not (captured and stats.fallbacks)
    assert 1.5 < stats.accept_length < STEPS + 1, "some drafts are accepted and some rejected"


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_without_a_commit_the_output_differs(target, device, topk, monkeypatch):
    """The texts are sensitive to the state: the test above cannot pass by accident."""
    monkeypatch.setattr(RecurrentStatePool, "commit", lambda *_: None)
    outputs, _ = run(engine_of(target, topk))
    assert outputs != [text[-NEW:] for text in target.texts]


def test_decoding_without_drafts_commits_each_token(target, device):
    forward = target.forward_of(STEPS + 1)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    pool = MHATokenToKVPool(REQUESTS * CONTEXT, 1, torch.float32, 1, 1, 0, device)
    engine = SpeculativeEngine(
        EngineModel(forward, SdpaAttention(requests, pool), forward.states),
        spec=SpecConfig("NONE", 0, 1, 1),
        sizes=BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        device=device,
    )
    assert run(engine)[0] == [text[-NEW:] for text in target.texts]


class TestPoolsThatDoNotFit:
    def refusal(self, target, device, **sizes):
        made = {"size": REQUESTS, "width": STEPS + 1, **sizes}
        states = RecurrentStatePool(
            made["size"], made["width"], 1, device, shapes={"sum": (HIDDEN,)}
        )
        with pytest.raises(ConfigError) as caught:
            engine_of(target, 1, states=states)
        assert caught.value.field == "recurrent_state"
        return str(caught.value)

    def test_too_few_rows(self, target, device):
        text = self.refusal(target, device, size=2)
        assert "has 2 rows of 4 nodes" in text
        assert "needs 4 rows of 4 nodes" in text

    def test_too_few_nodes(self, target, device):
        assert "has 4 rows of 3 nodes" in self.refusal(target, device, width=3)
