"""Processors of logits: penalties, biases, least lengths and log-probabilities of requests.

The logits of the target are a table over tokens, so that greedy text repeats itself and most drafts
are right, unless a processor changes the text. ``random_engines.py`` has random settings.
"""

from __future__ import annotations

import math

import pytest
import torch

import graphkit as gk
from engine_runs import finish, refuses
from graphkit.engine import SamplingParams
from graphkit.engine.step import SpecStepInputs, SpecStepRunner
from graphkit.errors import ConfigError, InputError
from graphkit.ops.loop_layout import NO_LOGPROB
from random_engines import plain_text
from table_models import TopDrafter, table_engine, table_model

VOCAB, NEW, CONTEXT = 40, 24, 160
PROMPTS = [[3, 7], [5], [1, 2, 3, 4, 1, 2], [30], [8, 9]]
SETTINGS = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4, "presence_penalty": -1.0, "temperature": 0.9, "seed": 5},
    {"logit_bias": {4: 1.5, 11: -2.0, **dict.fromkeys(range(20, 32), -math.inf)}},
    {"logit_bias": {9: 3.0}, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"stop_token_ids": range(0, 32, 2), "min_tokens": 6},
    {"stop_token_ids": [7, 8, 9], "min_tokens": 24, "frequency_penalty": 2.0},
    {"repetition_penalty": 1.2, "temperature": 1.1, "top_k": 8, "seed": 9},
]


def params_of(setting, **more):
    return SamplingParams(**{"max_new_tokens": NEW, "logprobs": True} | setting | more)


@pytest.fixture(scope="module")
def table(device):
    return (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 2).to(device)


def expected(table, prompt, params):
    """The text by the formulas, in float64, and its log-probabilities."""
    rows = table.double().cpu().numpy()
    text, logprobs, certain = plain_text(
        lambda ids: rows[ids[-1]], prompt, params, params.max_new_tokens
    )
    assert certain == len(text), "a near tie: change the seed of the table"
    return text, logprobs


@pytest.mark.parametrize(("generation", "topk"), [("v1", 3), ("v2", 1), ("v3", 3)])
def test_texts_and_log_probabilities_are_those_of_the_formulas(table, generation, topk):
    """Requests with and without processors share batches and, one after the other, rows."""
    with table_engine(table, topk, generation=generation, max_batch_size=3) as engine:
        requests = [
            engine.submit(PROMPTS[number % len(PROMPTS)], params_of(setting))
            for number, setting in enumerate(SETTINGS * 2)
        ]
        finish(engine)
        assert engine.stats.accept_length > 1.2
    for request in requests:
        text, logprobs = expected(table, list(request.prompt_ids), request.sampling)
        assert request.output_ids == text
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_requests_without_log_probabilities_have_none(table):
    with table_engine(table, 1, generation="v3") as engine:
        (one,) = engine.generate([[3]], params_of({}, logprobs=False))
        (other,) = engine.generate([[3]], params_of({}))
    assert one.logprobs == []
    assert one.output_ids == other.output_ids
    assert len(other.logprobs) == NEW


@pytest.fixture
def runner(table, device):
    """A captured runner of two rows."""
    model = table_model(lambda inputs: table[inputs.input_ids], device, 2, CONTEXT)
    with SpecStepRunner(
        model,
        TopDrafter(table),
        spec=gk.SpecConfig("EAGLE", 3, 1, 4),
        sizes=gk.BufferSizes(2, CONTEXT, 8, VOCAB, torch.float32),
        batch_sizes=[2],
        device=device,
    ) as runner:
        slots = torch.arange(1, 1 + 2 * 80, device=device).view(2, 80).int()
        model.attention.req_to_token_pool.req_to_token[1:3, :80] = slots
        runner.capture()
        yield runner


def first_of(report):
    return int(report[0, 5]), report[0, 6:].view(torch.float32).tolist()


def test_steps_of_a_runner_have_log_probabilities(runner, table):
    """Of the request that has them, in the stream and in the report of ``admit``."""
    params = params_of(SETTINGS[6])
    text, logprobs = expected(table, [3, 7], params)
    token, first = first_of(runner.admit(1, [3, 7], params))
    report = runner.admit(2, [5], SamplingParams(max_new_tokens=NEW))
    assert report.shape == (1, 7)
    assert int(report[0, -1]) == NO_LOGPROB
    tokens, values = [token], [*first]
    for step in runner.launch([1, 2], max_steps=40):
        for each in step.requests:
            if each.req_pool_index == 1:
                tokens += each.tokens
                values += each.logprobs
            else:
                assert each.logprobs == ()
    assert tokens == text
    assert values == pytest.approx(logprobs, abs=1e-4)


def test_a_replay_reports_log_probabilities_behind_the_tokens(runner, table, device):
    params = params_of({})
    _, logprobs = expected(table, [3, 7], params)
    runner.admit(1, [3, 7], params)
    runner.admit(2, [5], SamplingParams())
    rows = torch.tensor([2, 1], device=device)
    report = runner.replay(SpecStepInputs(req_pool_indices=rows)).report.cpu()
    new = int(report[1, 2])
    assert report.shape == (2, 5 + 2 * 4)
    values = report[:, 9:].contiguous().view(torch.float32)[1, :new].tolist()
    assert values == pytest.approx(logprobs[1 : 1 + new], abs=1e-4)
    assert (report[0, 9:] == -1).all()


@pytest.mark.parametrize("setting", SETTINGS[2:9], ids=str)
def test_a_request_that_is_admitted_again_goes_on(setting, runner, table):
    """Its own output is not taken for a part of the prompt."""
    params = params_of(setting)
    text, _ = expected(table, [3, 7], params)
    tokens = [first_of(runner.admit(1, [3, 7], params))[0]]
    for step in runner.launch([1], max_steps=2):
        tokens += step.requests[0].tokens
    runner.release([1])
    left = NEW - len(tokens)
    if tokens == text:
        return
    again = runner.admit(
        1, [3, 7, *tokens], params, max_new_tokens=left, num_output_tokens=len(tokens)
    )
    tokens.append(int(again[0, 5]))
    for step in runner.launch([1], max_steps=40):
        tokens += step.requests[0].tokens if step.requests else ()
    assert tokens == text


@pytest.mark.parametrize("count", [-1, 2, 5, 1.0])
def test_more_output_than_text_is_refused(count, runner):
    with refuses((ConfigError, InputError), "num_output_tokens", "num_output_tokens"):
        runner.admit(1, [3, 7], num_output_tokens=count)


class Only:
    """A matcher that allows some tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def fill_next_token_bitmask(self, bitmask, index):
        words = [0] * bitmask.shape[1]
        for token in self.tokens:
            words[token // 32] |= 1 << token % 32
        bitmask[index] = torch.tensor(words).int()

    def accept_token(self, token):
        return token in self.tokens

    def rollback(self, count):
        """Do nothing."""

    def is_terminated(self):
        return False


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
def test_matchers_and_processors_constrain_together(table, generation, setting):
    """Log-probabilities are those of the tokens that the matcher allows."""
    allowed = range(1, 25)
    masked = table.clone()
    masked[:, 0], masked[:, 25:] = -torch.inf, -torch.inf
    params = params_of(setting)
    text, logprobs = expected(masked, [3, 7], params)
    with table_engine(table, 3, generation=generation, structured_output=True) as engine:
        other = engine.submit([5], params_of({}))
        request = engine.submit([3, 7], params, matcher=Only(allowed))
        finish(engine)
    assert request.output_ids == text
    assert request.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert other.output_ids == expected(table, [5], params_of({}))[0]


def test_the_ends_of_the_ranges_are_accepted():
    biases = dict.fromkeys(range(1024), -math.inf)
    params = SamplingParams(
        repetition_penalty=1e-3, presence_penalty=-2, frequency_penalty=2, logit_bias=biases,
        min_tokens=64,
    )  # fmt: skip
    assert params.logit_bias == biases
    assert hash(params) == hash(SamplingParams(**{name: getattr(params, name) for name in (
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"
    )}))  # fmt: skip
    with pytest.raises(TypeError, match="cannot change"):
        params.logit_bias[3] = 1.0
    assert SamplingParams(logit_bias={}) == SamplingParams()
    with refuses(ConfigError, "logit_bias", "float32 cannot hold the result"):
        SamplingParams(logit_bias={3: 3e38}, repetition_penalty=0.5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias has 40, but the vocabulary has 40"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, "excludes all 40 tokens"),
        ({"logit_bias": dict.fromkeys(range(30), -math.inf), "min_tokens": 1,
          "stop_token_ids": range(28, VOCAB)}, "excludes all 40 tokens"),
    ],
)  # fmt: skip
def test_biases_that_leave_no_token_are_refused(setting, message, table):
    with table_engine(table, 1) as engine, refuses(InputError, "logit_bias", message):
        engine.submit([3], SamplingParams(**setting))
