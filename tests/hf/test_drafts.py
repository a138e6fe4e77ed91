"""Draft models of any target of transformers change nothing in its text, greedy or sampled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import graphkit as gk
from graphkit import hf
from graphkit.errors import CheckpointError, ConfigError
from graphkit.hf.draft_model import SharedModules
from graphkit.reference import Eagle3Head, EagleHead, LlamaConfig, save_draft_head
from mtp_folders import save_with_mtp
from small_models import small_model

pytestmark = pytest.mark.slow
PROMPTS = [[5, 17, 3, 17, 3, 17, 9, 5, 17], [7, 8, 9], list(range(30, 42))]
NEW_TOKENS = 14
SAMPLED = gk.SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3)


def two_gemmas():
    """A target, and a draft model of half its width and one layer."""
    target = small_model("gemma3_text", tie_word_embeddings=False)
    draft = small_model(
        "gemma3_text", tie_word_embeddings=False, hidden_size=32, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    return hf.load(target, draft=draft, device="cpu")


def head_config(model):
    """One layer of a Llama of the width of a target."""
    return LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


def with_head(kind, folder, create, **options):
    """A target whose head, with random weights, was saved in a folder."""
    other = hf.load(small_model(kind), device="cpu", check=False)
    torch.manual_seed(1)
    head = create(head_config(other.model), SharedModules(other.model, other.layout), **options)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    if options:
        tokens = torch.randperm(128)[:96].sort().values
        head.d2t.copy_(tokens - torch.arange(96))
    save_draft_head(head, folder)
    return hf.load(small_model(kind), draft=folder, device="cpu")


def with_mtp(kind, folder, count=1):
    """A target with MTP layers like its last layer in its folder."""
    model = small_model(kind)
    save_with_mtp(model, folder, model.config.num_hidden_layers - 1, count)
    return hf.load(folder, draft="mtp", device="cpu")


CASES = {
    "standalone": ("STANDALONE", lambda _: two_gemmas()),
    "eagle": ("EAGLE", lambda folder: with_head("gemma2", folder, EagleHead)),
    "eagle-on-recurrent": ("EAGLE", lambda folder: with_head("qwen3_next", folder, EagleHead)),
    "eagle3": (
        "EAGLE3",
        lambda folder: with_head(
            "qwen3_moe", folder, Eagle3Head, aux_layers=(0, 1, 2), draft_vocab_size=96
        ),
    ),
    "mtp-behind": ("EAGLE", lambda folder: with_mtp("deepseek_v3", folder)),
    "mtp-beside": ("EAGLE", lambda folder: with_mtp("qwen3_5_text", folder)),
    "mtp-chain": ("MULTI_LAYER_EAGLE", lambda folder: with_mtp("deepseek_v3", folder, 3)),
}


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory):
    algorithm, create = CASES[request.param]
    loaded = create(tmp_path_factory.mktemp("draft"))
    assert loaded.algorithm == algorithm
    return loaded


def texts(loaded, sampling, **options):
    with loaded.engine(max_batch_size=4, max_context_len=64, batch_sizes=[4], **options) as engine:
        engine.capture()
        requests = engine.generate(PROMPTS, sampling)
        assert all(not runner.stats.fallbacks for runner in engine.runners)
        return [request.output_ids for request in requests]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_the_greedy_text_is_that_of_transformers(loaded, generation, topk):
    greedy = gk.SamplingParams(max_new_tokens=NEW_TOKENS)
    assert texts(loaded, greedy, generation=generation, topk=topk) == [
        loaded.original.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip


@pytest.mark.parametrize(("generation", "topk"), [("v1", 1), ("v2", 2), ("v3", 2)])
def test_a_seeded_text_is_that_of_plain_decoding(loaded, generation, topk):
    plain = texts(loaded, SAMPLED, algorithm="NONE")
    assert texts(loaded, SAMPLED, generation=generation, topk=topk) == plain


def test_every_mode_is_captured_and_audits_clean(loaded):
    target = loaded.target(max_batch_size=4, max_context_len=64, topk=2)
    drafting = loaded.draft.modes
    assert {*target.modes} > {*drafting}
    report = gk.audit_target(target, batch_sizes=[4])
    assert [finding for finding in report.findings if finding.severity == "error"] == []


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
            hf.load(small_model("llama", **changes), draft=tmp_path / "head", device="cpu")
        assert "\n" not in str(caught.value)


def test_a_head_for_deeper_targets_is_refused(tmp_path):
    with_head("llama", tmp_path, Eagle3Head, aux_layers=(0, 1, 2), draft_vocab_size=96)
    shallow = small_model("llama", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="inputs of target layers 0, 1, 2, but the target"):
        hf.load(shallow, draft=tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "does not exist"),
        ("config.json", b"{}", "contains none of model.safetensors"),
        ("model.safetensors", b"damaged", "contains no config.json"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path, name, content, message):
    folder = tmp_path / "draft"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        hf.load(small_model("llama"), draft=folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_heads_may_be_passed_as_modules():
    model = small_model("llama")
    parts = {"embedding": model.get_input_embeddings(), "lm_head": model.lm_head}
    target = SimpleNamespace(config=model.config, logits=model.lm_head.forward, **parts)
    head = EagleHead(head_config(model), target).requires_grad_(False)
    assert hf.load(model, draft=head, device="cpu").draft.module is head
    with pytest.raises(ConfigError, match="expected a folder with an EAGLE"):
        hf.load(small_model("llama"), draft=torch.nn.Linear(2, 2), device="cpu")


def test_a_draft_model_with_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocabulary of 96 tokens, but LlamaForCausalLM has 128"):
        hf.load(small_model("llama"), draft=small_model("qwen3", vocab_size=96), device="cpu")


def test_a_recurrent_draft_model_is_refused():
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent states"):
        hf.load(small_model("llama"), draft=small_model("qwen3_next"), device="cpu")


def test_an_algorithm_of_another_kind_is_refused():
    draft, message = small_model("llama", 1), "EAGLE needs a draft model of its kind. Load one"
    with pytest.raises(ConfigError, match=f"{message}, or use one of STANDALONE, NGRAM, NONE"):
        hf.load("no folder", draft=draft, algorithm="eagle", device="cpu")
    with pytest.raises(ConfigError, match=f"{message}, or use one of NGRAM, NONE"):
        hf.load("no folder", algorithm="EAGLE", device="cpu")


def test_a_draft_model_bounds_the_context():
    draft = small_model("opt", max_position_embeddings=48)
    loaded = hf.load(small_model("llama"), draft=draft, device="cpu", check=False)
    assert loaded.longest_context == 48
    assert loaded.engine().sizes.max_context_len == 48
