"""Structured output: matchers constrain requests, at every node of a draft tree."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine_runs import finish, outputs
from graphkit.engine import FinishReason, Request, SamplingParams
from graphkit.engine.schedule import RunningBatch
from graphkit.errors import ConfigError, InputError
from small_llama import full_logits

VOCAB, NEAR_TIE = 96, 1e-4


class Grammar:
    """A language over the tokens: what may follow a text, and whether the text is complete."""

    def __init__(self, allowed, is_end=lambda text: False):
        self.allowed, self.is_end = allowed, is_end


def by_turns(text):
    """A regular language: tokens leave 0, 0 or 1, 1 or 2 when divided by 3, in turns."""
    wanted = [(0,), (0, 1), (1, 2)][len(text) % 3]
    return [token for token in range(VOCAB) if token % 3 in wanted]


def brackets(text):
    """Tokens from 48 on close what the others have opened, three at a time at most."""
    depth = sum(1 if token < 48 else -1 for token in text)
    return [token for token in range(VOCAB) if (depth < 3 if token < 48 else depth > 0)]


def is_balanced(text):
    return len(text) >= 4 and sum(1 if token < 48 else -1 for token in text) == 0


GRAMMARS = {
    "digits": Grammar(lambda text: range(10, 20)),
    "turns": Grammar(by_turns),
    "nine turns": Grammar(by_turns, lambda text: len(text) == 9),
    "brackets": Grammar(brackets, is_balanced),
    "even": Grammar(lambda text: range(0, VOCAB, 2)),
}


class Matcher:
    """Follows a grammar by its text. Counts its calls, and refuses those that break the rules."""

    def __init__(self, grammar):
        self.grammar, self.text, self.calls = grammar, [], Counter()

    def fill_next_token_bitmask(self, bitmask, index):
        assert not self.is_terminated()
        assert bitmask.dtype == torch.int32
        words = [0] * bitmask.shape[1]
        for token in self.grammar.allowed(self.text):
            words[token // 32] |= 1 << token % 32
        bitmask[index] = torch.tensor(words).int()
        self.calls["fill"] += 1

    def accept_token(self, token):
        assert not self.is_terminated()
        if token not in self.grammar.allowed(self.text):
            return False
        self.text.append(token)
        self.calls["accept"] += 1
        return True

    def rollback(self, count):
        assert 0 < count <= len(self.text)
        del self.text[-count:]
        self.calls["rollback"] += count

    def is_terminated(self):
        return self.grammar.is_end(self.text)


@pytest.fixture(scope="module")
def constrained(model, device):
    """``constrained(prompt, name, count)``: greedy text under a grammar, without an engine."""
    known = {}

    def decode(prompt, name, count):
        grammar, text = GRAMMARS[name], []
        while len(text) < count and not grammar.is_end(text):
            logits = full_logits(model, torch.tensor([[*prompt, *text]], device=device))[0, -1]
            allowed = sorted(grammar.allowed(text))
            best = logits[allowed].topk(2)
            assert best.values[0] - best.values[1] > NEAR_TIE, "a near tie: change the seed"
            text.append(allowed[int(best.indices[0])])
        return text

    def cached(prompt, name, count):
        key = (*prompt, name, count)
        if key not in known:
            known[key] = decode(prompt, name, count)
        return known[key]

    return cached


SETUPS = [("EAGLE", 1), ("EAGLE", 3), ("EXACT", 2), ("NGRAM", 1), ("NONE", 1)]
each_setup = pytest.mark.parametrize(("algorithm", "topk"), SETUPS)
each_generation = pytest.mark.parametrize("generation", ["v1", "v2"])


def submit_all(engine, task, names):
    """A request per prompt, each with the matcher of its name, or without."""
    return [
        engine.submit(prompt, sampling, matcher=Matcher(GRAMMARS[name]) if name else None)
        for prompt, sampling, name in zip(task.prompts, task.sampling(), names, strict=True)
    ]


@pytest.mark.slow
@each_setup
@each_generation
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
def test_greedy_text_is_that_of_masked_decoding(
    make_engine, task, constrained, algorithm, topk, generation, is_captured
):
    """In batches with requests that are not constrained, which requests join and leave."""
    names = ["digits", None, "turns", "brackets", None, "nine turns", "even", None]
    engine = make_engine(
        algorithm, topk=topk, generation=generation, max_batch_size=5, batch_sizes=[2, 5],
        structured_output=True,
    )  # fmt: skip
    if is_captured:
        engine.capture()
    some = task.first(8)
    requests = submit_all(engine, some, names)
    finish(engine)
    for request, name, count, plain in zip(
        requests, names, some.counts, some.expected, strict=True
    ):
        wanted = constrained(request.prompt_ids, name, count) if name else plain
        assert request.output_ids == wanted, name
        is_short = len(wanted) < count
        assert request.finish_reason is (FinishReason.STOP if is_short else FinishReason.LENGTH)
        if name:
            calls = request.matcher.calls
            assert request.matcher.text == wanted
            assert calls["accept"] - calls["rollback"] == len(wanted)
    if is_captured:
        assert engine.stats.fallbacks == {}
    if algorithm == "EXACT":
        assert engine.stats.accept_length > 1.2, "no constrained draft was accepted"
        assert requests[2].accept_length > 1


@each_generation
def test_drafts_that_the_grammar_allows_are_accepted(make_engine, task, generation):
    """The grammar follows the text that the drafter proposes."""
    prompt, text = task.prompts[0], task.expected[0]
    grammar = Grammar(lambda so_far: [text[len(so_far)], 95], lambda so_far: so_far == text[:-1])
    with make_engine("EXACT", topk=1, generation=generation, structured_output=True) as engine:
        request = engine.submit(prompt, matcher=Matcher(grammar))
        finish(engine)
    assert request.output_ids == text[:-1]
    assert request.finish_reason is FinishReason.STOP
    assert request.accepted_lengths[4] >= 2, "whole chains"
    assert request.matcher.calls["rollback"] >= 6


@each_generation
def test_an_unconstrained_batch_calls_no_matcher_and_is_overlapped(make_engine, task, generation):
    some = task.first(3)
    engine = make_engine(generation=generation, structured_output=True)
    requests = submit_all(engine, some, [None] * 3)
    engine.step()
    delivered = [len(request.output_ids) for request in requests]
    assert delivered == [1] * 3 if generation == "v2" else min(delivered) > 1
    finish(engine)
    assert outputs(requests) == some.expected


@pytest.mark.slow
@each_generation
@pytest.mark.parametrize("topk", [1, 2])
def test_sampled_text_is_the_same_in_every_generation_and_batch(
    make_engine, task, topk, generation
):
    def texts(count, generation):
        engine = make_engine(topk=topk, generation=generation, structured_output=True, seed=3)
        settings = SamplingParams(max_new_tokens=12, temperature=1.2, top_k=20, seed=7)
        names = ["turns", "even", "brackets"][:count]
        requests = [
            engine.submit(prompt, settings, matcher=Matcher(GRAMMARS[name]))
            for prompt, name in zip(task.prompts, names, strict=False)
        ]
        finish(engine)
        for request, name in zip(requests, names, strict=True):
            text = request.output_ids
            for end in range(len(text)):
                assert text[end] in GRAMMARS[name].allowed(text[:end])
        return outputs(requests)

    assert texts(1, "v1") == texts(3, generation)[:1]


def test_a_grammar_without_a_way_on_ends_its_request_alone(make_engine, task, constrained):
    """After four tokens no token is allowed, and the text is not complete."""
    dead_end = Grammar(lambda text: range(96) if len(text) < 4 else ())
    for generation, temperature in (("v1", 0.0), ("v2", 0.0), ("v2", 1.0)):
        engine = make_engine(topk=2, generation=generation, structured_output=True)
        sampling = SamplingParams(max_new_tokens=13, temperature=temperature)
        request = engine.submit(task.prompts[0], sampling, matcher=Matcher(dead_end))
        others = submit_all(engine, task.first(2), ["turns", None])
        finish(engine)
        assert request.finish_reason is FinishReason.REFUSED
        assert len(request.output_ids) == 4
        if temperature == 0:
            assert request.output_ids == task.expected[0][:4]
        assert others[0].output_ids == constrained(task.prompts[0], "turns", task.counts[0])
        assert others[1].output_ids == task.expected[1]


@each_generation
def test_stop_tokens_and_aborts_end_a_constrained_request(make_engine, task, generation):
    engine = make_engine(generation=generation, structured_output=True)
    stop = SamplingParams(max_new_tokens=30, stop_token_ids=range(10, 20))
    stopped = engine.submit(task.prompts[0], stop, matcher=Matcher(GRAMMARS["digits"]))
    aborted = engine.submit(task.prompts[1], matcher=Matcher(GRAMMARS["even"]))
    engine.step()
    engine.abort(aborted)
    finish(engine)
    assert (len(stopped.output_ids), stopped.finish_reason) == (1, FinishReason.STOP)
    assert aborted.finish_reason is FinishReason.ABORTED
    assert aborted.matcher.text == aborted.output_ids


@pytest.mark.parametrize("method", ["accept_token", "is_terminated"])
def test_a_matcher_may_abort_its_request(make_engine, task, method):
    engine = make_engine("NGRAM", structured_output=True)
    matcher = Matcher(Grammar(lambda text: range(VOCAB)))
    called, is_first = getattr(matcher, method), iter([True])

    def call_and_abort(*token):
        result = called(*token)
        if matcher.text and next(is_first, False):
            engine.abort(request)
        return result

    setattr(matcher, method, call_and_abort)
    request = engine.submit(task.prompts[0], matcher=matcher)
    finish(engine)
    assert request.finish_reason is FinishReason.ABORTED
    assert request.output_ids == matcher.text == task.expected[0][:1]


def test_a_matcher_that_fails_leaves_the_engine_usable(make_engine, task):
    class Failing(Matcher):
        def accept_token(self, token):
            if len(self.text) == 6:
                raise OSError("no more")
            return super().accept_token(token)

    matcher = Failing(Grammar(lambda text: range(VOCAB)))
    for generation in ("v1", "v2"):
        engine = make_engine("EXACT", generation=generation, structured_output=True)
        matcher.text.clear()
        request = engine.submit(task.prompts[0], matcher=matcher)
        with pytest.raises(OSError, match="no more"):
            finish(engine)
        assert matcher.text == request.output_ids, "a failed walk is taken back"
        engine.abort(request)
        other = engine.submit(task.prompts[1], SamplingParams(max_new_tokens=task.counts[1]))
        finish(engine)
        assert other.output_ids == task.expected[1]


@each_generation
def test_the_first_constrained_request_compiles_no_kernel(
    make_engine, task, monkeypatch, generation
):
    if make_engine.device != "cuda":
        pytest.skip("the torch references compile nothing")
    import triton

    engine = make_engine(generation=generation, batch_sizes=[1, 8], structured_output=True)
    engine.capture()
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **each: compiled.append(each["repr"])
    )
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(max_new_tokens=9, temperature=temperature)
        engine.submit(task.prompts[3], sampling, matcher=Matcher(GRAMMARS["even"]))
        finish(engine)
    torch.cuda.synchronize()
    assert compiled == []


def test_v3_gives_way_and_is_refused(make_engine):
    engine = make_engine(structured_output=True)
    assert engine.generation == "v2"
    assert "matchers of structured output run on the host" in engine.plan.reason
    with pytest.raises(ConfigError, match="'v3' cannot run: the matchers of structured output"):
        make_engine(structured_output=True, generation="v3")


def test_wrong_matchers_are_refused(make_engine):
    class Narrow(Matcher):
        def fill_next_token_bitmask(self, bitmask, index):
            raise RuntimeError("should be (rows, 8)")

    ended = Grammar(lambda text: [1], lambda text: True)
    nothing = Grammar(lambda text: [])
    cases = [
        (object(), "must be a graphkit.engine.TokenMatcher"),
        (Matcher(ended), "has terminated"),
        (Matcher(nothing), "allows none of the 96 tokens"),
        (Narrow(GRAMMARS["even"]), r"bitmask of 96 tokens, \[1, 3\] int32: should be \(rows, 8\)"),
    ]
    engine = make_engine(structured_output=True)
    for matcher, text in cases:
        with pytest.raises(InputError, match=text):
            engine.submit([1], matcher=matcher)
    assert not engine.has_work
    shared = Matcher(GRAMMARS["even"])
    engine.submit([1], matcher=shared)
    with pytest.raises(InputError, match="belongs to another request"):
        engine.submit([2], matcher=shared)
    with pytest.raises(InputError, match="structured_output=True"):
        make_engine().submit([1], matcher=Matcher(GRAMMARS["even"]))


def test_the_rows_of_a_tree():
    """0 -> 1 -> 3, 0 -> 2 -> 4, 0 -> 5; the grammar counts by one from any start, to 9."""
    grammar = Grammar(
        lambda text: [text[-1] + 1, 30] if text[-1] != 30 else [], lambda text: text[-1] == 9
    )
    matcher = Matcher(grammar)
    matcher.text = [6]
    tokens = torch.tensor([[6, 7, 8, 8, 9, 30]])
    child = torch.tensor([[1, 3, 4, -1, -1, -1]])
    sibling = torch.tensor([[-1, 2, 5, -1, -1, -1]])
    free, constrained = (
        Request(prompt_ids=(1,), sampling=SamplingParams(), context_limit=9, matcher=each)
        for each in (None, matcher)
    )
    links = child.repeat(2, 1), sibling.repeat(2, 1)
    batch = RunningBatch([free, constrained], torch.device("cpu"))
    rows = batch.tree_bitmask(tokens.repeat(2, 1), links, 31)
    pick = [1 << 7 | 1 << 30, 1 << 8 | 1 << 30, -1, 1 << 9 | 1 << 30, -1, -1]
    assert rows.flatten().tolist() == [-1] * 6 + pick
    assert matcher.text == [6]
    assert matcher.calls == {"fill": 4, "accept": 3, "rollback": 3}
    cyclic = torch.tensor([[0, 1, 2, 3, 4, 99]])
    batch = RunningBatch([constrained], torch.device("cpu"))
    assert len(batch.tree_bitmask(tokens, (cyclic, cyclic), 31)) == 6
    assert matcher.text == [6]
