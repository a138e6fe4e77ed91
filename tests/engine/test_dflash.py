"""DFLASH: blocks of a draft model that reads the target's hidden states as its context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

import graphkit as gk
from causal_attention import run_head
from engine_runs import finish, outputs, refuses
from graphkit.engine import DFlashDrafter, SamplingParams, SpeculativeEngine
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError, OutputError
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.load import head_sources
from small_llama import small_llama, target_features
from small_targets import randomise, with_draft

VOCAB, BLOCK, CONTEXT, MASK = 7, 5, 80, 6
HEAD = Qwen3Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=1, head_dim=16, max_position_embeddings=CONTEXT,
    )  # fmt: skip
PROMPTS = [[1], [2, 5, 0, 3], [4] * 17, [0, 1, 2, 3, 4, 5], [3, 3, 1], list(range(7)) * 4]
COUNTS = [13, 6, 19, 1, 24, 9]
GREEDY = [SamplingParams(max_new_tokens=count) for count in COUNTS]
SAMPLED = [
    SamplingParams(max_new_tokens=count, temperature=(0.0, 0.9)[i % 2], seed=i)
    for i, count in enumerate(COUNTS)
]


@pytest.fixture(scope="module")
def models(device):
    """Random weights. With few tokens, a few drafts are right."""
    target = small_llama(
        device=device, vocab_size=VOCAB, num_hidden_layers=4, max_position_embeddings=CONTEXT
    )
    head = DFlashHead(
        HEAD, head_sources(target.model, target.layout), target_layer_ids=(2, 0),
        block_size=BLOCK, mask_token_id=MASK,
    )  # fmt: skip
    return with_draft(target, randomise(head, 0.3).to(device))


@pytest.fixture
def make_engine(models):
    """``make_engine(width, generation, ...)``: an engine of DFLASH, or of NONE for width 1."""
    made = []

    def make(width, generation="v2", page_size=1, **options):
        spec = gk.SpecConfig("DFLASH" if width > 1 else "NONE", 0, 1, width, page_size)
        engine = models.engine_with(
            spec,
            max_context_len=CONTEXT,
            generation=generation,
            chunked_prefill_size=6,
            **{"max_batch_size": 3, "batch_sizes": [1, 3]} | options,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert engine.memory.held_slots == 0
        engine.close()


def generated(engine, params):
    """Return the requests; they join one per step, and later ones as others end."""
    requests = []
    for prompt, sampling in zip(PROMPTS, params, strict=True):
        requests.append(engine.submit(prompt, sampling))
        engine.step()
    finish(engine)
    return requests


def texts(requests):
    return outputs(requests)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("width", "page_size"), [(3, 1), (BLOCK, 4)])
def test_text_is_that_of_plain_decoding_in_every_generation(make_engine, params, width, page_size):
    """Drafts, and so the accepted tokens, do not depend on the generation."""
    expected = texts(generated(make_engine(1), params))
    assert [len(text) for text in expected] == COUNTS
    accepted = []
    for generation in ("v1", "v2", "v3"):
        engine = make_engine(width, generation, page_size)
        engine.capture()
        requests = generated(engine, params)
        assert texts(requests) == expected, generation
        assert engine.stats.fallbacks == {}
        assert all(engine.stats.replays.values())
        accepted.append([request.num_accepted_tokens for request in requests])
    assert accepted[0] == accepted[1] == accepted[2]
    assert sum(accepted[0]) > len(COUNTS) + 3, "no draft was right: change the seed"


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, BLOCK])
def test_eager_padded_and_exact_sizes_accept_the_same(make_engine, width):
    eager = make_engine(width)
    exact = make_engine(width, batch_sizes=[1, 2, 3])
    exact.capture()
    before, after = generated(eager, GREEDY), generated(exact, GREEDY)
    assert texts(before) == texts(after)
    assert [r.accepted_lengths for r in before] == [r.accepted_lengths for r in after]
    assert set(eager.stats.fallbacks) == {"TARGET_VERIFY", "draft TARGET_VERIFY", "STEP"}


@pytest.mark.slow
def test_drafts_are_those_of_the_head_over_the_whole_text(models, make_engine, monkeypatch):
    """The context in the pool is that of the committed tokens, whatever was rejected before."""
    head = models.draft.module
    engine = make_engine(BLOCK, max_batch_size=2, batch_sizes=None)
    drafter, seen = engine._spec_step.drafter, []
    draft = drafter.draft

    def recorded(rows, seq_lens, bonus):
        tree = draft(rows, seq_lens, bonus)
        drafted = tree.draft_tokens.view(len(rows), -1)[:, 1:].tolist()
        seen.extend(zip(rows.tolist(), seq_lens.tolist(), bonus.tolist(), drafted, strict=True))
        return tree

    monkeypatch.setattr(drafter, "draft", recorded)
    (request,) = engine.generate([PROMPTS[5]], SamplingParams(max_new_tokens=30))
    text = torch.tensor([*request.prompt_ids, *request.output_ids], device=engine.device)
    steps = [step for step in seen if step[0]]
    assert len(steps) > 5
    for _, length, bonus, drafted in steps:
        assert bonus == text[length]
        assert drafted == expected_drafts(models, head, text, length), length


def expected_drafts(target, head, text, length):
    """Return the drafts behind the first ``length`` tokens, computed without a cache."""
    positions = torch.arange(length + BLOCK, device=text.device)
    features, _ = target_features(target, text[:length], head.aux_layers)
    context = head.context_heads(head.encoder(features), positions[:length])

    def attend(layer, query, *block):
        query = query.transpose(0, 1)
        key, value = (
            torch.cat(both).transpose(0, 1) for both in zip(context[layer], block, strict=True)
        )
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return out.transpose(0, 1)

    block = torch.full((BLOCK,), MASK, device=text.device)
    block[0] = text[length]
    hidden = run_head(head, block, positions[length:], attend)
    return head.logits(hidden).argmax(-1)[1:].tolist()


@pytest.mark.slow
def test_values_are_checked_in_the_checking_mode(make_engine, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    expected = texts(generated(make_engine(1), GREEDY))
    for generation in ("v1", "v2", "v3"):
        engine = make_engine(4, generation)
        engine.capture()
        assert texts(generated(engine, GREEDY)) == expected


class Worker(gk.CustomSpecAlgorithm):
    """Blocks in a draft worker have six rows, whatever the size of the model's blocks."""

    def is_dflash(self):
        return True

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return 6 if is_draft_worker else num_draft_tokens


class Strict(Worker):
    def supports_target_verify_for_draft(self):
        return False


class Drafting:
    """Creates engines from single models."""

    def __init__(self, models, device):
        self.models, self.device = models, device

    def __call__(self, spec, *, block_size=BLOCK, mask_token_id=MASK, aux=(3, 1)):
        kind = TritonAttention if self.device == "cuda" else SdpaAttention
        requests, known = ReqToTokenPool(2, CONTEXT, self.device), self.models.spec("DFLASH")
        target = self.models.engine_model(requests, known, attention=kind)
        if not aux:
            target = replace(target, forward=without_hidden(target.forward))
        drafter = DFlashDrafter(
            self.models.draft.engine_model(requests, known, attention=kind),
            block_size=block_size,
            mask_token_id=mask_token_id,
        )
        sizes = self.models.sizes(2, CONTEXT, known)
        options = {"spec": spec, "sizes": sizes, "device": self.device, "generation": "v2"}
        return SpeculativeEngine(target, drafter, **options)


def without_hidden(forward):
    return lambda inputs: gk.ForwardOutput(next_token_logits=forward(inputs).next_token_logits)


@pytest.fixture
def drafting(models, device):
    return Drafting(models, device)


def test_blocks_run_as_target_verify_in_a_draft_worker(drafting):
    with drafting(gk.SpecConfig("DFLASH", 0, 1, 3)) as engine:
        verify, block, context = engine.runners
        assert type(block) is type(verify) is gk.TargetVerifyRunner
        assert (block.spec.is_draft_worker, verify.spec.is_draft_worker) == (True, False)
        assert (block.tokens_per_request, verify.tokens_per_request) == (BLOCK, 3)
        assert type(context) is gk.StepRunner
        assert context.tokens_per_request == 3
        assert engine.max_path == 3
        assert "custom_mask" in block.buffers.bound_fields, "no copy in a replay"
        engine.capture()
        assert block.buffers.view(2).custom_mask.all()


def test_a_custom_algorithm_decides_the_width_of_blocks_and_whether_they_run(drafting):
    with drafting(gk.SpecConfig(Worker("WIDE"), 0, 1, 4)) as engine:
        assert [runner.tokens_per_request for runner in engine.runners] == [4, 6, 4]
        (request,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    with drafting(gk.SpecConfig("DFLASH", 0, 1, 2)) as engine:
        (other,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    assert request.output_ids == other.output_ids
    with refuses(ConfigError, "is_draft_worker", "draft worker cannot capture"):
        drafting(gk.SpecConfig(Strict("STRICT"), 0, 1, 4))


@pytest.mark.parametrize(
    ("settings", "options", "field", "text"),
    [
        ((3, 2, 4), {}, "topk", "DFlashDrafter drafts chains"),
        ((0, 1, 1), {}, "num_draft_tokens", "value from 2 to 5"),
        ((0, 1, BLOCK + 1), {}, "num_draft_tokens", "value from 2 to 5"),
        ((0, 1, 4), {"mask_token_id": VOCAB}, "mask_token_id", "tokens 0 to 6"),
        ((0, 1, 4), {"mask_token_id": -1}, "mask_token_id", "must be an int >= 0"),
        ((0, 1, 4), {"block_size": 1}, "block_size", "must be an int >= 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(drafting, settings, options, field, text):
    with refuses(ConfigError, field, text):
        drafting(gk.SpecConfig("DFLASH", *settings), **options)


def test_a_target_without_hidden_states_is_refused(drafting):
    with drafting(gk.SpecConfig("DFLASH", 0, 1, 4), aux=()) as engine:
        engine.submit([1, 2])
        with pytest.raises(OutputError, match="returned no hidden_states"):
            engine.step()
