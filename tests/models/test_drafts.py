"""Draft models of any target of transformers change nothing in its text, greedy or sampled."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from drafted_models import CASES, head_config, with_head
from graphkit import models
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import HeadSources
from small_models import small_model

PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14
SAMPLED = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory):
    return CASES[request.param](tmp_path_factory.mktemp("draft"))


def texts(loaded, *sampling, **options):
    """Return the tokens of each prompt, for each of some sampling parameters."""
    options.setdefault("num_steps", loaded.spec(options.get("algorithm")).num_steps)
    with loaded.engine(max_batch_size=4, max_context_len=64, batch_sizes=[4], **options) as engine:
        engine.capture()
        found = [
            [request.output_ids for request in engine.generate(PROMPTS, each)] for each in sampling
        ]
        assert all(not runner.stats.fallbacks for runner in engine.runners)
        return found


@pytest.fixture(scope="module")
def expected(loaded):
    """The greedy text of transformers, and the seeded text of plain decoding."""
    greedy = [
        loaded.original.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    return [greedy, *texts(loaded, SAMPLED, algorithm="NONE")]


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_the_text_does_not_depend_on_the_draft_model(loaded, expected, generation, topk):
    greedy = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
    assert texts(loaded, greedy, SAMPLED, generation=generation, topk=topk) == expected


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["eagle3", "mtp-chain"], indirect=True)
def test_small_pools_preempt_requests_and_change_no_text(loaded, expected, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    with loaded.engine(
        num_steps=loaded.spec().num_steps, max_batch_size=3, max_context_len=64,
        batch_sizes=[3], kv_slots=63, page_size=4, generation="v3", steps_per_launch=1,
    ) as engine:  # fmt: skip
        engine.capture()
        assert engine.memory.total_slots == 64
        greedy = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
        for sampling, text in zip((greedy, SAMPLED), expected, strict=True):
            assert [each.output_ids for each in engine.generate(PROMPTS, sampling)] == text
        assert engine.stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaded", ["standalone", "eagle3", "mtp-chain", "assistant"], indirect=True
)
def test_every_mode_is_captured_and_audits_clean(loaded):
    target = loaded.target(max_batch_size=4, max_context_len=64, topk=2)
    drafting = loaded.draft.modes
    assert {*target.modes} > {*drafting}
    report = gk.audit_target(target, batch_sizes=[4])
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_the_draft_model_selects_the_algorithm(loaded, request):
    case = request.node.callspec.params["loaded"]
    expected = {"standalone": "STANDALONE", "eagle3": "EAGLE3", "mtp-chain": "MULTI_LAYER_EAGLE"}
    assert loaded.algorithm == expected.get(case, "EAGLE")


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt2"])
def test_a_head_reads_the_streams_of_its_target(kind, tmp_path):
    loaded = with_head(kind, tmp_path, Eagle3Head, aux_layers=(1, 0, 2), draft_vocab_size=96)
    verify = gk.ForwardMode.TARGET_VERIFY
    target = loaded.target(max_batch_size=2, max_context_len=64)
    slots = target.attention[verify].req_to_token_pool.req_to_token[1, :4]
    ids = torch.tensor([5, 17, 3, 17])
    batch = gk.TargetVerifyInputs(
        req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([0], dtype=torch.int32),
        input_ids=ids, positions=torch.arange(4), out_cache_loc=slots.long(),
    )  # fmt: skip
    found = target.runner(verify, device="cpu").fall_back(batch).hidden_states
    last = []
    layers = getattr(loaded.original.base_model, "layers", None) or loaded.original.base_model.h
    layers[-1].register_forward_hook(lambda _, args, output: last.append(output))
    states = loaded.original(ids[None], output_hidden_states=True).hidden_states
    streams = (states[1], states[0], last[0] if torch.is_tensor(last[0]) else last[0][0])
    torch.testing.assert_close(found, torch.cat(streams, -1)[0])


def test_a_head_of_another_target_is_refused_in_a_line(tmp_path):
    with_head("llama", tmp_path / "head", EagleHead)
    for changes in ({"hidden_size": 32}, {"vocab_size": 96}):
        (name,) = changes
        with pytest.raises(CheckpointError, match=f"draft head has {name}") as caught:
            models.load(small_model("llama", **changes), draft=tmp_path / "head", device="cpu")
        assert "\n" not in str(caught.value)


def test_a_head_for_deeper_targets_is_refused(tmp_path):
    with_head("llama", tmp_path, Eagle3Head, aux_layers=(0, 1, 2), draft_vocab_size=96)
    shallow = small_model("llama", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="inputs of target layers 0, 1, 2, but the target"):
        models.load(shallow, draft=tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "does not exist"),
        ({"config.json": b"{}"}, "contains none of model.safetensors"),
        ({"model.safetensors": b"damaged"}, "contains no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"abc"}, "is not a file of PyTorch tensors"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path, written, message):
    folder = tmp_path / "draft"
    for name, content in written.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        models.load(small_model("llama"), draft=folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_heads_may_be_passed_as_modules():
    model = small_model("llama")
    target = HeadSources(model.get_input_embeddings(), model.lm_head, 2)
    head = EagleHead(head_config(model), target).requires_grad_(False)
    assert models.load(model, draft=head, device="cpu").draft.module is head
    with pytest.raises(ConfigError, match="expected a folder with an EAGLE"):
        models.load(small_model("llama"), draft=torch.nn.Linear(2, 2), device="cpu")


def test_a_draft_model_with_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocabulary of 96 tokens, but LlamaForCausalLM has 128"):
        models.load(small_model("llama"), draft=small_model("qwen3", vocab_size=96), device="cpu")


def test_a_recurrent_draft_model_is_refused():
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent states"):
        models.load(small_model("llama"), draft=small_model("qwen3_next"), device="cpu")


def test_an_algorithm_of_another_kind_is_refused():
    draft, message = small_model("llama", 1), "EAGLE needs a draft model of its kind. Load one"
    with pytest.raises(ConfigError, match=f"{message}, or use one of STANDALONE, NGRAM, NONE"):
        models.load("no folder", draft=draft, algorithm="eagle", device="cpu")
    with pytest.raises(ConfigError, match=f"{message}, or use one of NGRAM, NONE"):
        models.load("no folder", algorithm="EAGLE", device="cpu")


def test_a_draft_model_bounds_the_context():
    draft = small_model("opt", max_position_embeddings=48)
    loaded = models.load(small_model("llama"), draft=draft, device="cpu", check=False)
    assert loaded.longest_context == 48
    assert loaded.engine().sizes.max_context_len == 48


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2, (0, 2)])
@pytest.mark.parametrize("generation", ["v1", "v3"])
def test_more_branches_than_draft_tokens_are_refused_at_construction(
    tmp_path, num_steps, generation
):
    options = {"aux_layers": (0, 1, 2), "draft_vocab_size": 8}
    loaded = with_head("qwen3_moe", tmp_path, Eagle3Head, **options)
    options = {"num_steps": num_steps, "num_draft_tokens": 4, "max_context_len": 128}
    loaded.engine(topk=8, generation=generation, **options).close()
    with pytest.raises(
        ConfigError, match="topk is 9, but the draft vocabulary has 8 tokens"
    ) as got:
        loaded.engine(topk=9, generation=generation, **options)
    assert got.value.field == "topk"


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [(0, 1, 3), (1, 3), [1, 2], range(4)], ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_a_chain_of_mtp_layers_drafts_several_lengths(mtp_chain, num_steps, generation):
    options = {"max_batch_size": 2, "max_context_len": 64, "generation": generation}
    sampling = gk.SamplingParams(max_new_tokens=9)
    with mtp_chain.engine(algorithm="NONE", **options) as engine:
        plain = [request.output_ids for request in engine.generate(PROMPTS[:2], sampling)]
    with mtp_chain.engine(num_steps=num_steps, **options) as engine:
        drafted = [request.output_ids for request in engine.generate(PROMPTS[:2], sampling)]
    assert drafted == plain


@pytest.mark.parametrize("num_steps", [4, (1, 4), (0, 5)])
def test_more_steps_than_mtp_layers_are_refused(mtp_chain, num_steps):
    for create in (mtp_chain.engine, mtp_chain.target):
        with pytest.raises(ConfigError, match="the folder has 3 MTP layers, one per step") as got:
            create(num_steps=num_steps, max_context_len=64)
        assert got.value.field == "num_steps"


@pytest.fixture(scope="module")
def mtp_chain(tmp_path_factory):
    return CASES["mtp-chain"](tmp_path_factory.mktemp("chain"))


@pytest.mark.parametrize(
    ("settings", "lengths", "widths"),
    [
        ({}, (0, 3), (1, 4)),
        ({"algorithm": "NONE"}, 0, 1),
        ({"topk": 2}, (0, 1, 3), (1, 3, 8)),
        ({"topk": 8}, (0, 3), (1, 8)),
        ({"num_draft_tokens": 2}, (0, 3), (1, 2)),
        ({"num_draft_tokens": 1}, 3, 1),
        ({"num_steps": 3}, 3, 4),
        ({"num_steps": (0, 2)}, (0, 2), (1, 3)),
    ],
    ids=str,
)
def test_an_engine_chooses_its_draft_lengths_unless_one_is_given(settings, lengths, widths):
    loaded = models.load(small_model("llama"), device="cpu", check=False)
    with loaded.engine(max_batch_size=2, max_context_len=64, **settings) as engine:
        assert (engine.spec.num_steps, engine.spec.num_draft_tokens) == (lengths, widths)


@pytest.mark.parametrize("algorithm", ["NGRAM", "MULTI_LAYER_EAGLE"])
def test_drafts_that_take_the_same_time_need_no_short_length(algorithm, mtp_chain):
    loaded = mtp_chain
    if algorithm == "NGRAM":
        loaded = models.load(small_model("llama"), device="cpu", check=False)
    with loaded.engine(algorithm=algorithm, max_batch_size=2, max_context_len=64) as engine:
        assert engine.spec.num_steps == (0, 3)
        counts = [step.mean_drafts for step in engine._spec_step.by_length]
        assert counts == [0, 1, 2, 3]


@pytest.mark.slow
def test_chosen_lengths_capture_five_bodies_per_size():
    """Drafts of 0, 1, 2 of 3 and 3, and a plain step that catches up; greedy and sampled."""
    loaded = models.load(small_model("llama"), device="cpu", check=False)
    bodies = {}
    for settings in ({}, {"num_steps": 3}):
        with loaded.engine(
            max_batch_size=2, max_context_len=64, batch_sizes=[1, 2], generation="v3", **settings
        ) as engine:
            record = engine.runners[0].capture()
            loops = record.modes[0].loops
            bodies[bool(settings)] = [len(loop.bodies) for loop in loops]
    assert bodies == {False: [10, 10], True: [2, 2]}
