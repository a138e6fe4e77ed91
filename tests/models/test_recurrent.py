"""Recurrent layers: known ones run all rows in one call, others node by node."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from draft_choices import force_variant
from graphkit import models
from graphkit.models import fused_mixer, recurrent, scans
from graphkit.models.fused_mixer import FusedMixer
from graphkit.models.recurrent import PooledMixer, ScannedMixer
from small_models import small_model

WIDTH = 4


KNOWN = [
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba",
    "falcon_mamba", "jamba", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h",
    "zamba2", "lfm2", "lfm2_moe", "lfm3",
]  # fmt: skip


FUSED = [
    "qwen3_next", "qwen3_5_text", "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2",
]  # fmt: skip
"""Those that run in five launches."""


def mixers(loaded, kind=PooledMixer):
    forwards = (vars(module).get("forward") for module in loaded.model.modules())
    return [forward for forward in forwards if isinstance(forward, kind)]


def load_unknown(kind, dtype=torch.float32):
    """Return a model whose mixers graphkit takes for unknown ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "known_mixer", lambda *_: None)
        return models.load(small_model(kind).to(dtype), device="cpu")


def generate_all(loaded, prompts, new_tokens=8, **options):
    with loaded.engine(
        num_draft_tokens=WIDTH, max_batch_size=8, max_context_len=128, generation="v1", **options
    ) as engine:
        requests = engine.generate([*prompts], gk.SamplingParams(max_new_tokens=new_tokens))
    return [request.output_ids for request in requests]


def generate(loaded, prompt, **options):
    (ids,) = generate_all(loaded, [prompt], **options)
    return ids


def prompt_of(length):
    return torch.randint(
        3, 128, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def plain_text(loaded, prompt, new_tokens=8):
    ids = loaded.original.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()


def prefill_calls(loaded, lengths, monkeypatch, **options):
    """Return the requests and nodes of each call of the first mixer until the first tokens."""
    mixer, calls = mixers(loaded)[0], []
    forward = mixer._forward

    def counted(rows, **others):
        calls.append(tuple(rows.shape[:2]))
        return forward(rows, **others)

    with monkeypatch.context() as patch:
        patch.setattr(mixer, "_forward", counted)
        generate_all(loaded, map(prompt_of, lengths), new_tokens=1, **options)
    return calls


@pytest.fixture(scope="module")
def qwen3_next():
    return load_unknown("qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KNOWN)
def test_known_mixers_run_all_rows_in_one_call(kind, dtype, monkeypatch):
    loaded = models.load(small_model(kind).to(dtype), device="cpu", check=dtype == torch.float32)
    assert not mixers(loaded)
    assert bool(mixers(loaded, FusedMixer)) == (kind in FUSED)
    names = {layer.name for layer in loaded.layout.recurrent}
    assert kind not in FUSED or not names & {*loaded.layout.torch_products}
    mixer, calls = mixers(loaded, (FusedMixer, ScannedMixer))[0], []
    forward = type(mixer).__call__

    def counted(self, hidden_states, **others):
        if self is mixer:
            calls.append(hidden_states.shape[1])
        return forward(self, hidden_states, **others)

    monkeypatch.setattr(type(mixer), "__call__", counted)
    generate_all(loaded, map(prompt_of, (9, 4)), new_tokens=2)
    assert calls == [13, 2 * WIDTH]


def test_prompts_are_cut_at_multiples_of_64(monkeypatch):
    """Kernels begin a chunk there, so that the bits do not depend on the cuts."""
    loaded = models.load(small_model("qwen3_next"), device="cpu")
    calls = []
    forward = FusedMixer.__call__

    def counted(self, hidden_states, **others):
        calls.append(hidden_states.shape[1])
        return forward(self, hidden_states, **others)

    monkeypatch.setattr(FusedMixer, "__call__", counted)
    for lengths, expected in [([112], [64, 48]), ([100, 112], [64, 36 + 64, 48])]:
        calls.clear()
        generate_all(loaded, map(prompt_of, lengths), new_tokens=1, chunked_prefill_size=100)
        assert calls == expected


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["one request", "several"])
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "mamba", "lfm2"])
def test_prompts_replay_graphs_of_their_number_of_tokens(kind, skips, monkeypatch):
    """States begin with zeros, follow the chunks, and are those of eager prompts."""
    for attention in (gk.SdpaAttention, gk.TritonAttention):
        monkeypatch.setattr(attention, "skips_absent_rows", skips)
    loaded = models.load(small_model(kind), device="cpu")
    prompts = [prompt_of(length) for length in (37, 5, 90, 37, 100, 7)]
    options = {"max_batch_size": 4, "max_context_len": 120, "chunked_prefill_size": 72}
    texts, sampling = [], gk.SamplingParams(max_new_tokens=4)
    for sizes in ((), (8, 72)):
        with loaded.engine(algorithm="NONE", prefill_sizes=sizes, **options) as engine:
            engine.capture()
            texts += [[request.output_ids for request in engine.generate(prompts, sampling)]]
            graphs = engine._spec_step.prompts
            if sizes:
                assert set(graphs.stats.replays_by_size) == set(sizes)
                assert (graphs._most_requests > 1) is skips
    assert texts[0] == texts[1]


def test_prompts_of_unknown_mixers_have_no_graphs(qwen3_next):
    with qwen3_next.engine(algorithm="NONE", max_context_len=64, prefill_sizes=(8,)) as engine:
        assert engine._spec_step.prompts is None


def test_a_mixer_that_differs_with_five_launches_runs_its_own_forward(monkeypatch, caplog):
    found = fused_mixer._beta_columns

    def scaled(*args):
        scale, columns = found(*args)
        return 1.02 * scale, columns

    monkeypatch.setattr(fused_mixer, "_beta_columns", scaled)
    loaded = models.load(small_model("qwen3_next"), device="cpu")
    assert len(mixers(loaded, ScannedMixer)) == 1
    assert "differs from itself" in caplog.text
    text = loaded.layout.replaced["model.layers.0.linear_attn"]
    assert text == "itself with graphkit::causal_conv and graphkit::linear_scan"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_delta_rule", "_convolve"])
def test_a_mixer_that_differs_from_itself_runs_node_by_node(name, monkeypatch, caplog):
    own = getattr(scans, name)

    def differing(*args, **kwargs):
        out = own(*args, **kwargs)
        return (out[0] * 1.01, out[1]) if name == "_delta_rule" else out * 1.01

    table = "_SCANS" if name == "_delta_rule" else "_CONVOLUTIONS"
    changed = {n: differing if f is own else f for n, f in getattr(scans, table).items()}
    monkeypatch.setattr(scans, table, changed)
    loaded = models.load(small_model("qwen3_next"), device="cpu")
    assert len(mixers(loaded)) == 1
    assert (
        "runs node by node or unfused: with graphkit's scan it differs from itself" in caplog.text
    )
    assert generate(loaded, prompt_of(20)) == plain_text(loaded, prompt_of(20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "mamba", "lfm2"])
def test_the_states_after_a_prompt_have_the_same_bits_in_any_chunks(kind):
    loaded = models.load(small_model(kind), device="cpu")
    texts = {
        chunk: generate_all(loaded, map(prompt_of, (60, 33)), chunked_prefill_size=chunk)
        for chunk in (512, 40, 7)
    }
    assert texts[40] == texts[7] == texts[512]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "granitemoehybrid", "mamba"])
def test_a_prompt_of_several_chunks_gives_the_text_of_transformers(kind):
    loaded = models.load(small_model(kind), device="cpu")
    prompt = prompt_of(90)
    assert generate(loaded, prompt, chunked_prefill_size=32) == plain_text(loaded, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 40])
@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2", "mamba"])
def test_prompts_of_any_lengths_together_give_the_text_of_transformers(kind, chunk):
    loaded = models.load(small_model(kind), device="cpu")
    prompts = [prompt_of(length) for length in (37, 2, 21, 5, 1, 37, 6)]
    texts = generate_all(loaded, prompts, chunked_prefill_size=chunk)
    assert texts == [plain_text(loaded, prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
def test_the_first_chunk_of_a_prompt_is_one_call(kind, monkeypatch):
    loaded = load_unknown(kind)
    assert prefill_calls(loaded, [60, 3, 1], monkeypatch) == [(1, 60), (1, 3), (1, 1)]
    later = prefill_calls(loaded, [40], monkeypatch, chunked_prefill_size=20)
    assert later == [(1, 20), *[(1, 1)] * 20]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zamba", "mamba", "qwen3_next", "falcon_h1", "bamba"])
def test_unknown_mixers_give_the_text_of_transformers(kind, dtype):
    """Those of mamba ignore the states before several tokens."""
    loaded = load_unknown(kind, dtype)
    prompts = [prompt_of(length) for length in (37, 2, 40)]
    texts = generate_all(loaded, prompts, chunked_prefill_size=40)
    if dtype == torch.float32:
        assert texts == [plain_text(loaded, prompt) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v3"])
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "lfm2", "qwen3_next, unknown"])
def test_rows_that_are_divided_change_no_text(kind, generation):
    """Requests have different numbers of nodes; the states of rejected ones are never committed."""
    name, _, is_unknown = kind.partition(", ")
    loaded = load_unknown(name) if is_unknown else models.load(small_model(name), device="cpu")
    prompts = [2 * prompt_of(length) for length in (3, 5, 7, 9)]
    expected = [plain_text(loaded, prompt, 24) for prompt in prompts]
    with loaded.engine(
        algorithm="NGRAM", num_steps=(0, WIDTH), max_batch_size=4, max_context_len=128,
        generation=generation, batch_sizes=[4], steps_per_launch=1,
    ) as engine:  # fmt: skip
        engine.capture()
        requests = [
            engine.submit(prompt, gk.SamplingParams(max_new_tokens=24)) for prompt in prompts
        ]
        for turn in range(1000):
            if not engine.has_work:
                break
            force_variant(engine, turn % 4)
            engine.step()
        assert [request.output_ids for request in requests] == expected
        assert {1, 2, 3} & set(engine.stats.drafted_lengths), "requests have different drafts"
        assert engine.stats.num_accepted_tokens > engine.stats.num_verifies
