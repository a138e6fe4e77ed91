"""The shipped weights on held-out source files: text, and accept lengths beside plain loops."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from accept_loops import accept_lengths, check_engine, head_drafts
from causal_attention import run_head
from engine_runs import outputs
from graphkit.engine import SamplingParams
from graphkit.models.reference import default_checkpoint, reference_engine, reference_model
from graphkit.models.running import attending
from small_llama import target_features

CORPUS = Path(__file__).parents[2] / "tools" / "training" / "corpus.py"
PROMPT, NEW = 96, 24
DRAFTERS = ("EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "STANDALONE", "DFLASH")


@pytest.fixture(scope="module")
def excerpts():
    """``excerpts(count)``: parts of files of the standard library that are no training data.

    They have 1 to 96 tokens, the longest first.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = runpy.run_path(str(CORPUS))["read_corpus"](root, held_out=True)

    def cut(count):
        starts = (torch.arange(1, count + 1) * (len(text) // (count + 2))).tolist()
        lengths = [1 + (PROMPT - 1) * (count - i) // count for i in range(count)]
        return [text[start : start + n].tolist() for start, n in zip(starts, lengths, strict=True)]

    return cut


class Loop:
    """Drafts chains from the text so far. Nothing is cached: every forward has all rows.

    Args:
        model: A target and its draft model.
        drafts: Drafts of a step.
    """

    def __init__(self, model, drafts):
        self.model, self.draft, self.drafts = model, model.draft, drafts
        if model.algorithm == "STANDALONE":
            folder = default_checkpoint("standalone")
            self.small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.draft_after = getattr(self, model.algorithm.lower())

    def accept_lengths(self, text, prompt):
        """Return the accepted tokens of each step until NEW tokens are generated."""
        layers = () if self.draft is None else self.draft.aux_layers
        self.features, logits = target_features(self.model, torch.tensor(text), layers)
        best = logits[prompt - 1 : -1].argmax(-1)
        assert best.tolist() == text[prompt:], "the text is greedy"
        return accept_lengths(self.draft_after, text, prompt, NEW)

    def standalone(self, text):
        for _ in range(self.drafts):
            logits = self.small(torch.tensor([text]), use_cache=False).logits
            text = [*text, int(logits[0, -1].argmax())]
        return text[-self.drafts :]

    def eagle(self, text):
        draft = self.draft
        return head_drafts(draft.module, self.features, text, self.drafts, draft.token_map)

    eagle3 = eagle

    def multi_layer_eagle(self, text):
        head, length = self.draft.module, len(text) - 1
        hidden, positions = self.features[:length], torch.arange(length)
        for layer in range(self.drafts):
            ids = torch.tensor(text[1 + layer :])
            with attending(causal_call, positions):
                hidden = head(layer, ids, hidden, positions)
            text = [*text, int(head.logits(hidden[-1:])[0].argmax())]
        return text[-self.drafts :]

    def dflash(self, text):
        head, length = self.draft.module, len(text) - 1
        context = head.encoder(self.features[:length])
        known = head.context_heads(context, torch.arange(length))

        def attend(layer, query, key, value):
            pairs = zip(known[layer], (key, value), strict=True)
            rows = (query, *(torch.cat(pair) for pair in pairs))
            heads = (each.transpose(0, 1)[None] for each in rows)
            return scaled_dot_product_attention(*heads, enable_gqa=True)[0].transpose(0, 1)

        ids = torch.tensor([text[-1], *[head.mask_token_id] * (head.block_size - 1)])
        hidden = run_head(head, ids, length + torch.arange(head.block_size), attend)
        return head.logits(hidden).argmax(-1).tolist()[1 : 1 + self.drafts]


def causal_call(call):
    parts = (call.query, call.key, call.value)
    out = scaled_dot_product_attention(*parts, is_causal=True, scale=call.scaling, enable_gqa=True)
    return out.transpose(1, 2)


def check_accept_lengths(algorithm, prompts, generations):
    """Compare the accept lengths of engines with those of a loop, in the order of the steps."""
    model = reference_model(algorithm, device="cpu")
    most = 2 * NEW  # the last step may accept tokens behind the end
    with reference_engine("NONE", device="cpu", max_context_len=192) as engine:
        plain = engine.generate(prompts, SamplingParams(max_new_tokens=most))
    texts = [[*request.prompt_ids, *request.output_ids] for request in plain]
    loop = Loop(model, 3)
    with torch.no_grad():
        expected = [
            loop.accept_lengths(text, len(prompt))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
    assert len({length for lengths in expected for length in lengths}) > 2
    for generation, chunk in generations.items():
        with model.engine(
            num_steps=3, max_context_len=192, max_batch_size=8,
            batch_sizes=[8], generation=generation, chunked_prefill_size=chunk,
        ) as engine:  # fmt: skip
            if generation == "v3":
                engine.capture()
            check_engine(engine, prompts, NEW, expected)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_accept_lengths_are_those_of_a_loop_without_a_cache(excerpts, algorithm):
    check_accept_lengths(algorithm, excerpts(20), {"v1": 512, "v2": 7, "v3": 23})


@pytest.mark.slow
def test_accept_lengths_of_few_prompts(excerpts):
    check_accept_lengths("MULTI_LAYER_EAGLE", excerpts(3), {"v2": 7})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_trees_do_not_change_the_text(excerpts, device, algorithm):
    prompts, sampling = excerpts(6), SamplingParams(max_new_tokens=NEW)
    options = {"max_context_len": 160, "batch_sizes": [8], "device": device}
    with reference_engine("NONE", **options) as engine:
        expected = outputs(engine.generate(prompts, sampling))
    with reference_engine(algorithm, num_steps=3, topk=2, **options) as engine:
        eager = engine.generate(prompts, sampling)
        engine.capture()
        captured = engine.generate(prompts, sampling)
    for requests in (eager, captured):
        assert outputs(requests) == expected
    assert [r.accepted_lengths for r in eager] == [r.accepted_lengths for r in captured]
