"""``graphkit generate``: the text on stdout, the measurements on stderr, or one record."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from graphkit.engine import SpeculativeEngine
from graphkit.engine.step import SpecStepRunner
from graphkit.errors import ReplayError
from graphkit.graphs import RecorderBackend
from graphkit.models.reference import ALGORITHMS, default_checkpoint
from graphkit.records import GenerateRecord

PLAIN = ("--algorithm", "none", "--eager")
"""The fastest settings."""


@pytest.fixture
def generate(run):
    """Return ``generate(argument, ...)``, which generates eight tokens by default."""

    def command(*arguments):
        tokens = () if "--max-new-tokens" in arguments else ("--max-new-tokens", 8)
        return run("generate", *arguments, *tokens)

    return command


@pytest.fixture
def recorded(generate):
    """Return ``recorded(argument, ...)``, which returns the record."""

    def command(*arguments):
        ended = generate(*arguments, "--json")
        assert (ended.code, ended.err.strip()) == (0, "")
        return GenerateRecord.from_json(ended.out)

    return command


@pytest.fixture(scope="module")
def known_texts():
    """Texts that tests share."""
    return {}


@pytest.fixture
def plain_text(recorded, known_texts):
    """The text of the fastest settings, which the first test generates."""
    if not known_texts:
        known_texts[PLAIN] = recorded(*PLAIN, "--prompt", "import os\n").text
    return known_texts[PLAIN]


@pytest.fixture
def piped(monkeypatch):
    """Return ``piped(data)``, which makes stdin a pipe with these bytes."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture(scope="session")
def constant_model(tmp_path_factory):
    """Return ``constant_model(byte)``: a checkpoint that generates only this byte."""
    changes = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    small = AutoConfig.from_pretrained(default_checkpoint(), **changes)

    def folder(byte):
        path = tmp_path_factory.mktemp("constant")
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
            model.model.embed_tokens.weight.fill_(1)
            model.model.norm.weight.fill_(1)
            model.lm_head.weight[byte] = 1
        model.save_pretrained(path)
        return path

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *[("--algorithm", name) for name in ALGORITHMS],
        ("--topk", "2"),
        ("--algorithm", "NGRAM", "--topk", "2", "--num-draft-tokens", "5"),
        ("--generation", "v1"),
        ("--generation", "v2"),
        ("--generation", "v3", "--steps-per-launch", "3"),
    ],
    ids=" ".join,
)
def test_all_settings_give_the_same_text_and_count_their_replays(recorded, plain_text, options):
    record = recorded(*options, "--prompt", "import os\n")
    assert record.text == plain_text
    assert record.backend == "recorder"
    (generation,) = {"v1", "v2"} & set(options) or {"v3"}
    assert record.generation == generation
    assert record.replays
    assert all(record.replays.values())
    assert record.fallbacks == {}
    assert record.capture_seconds > 0
    assert record.new_tokens == 8
    assert record.tokens_per_second == record.new_tokens / record.seconds
    assert 1 <= record.accept_length <= record.num_draft_tokens
    lengths = record.accepted_lengths
    assert sum(n * lengths[n] for n in lengths) / sum(lengths.values()) == record.accept_length


@pytest.mark.slow
def test_json_has_the_measurements_at_the_top_level(generate):
    body = json.loads(generate("--prompt", "import os\n", "--json").out)
    fields = {"text", "accept_length", "tokens_per_second", "replays", "fallbacks"}
    assert fields <= set(body)
    assert (body["algorithm"], body["topk"], body["num_steps"], body["num_draft_tokens"]) == (
        "EAGLE", 1, 3, 4,
    )  # fmt: skip


def test_eager_captures_nothing_and_reports_the_fallbacks(recorded):
    record = recorded(*PLAIN, "--prompt", "import os\n")
    assert record.capture_seconds is None
    assert record.replays == {"STEP": 0}
    assert record.fallbacks == {"STEP": {"not captured": 7}}


def test_a_launch_runs_as_many_steps_as_asked(recorded, monkeypatch):
    launches, launch = [], SpecStepRunner.launch

    def counted(*arguments, **options):
        launches.append(options["max_steps"])
        return launch(*arguments, **options)

    monkeypatch.setattr(SpecStepRunner, "launch", counted)
    arguments = ("--algorithm", "none", "--prompt", "import os\n", "--steps-per-launch", "3")
    assert recorded(*arguments).replays == {"STEP": 7}, "the first token comes from the prefill"
    assert launches == [3, 3, 3], "seven steps follow the first token"


@pytest.mark.slow
@pytest.mark.parametrize("refusal", ["", "cuda-bindings are not installed"])
def test_v3_runs_by_default_where_the_device_can_loop(generate, monkeypatch, refusal):
    monkeypatch.setattr(RecorderBackend, "no_loop_reason", refusal)
    arguments = (*PLAIN, "--prompt", "import os\n")
    ended = generate(*arguments, "--json")
    warning = f"warning: The engine runs no device loops: {refusal}. It runs generation v2.\n"
    assert ended.err == (warning if refusal else "")
    assert GenerateRecord.from_json(ended.out).generation == ("v2" if refusal else "v3")
    asked = generate(*arguments, "--generation", "v3")
    assert asked.code == (2 if refusal else 0)
    if refusal:
        assert asked.error == f"error: generation 'v3' cannot run: {refusal}."


@pytest.mark.slow
def test_a_pipe_gets_only_the_text(generate, recorded):
    arguments = (*PLAIN, "--prompt", "import os\n")
    ended = generate(*arguments)
    assert ended.code == 0
    assert ended.out == recorded(*arguments).text + "\n"
    assert "\x1b" not in ended.err
    facts = dict(line.split("  ", 1) for line in ended.err.splitlines() if line[0] != " ")
    assert list(facts) == [
        "algorithm", "device", "output", "ended by", "speed", "accept length", "accepted", "graphs",
        "without a graph",
    ]  # fmt: skip
    assert facts["without a graph"].strip() == "STEP: 7 runs, not captured"


@pytest.mark.slow
def test_several_prompts_keep_their_order(generate, recorded):
    arguments = (*PLAIN, "--prompt", "import os\n", "--prompt", "class A", "--prompt", "")
    record = recorded(*arguments)
    assert [each.prompt for each in record.completions] == ["import os\n", "class A", ""]
    assert [each.tokens for each in record.completions] == [8, 8, 8]
    assert record.completions[1].text == recorded(*PLAIN, "--prompt", "class A").text
    assert record.text == record.completions[0].text
    assert record.new_tokens == 24
    assert record.fallbacks["STEP"]["not captured"] < 24, "they share steps"
    assert generate(*arguments).out == "\n".join(f"{each.text}\n" for each in record.completions)


def test_more_prompts_than_the_largest_batch_are_all_completed(recorded, constant_model):
    prompts = [each for number in range(40) for each in ("--prompt", str(number))]
    record = recorded(
        *PLAIN, "--checkpoint", constant_model(120), *prompts, "--max-new-tokens", "2"
    )
    assert [each.text for each in record.completions] == ["xx"] * 40


@pytest.mark.slow
def test_a_seed_makes_sampling_reproducible(recorded):
    arguments = (*PLAIN, "--prompt", "import os\n", "--temperature", "2", "--seed")
    assert recorded(*arguments, "1").text == recorded(*arguments, "1").text
    assert len({recorded(*arguments, seed).text for seed in "123"}) > 1


def test_the_stop_token_is_left_out_of_the_text(recorded, constant_model):
    record = recorded("--algorithm", "ngram", "--checkpoint", constant_model(0), "--prompt", "a")
    assert record.text == ""
    assert (record.completions[0].finish_reason, record.new_tokens) == ("stop token", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "data", "prompt"),
    [
        (("--prompt", "-"), b"a\n", "a\n"),
        ((), b"a\n", "a\n"),
        ((), b"", "def read(self, size=-1):\n"),
        (("--prompt", "-"), b"", ""),
        ((), b"\xff\xc3", "\ufffd\ufffd"),
        (("--prompt", "b"), b"a", "b"),
        (("--prompt", "\udcff"), b"", "\ufffd"),
    ],
)
def test_prompts_come_from_options_or_from_stdin(recorded, piped, options, data, prompt):
    piped(data)
    assert [each.prompt for each in recorded(*PLAIN, *options).completions] == [prompt]


def test_without_stdin_and_prompt_the_default_prompt_is_used(recorded, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert recorded(*PLAIN).completions[0].prompt == "def read(self, size=-1):\n"


def test_the_help_names_every_algorithm(run):
    text = " ".join(run("generate", "--help").out.split())
    assert f"{', '.join(ALGORITHMS[:-1])} or {ALGORITHMS[-1]}" in text
    assert "prefill included, loading and capture left out" in text


@pytest.mark.slow
def test_text_arrives_during_a_launch(generate, monkeypatch):
    """The recorder runs a launch step by step, so that text appears as early as in v2."""
    arrived, step = [], SpeculativeEngine.step

    def counted(engine):
        new_tokens = step(engine)
        arrived.append(sum(len(tokens) for _, tokens in new_tokens))
        return new_tokens

    monkeypatch.setattr(SpeculativeEngine, "step", counted)
    assert generate("--algorithm", "none", "--prompt", "import os\n").code == 0
    assert arrived == [2, 1, 1, 1, 1, 1, 1], "the token of the prefill comes with the first step"


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_interruption_closes_the_engine_and_ends_the_line(generate, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    engines, step = [], SpeculativeEngine.step

    def interrupted(engine):
        engines.append(engine)
        if len(engines) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(SpeculativeEngine, "step", interrupted)
    ended = generate("--algorithm", "none", "--prompt", "import os\n")
    assert (ended.code, ended.error) == (130, "error: interrupted")
    assert ended.out.endswith("\n") if is_terminal else ended.out == ""
    with pytest.raises(ReplayError, match="closed"):
        engines[0].submit([1])


@pytest.mark.parametrize("prompts", [("a",), ("a", "b")])
def test_a_terminal_gets_dimmed_prompts_and_escaped_control_characters(
    generate, monkeypatch, constant_model, prompts
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    options = [each for prompt in prompts for each in ("--prompt", prompt)]
    ended = generate(
        *PLAIN, "--checkpoint", constant_model(0x1B), *options, "--max-new-tokens", "2"
    )
    lines = [f"\x1b[2m{prompt}\x1b[0m\\x1b\\x1b\n" for prompt in prompts]
    assert (ended.code, ended.out) == (0, "\n".join(lines))


def test_json_on_a_terminal_is_only_the_record(recorded, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert recorded(*PLAIN, "--prompt", "a").new_tokens == 8


def test_a_closed_stdin_is_a_usage_error(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    ended = generate("--prompt", "-")
    assert (ended.code, ended.out) == (2, "")
    assert "cannot read a prompt from stdin" in ended.error
