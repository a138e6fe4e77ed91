"""Settings that ``graphkit generate`` refuses: one line on stderr, and the exit code."""

from __future__ import annotations

import sys

import pytest

from graphkit.models.reference import default_checkpoint


@pytest.mark.parametrize(
    ("code", "options", "text"),
    [
        (2, ("--topk", "0"), "SpecConfig.topk must be an int >= 1, got 0"),
        (2, ("--num-draft-tokens", "7"), "SpecConfig.num_draft_tokens is 7"),
        (
            2,
            ("--num-steps", "-1", "--num-draft-tokens", "4"),
            "SpecConfig.num_steps must be an int",
        ),
        (2, ("--algorithm", "multi_layer_eagle", "--num-steps", "9"), "num_steps is 9"),
        (2, ("--algorithm", "medusa"), "NONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, STANDALONE"),
        (2, ("--steps-per-launch", "0"), "SpeculativeEngine.steps_per_launch must be an int >= 1"),
        (2, ("--max-new-tokens", "0"), "SamplingParams.max_new_tokens must be an int >= 1, got 0"),
        (2, ("--temperature", "nan"), "SamplingParams.temperature must be a finite number"),
        (2, ("--temperature", "-1"), "got -1.0"),
        (2, ("--prompt", "x" * 2000), "a prompt has 2000 tokens, but prompt and output together"),
        (2, ("--algorithm", "EAGLE", "--checkpoint", str(default_checkpoint())), "or use one of"),
        (2, ("--draft", "nowhere"), "--draft applies to a --checkpoint. Give one."),
        (2, ("--dtype", "bfloat16"), "--dtype applies to a --checkpoint. Give one."),
        (2, ("--chat",), "tokens are bytes has no chat template"),
        (2, ("--max-context-len", "1025"), "the target has contexts of 1 to 1024 tokens"),
        (2, ("--max-context-len", "9"), "BufferSizes.max_context_len is 9"),
        (2, ("--page-size", "0"), "page_size must be an int >= 1, got 0"),
        (2, ("--top-k", "-2"), "SamplingParams.top_k"),
        (2, ("--top-p", "0"), "SamplingParams.top_p"),
        (2, ("--min-p", "nan"), "SamplingParams.min_p"),
        (2, ("--repetition-penalty", "0"), "SamplingParams.repetition_penalty"),
        (2, ("--presence-penalty", "-3"), "SamplingParams.presence_penalty"),
        (2, ("--frequency-penalty", "nan"), "SamplingParams.frequency_penalty"),
        (2, ("--min-tokens", "129"), "SamplingParams.min_tokens is 129, but max_new_tokens is 128"),
        (2, ("--stop", ""), "a stop string is empty"),
        (2, ("--prompts", "nowhere"), "cannot read the prompts in nowhere: No such file"),
        (2, ("--algorithm", "NONE", "--checkpoint", "nowhere"), "nowhere has no config.json"),
        (3, ("--device", "cuda"), "no CUDA device for device='cuda'"),
    ],
)
def test_an_impossible_setting_is_refused_on_one_line(run, code, options, text):
    prompt = () if "--prompt" in options else ("--prompt", "a")
    ended = run("generate", *prompt, *options)
    assert (ended.code, ended.out) == (code, "")
    assert text in ended.error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--topk", "x"), ("--seed", "-1"), ("--seed", str(2**63)), ("--seed", "1.5"),
        ("--generation", "v4"), ("--device", "tpu"), ("--max-new-tokens", "1.5"), ("text",),
        ("--max-context-len", "0"), ("--dtype", "int8"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_argument_that_cannot_be_parsed_is_a_usage_error(run, arguments):
    ended = run("generate", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "usage: graphkit" in ended.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--prompt", "-", "--prompt", "-"), "stdin can be read once"),
        (("--prompt", "-"), "cannot read a prompt from stdin"),
    ],
)
def test_a_closed_stdin_is_a_usage_error(run, monkeypatch, options, text):
    monkeypatch.setattr(sys, "stdin", None)
    ended = run("generate", *options)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.error
