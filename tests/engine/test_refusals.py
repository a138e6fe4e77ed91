"""What an engine, a request and its parameters refuse: by table, with the field that is named."""

from __future__ import annotations

import math

import pytest

from engine_runs import each_generation, finish, refuses
from graphkit.engine import SamplingParams
from graphkit.errors import ConfigError, InputError, ReplayError

SAMPLING = {
    "temperature": [-0.1, math.nan, math.inf, "1", None, 10**400],
    "top_k": [-2, 2**31, 1.0, True, None],
    "top_p": [0, 1.1, -0.5, math.nan, "1", None, 10**400],
    "min_p": [-0.1, 1.1, math.nan, "0", None],
    "seed": [-1, 2**63, 1.0, True, "1"],
    "stop_token_ids": [5, None, [[5]], [3, -1], [3, 2**63], [3, 2**70], [-(2**70)], range(17)],
    "repetition_penalty": [0, -1.0, math.inf, math.nan, "1", None, 1e-50, 1e50],
    "presence_penalty": [-2.1, 2.1, math.nan, "0", None],
    "frequency_penalty": [-2.1, 2.1, math.nan, math.inf, None],
    "logit_bias": [[(1, 2.0)], {1: math.inf}, {1: math.nan}, {1: "2"}, {-1: 1.0}, {1.0: 1.0},
                   {"1": 1.0}, {True: 1.0}, dict.fromkeys(range(1025), 1.0), {1: 1e39}],
    "min_tokens": [-1, 65, 1.0, True, None],
    "logprobs": [1, 0, None, "yes"],
}  # fmt: skip
MESSAGES = {
    "temperature": "must be a finite number >= 0, got nan. Use 0 for greedy decoding",
    "seed": "must be an int from 0 to 2",
    "stop_token_ids": "must be a collection of token ids, got 5",
}
"""Of one of the values of some fields, as users often meet them."""


@pytest.mark.parametrize("field", SAMPLING)
def test_sampling_parameters(field):
    """At construction: in the middle of a step the error would affect the whole batch."""
    texts = []
    for value in SAMPLING[field]:
        with refuses(ConfigError, field, f"^SamplingParams.{field} "):
            try:
                SamplingParams(**{field: value})
            except ConfigError as error:
                texts.append(str(error))
                raise
    assert any(MESSAGES.get(field, "") in text for text in texts)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("generation", ["v4", "V2", 2], "generation must be 'v1', 'v2', 'v3'"),
        ("bos_token_id", ["a", -1, 96, 7.0, True], "must be None or a token id from 0 to 95, got"),
        ("seed", ["a", None, 1.0, True], r"SpeculativeEngine\.seed must be an int, got"),
        ("chunked_prefill_size", [0], "chunked_prefill_size must be an int >= 1, got 0"),
        ("max_context_len", [8], "max_context_len is 8, but two steps may write"),
    ],
)
def test_options_of_an_engine(make_engine, field, values, message):
    for value in values:
        with refuses(ConfigError, field, message):
            make_engine(**{field: value})


@pytest.mark.parametrize("generation", ["v1", "v2", "v3", None])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_recurrent_state_without_a_commit(make_engine, generation, topk):
    message = r"linear_attention is set, but the target has no commit.*would stay in it\. Pass"
    with refuses(ConfigError, "linear_attention", message):
        make_engine(linear_attention=True, generation=generation, topk=topk)


@pytest.mark.parametrize(
    ("prompt", "options", "field", "message"),
    [
        ([], {}, "prompt_ids", "empty.*bos_token_id"),
        ([4, 96], {}, "prompt_ids", r"contains token 96, but the vocabulary has 96 tokens\. Use"),
        ([-1], {}, "prompt_ids", "contains token -1"),
        ([1.5], {}, "prompt_ids", "float"),
        *(([1], {"sampling": value}, "sampling", "sampling must be a graphkit")
          for value in (5, {}, "greedy", SamplingParams, 0)),
        *(([1], {"sampling": SamplingParams(stop_token_ids=[95, token])}, "stop_token_ids",
           f"has {token}, but the vocabulary has 96") for token in (96, 2**63 - 1)),
    ],
    ids=str,
)  # fmt: skip
def test_requests(make_engine, prompt, options, field, message):
    engine = make_engine()
    for call in (
        lambda: engine.submit(prompt, **options),
        lambda: engine.generate([[1], prompt], **options),
    ):
        with refuses(InputError, field, message):
            call()
    assert not engine.has_work, "the caller has no handle of the other request"


@each_generation
def test_other_requests_go_on(make_engine, task, generation):
    engine = make_engine(generation=generation)
    request = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=13))
    with refuses(InputError, "stop_token_ids"):
        engine.submit([1], SamplingParams(stop_token_ids=[96]))
    finish(engine)
    assert request.output_ids == task.expected[0]


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts_that_are_no_sequence(make_engine, prompts):
    with refuses(InputError, "prompts", r"generate got .*expected a sequence"):
        make_engine().generate(prompts)


def test_too_long_a_prompt(make_engine):
    engine = make_engine(max_context_len=40)
    limit = engine.context_limit
    with refuses(InputError, "prompt_ids", f"has {limit} tokens.*limited to {limit}"):
        engine.submit([1] * limit)
    assert not engine.has_work


@pytest.mark.parametrize("progress", [None, "log", 5])
def test_a_progress_that_is_not_callable(make_engine, progress):
    with refuses(ConfigError, "progress", r"capture\.progress must be a function"):
        make_engine().capture(progress)


@each_generation
def test_calls_of_a_closed_engine(make_engine, task, generation):
    """No forward runs."""
    calls = []
    engine = make_engine(target=lambda model, attention: calls.append, generation=generation)
    engine.submit(task.prompts[0])
    engine.close()
    for call in (engine.step, engine.capture, lambda: engine.submit([1])):
        with pytest.raises(ReplayError, match=r"the engine is closed.*Create a new engine"):
            call()
    engine.close()
    assert not calls
