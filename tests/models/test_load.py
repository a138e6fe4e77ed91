"""What ``models.load`` accepts, learns and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import graphkit as gk
from checkpoint_folders import write_checkpoint
from graphkit import models
from graphkit.engine.attention import SdpaAttention
from graphkit.errors import AttentionError, CheckpointError, ConfigError
from graphkit.models import cache
from small_models import KINDS, needs_recurrent, small_config, small_model


def test_a_folder_is_loaded_with_its_dtype(tmp_path):
    small_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = models.load(tmp_path, device="cpu")
    assert loaded.model.dtype is torch.bfloat16
    assert models.load(tmp_path, device="cpu", dtype=torch.float32).model.dtype is torch.float32


def test_a_model_shares_its_weights_with_the_original():
    loaded = models.load(small_model("qwen3"), device="cpu")
    originals = dict(loaded.original.named_parameters())
    for name, weight in loaded.model.named_parameters():
        assert weight is originals[name]


def test_the_layout_is_learnt_from_a_forward():
    layout = models.load(small_model("deepseek_v3"), device="cpu").layout
    assert [(layer.heads, layer.key_size, layer.value_size) for layer in layout.attention] == [
        (4, 24, 16),
        (4, 24, 16),
    ]


def test_the_states_of_a_hybrid_are_learnt_from_a_forward():
    hybrid = models.load(small_model("qwen3_next"), device="cpu").layout
    assert [layer.name for layer in hybrid.attention] == ["model.layers.1.self_attn"]
    (mixer,) = hybrid.recurrent
    assert mixer.name == "model.layers.0.linear_attn"
    assert set(mixer.shapes) == {"conv0", "recurrent0"}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("bloom", ConfigError, "caches keys and values in 2 layers, but 0 attend through"),
        ("roc_bert", ConfigError, "is an encoder: .*attention.self attends to later tokens"),
        ("bert", ConfigError, "is an encoder: .*attention.self attends to later tokens"),
        ("doge", ConfigError, "passes attention_mask to its attention"),
        ("deepseek_v4", ConfigError, "passes 7 keys of 6 rows to its attention"),
        pytest.param(
            "recurrent_gemma", ConfigError, "no module that takes the cache reads them",
            marks=needs_recurrent,
        ),
        ("rwkv", ConfigError, "keeps nothing that graphkit has a pool for"),
        ("falcon", ConfigError, "cannot serve a model with a cache or a mask of its own"),
        ("zaya", ConfigError, "has recurrent states and returns a tuple"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused(kind, error, message):
    changes = {"zaya": {"num_experts_per_tok": 1}, "bert": {"is_decoder": False}}.get(kind, {})
    with pytest.raises(error, match=message) as caught:
        models.load(small_model(kind, **changes), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_dropped_scaling_is_found_at_load(monkeypatch):
    model = small_model("llama")
    attend = SdpaAttention._attend
    monkeypatch.setattr(
        SdpaAttention, "_attend", lambda self, args: attend(self, args._replace(scale=1.0))
    )
    with pytest.raises(ConfigError, match="computes other logits through graphkit"):
        models.load(model, device="cpu")


def test_chunks_and_scales_by_position_are_checked_at_load(monkeypatch):
    layout = models.load(small_model("llama4_text"), device="cpu").layout
    assert [bool(layer.length_argument) for layer in layout.attention] == [False, True]
    monkeypatch.setattr(cache.PastLength, "get_seq_length", lambda *_: 0)
    with pytest.raises(ConfigError, match="computes other logits through graphkit"):
        models.load(small_model("llama4_text"), device="cpu")


def test_a_module_may_attend_several_times_in_a_forward():
    layout = models.load(small_model("diffllama"), device="cpu").layout
    names = [f"model.layers.{layer}.self_attn" for layer in (0, 0, 1, 1)]
    assert [layer.name for layer in layout.attention] == names


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"config.json": None}, "has no config.json. Pass a folder of transformers; "),
        ({"config.json": "{"}, "^'[^']*config.json' is not valid JSON: .* Download it again."),
        (
            {"config.json": "[1]"},
            r"^'[^']*config.json' must contain a JSON object, got \[1\]. Download",
        ),
        ({"config.json": {"model_type": "unknown"}}, "config.json of .* model type `unknown` but"),
        ({"config.json": {"hidden_act": "odd"}}, "config.json of .*: KeyError: 'odd'. Correct"),
        ({"config.json": {"rope_parameters": {"rope_type": "odd"}}}, "config.json of .*: KeyError"),
        ({"config.json": {"quantization_config": [1]}}, "config.json of .*: AttributeError: "),
        ({"config.json": {"model_type": "t5"}}, "has no causal language model: .* type 't5'. Pass"),
        ({"config.json": {"num_hidden_layers": 3}}, "has no model.layers.2.*, or correct config"),
        ({"model.safetensors": None}, "contains none of model.safetensors"),
        ({"model.safetensors": "abc"}, "model.safetensors' is not a valid safetensors file: "),
        ({"model.safetensors": None, INDEX: "{}"}, "has no weight_map from tensor names to files"),
        ({"model.safetensors": None, INDEX: "{"}, "index.json' is not valid JSON"),
        ({"model.safetensors": None, "pytorch_model.bin": "abc"}, "is not a file of PyTorch tens"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path, written, message):
    """The line names the folder and the file that is wrong."""
    small_model("llama").save_pretrained(tmp_path)
    for name, content in written.items():
        path = tmp_path / name
        if content is None:
            path.unlink()
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(CheckpointError, match=message) as caught:
        models.load(tmp_path, device="cpu")
    assert re.fullmatch(rf".*{re.escape(str(tmp_path))}.*\.", str(caught.value))
    assert len(str(caught.value).replace(str(tmp_path), "")) < 500


@pytest.mark.parametrize("stored", ["BartForConditionalGeneration", "LlamaModel"])
def test_weights_of_another_class_are_refused(tmp_path, stored):
    if stored == "LlamaModel":
        small_model("llama").base_model.save_pretrained(tmp_path)
    else:
        sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
                 {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
        transformers.BartForConditionalGeneration(
            transformers.BartConfig(vocab_size=64, d_model=16, **sizes)
        ).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds a {stored}, which lacks lm_head.weight.* of"):
        models.load(tmp_path, device="cpu")


def test_layers_that_the_model_does_not_have_are_a_warning(tmp_path, caplog):
    small_model("llama").save_pretrained(tmp_path)
    models.load(tmp_path, device="cpu", check=False)
    assert not caplog.records
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    models.load(tmp_path, device="cpu", check=False)
    (record,) = (each for each in caplog.records if each.name.startswith("graphkit"))
    assert "has weights of model.layers.1, which the model of its" in record.getMessage()


def test_an_unknown_dtype_is_no_error_of_the_tokenizer(tmp_path):
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float99"}))
    loaded = models.load(tmp_path, device="cpu", dtype=torch.float32, check=False)
    with pytest.raises(CheckpointError, match=r"^config.json of .* 'float99'\. Correct"):
        _ = loaded.tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_target_is_captured_and_audits_clean(kind):
    target = models.load(small_model(kind), device="cpu").target(
        max_batch_size=4, max_context_len=64
    )
    report = gk.audit_target(target, modes=[gk.ForwardMode.TARGET_VERIFY], batch_sizes=[4])
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_a_runner_replays_a_sample_batch():
    loaded = models.load(small_model("llama"), device="cpu")
    with loaded.runner(gk.ForwardMode.TARGET_VERIFY, batch_sizes=[4], max_batch_size=4) as runner:
        runner.capture()
        batch = runner.sample_batch(3)
        eager = runner.fall_back(batch).next_token_logits
        assert torch.equal(runner.replay(batch).next_token_logits, eager)


def test_the_documentation_lists_the_types_that_are_compared():
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    listed = page.partition("## Model types")[2].partition("Layers of one model")[0]
    assert set(re.findall(r"`([\w-]+)`", listed)) - {"generate"} == set(KINDS)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"algorithm": "EAGLE"}, "algorithm"), ({"algorithm": 3}, "algorithm"),
     ({"num_draft_tokens": 0}, "num_draft_tokens"), ({"topk": 0}, "topk")],
)  # fmt: skip
def test_wrong_settings_are_refused_by_name(options, field):
    loaded = models.load(small_model("llama"), device="cpu", check=False)
    with pytest.raises(ConfigError) as caught:
        loaded.engine(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "a"), ("dtype", torch.int8), ("fuse", 3), ("check", None),
     ("trust_remote_code", "no")],
)  # fmt: skip
def test_wrong_options_of_a_load_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"load\.{field} must be") as caught:
        models.load(small_model("llama"), **{field: value})
    assert caught.value.field == field


def test_pages_of_a_target_belong_to_one_request():
    loaded = models.load(small_model("llama"), device="cpu", check=False)
    target = loaded.target(max_batch_size=2, max_context_len=63, page_size=4)
    (table,) = {each.req_to_token_pool.req_to_token for each in target.attention.values()}
    assert set((table[1] // 4).tolist()).isdisjoint((table[2] // 4).tolist())
    assert (table[1:, ::4] % 4 == 0).all()


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_the_model_itself_runs_inside_a_forward_alone(kind):
    loaded = models.load(small_model(kind), device="cpu", check=False)
    with pytest.raises(AttentionError, match="call the forward of its target, not the model"):
        loaded.model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    assert loaded.original(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits.isfinite().all()


def test_a_context_has_at_most_the_positions_of_the_model():
    loaded = models.load(small_model("opt"), device="cpu", check=False)
    assert loaded.target().sizes.max_context_len == 128
    with loaded.engine() as engine:
        assert engine.sizes.max_context_len == 128
    for create in (loaded.target, loaded.engine):
        with pytest.raises(ConfigError, match="is 129, but the model has 128 positions"):
            create(max_context_len=129)
        with pytest.raises(ConfigError, match="must be an int >= 1, got 'long'"):
            create(max_context_len="long")
    whisper = models.load(small_model("whisper"), device="cpu", check=False)
    assert whisper.longest_context == whisper.model.config.max_target_positions == 448


def test_a_part_of_a_model_may_be_absent():
    """Gemma 4 is published with and without audio."""
    config = transformers.Gemma4Config(
        text_config=small_config("gemma4_text", pad_token_id=0), vision_config=None,
        audio_config=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    models.load(model.requires_grad_(False), device="cpu")


def test_the_slots_of_an_engine():
    """All that fit in 1,024 per request, but at least one longest text; or those that are asked."""
    model = small_model("llama")
    model.config.max_position_embeddings = 8192
    loaded = models.load(model, device="cpu", check=False)

    def slots(**options):
        with loaded.engine(**options) as engine:
            return engine.memory.total_slots

    assert slots(max_batch_size=2, max_context_len=100) == 200
    assert slots(max_batch_size=3, max_context_len=2000) == 3 * 1024
    assert slots(max_batch_size=2, max_context_len=4000, page_size=16) == 4000
    assert slots(max_batch_size=3, max_context_len=2000, kv_slots=2500) == 2500
    assert slots(max_batch_size=3, max_context_len=100, kv_slots=70, page_size=16) == 80
    with pytest.raises(ConfigError, match="kv_slots must be an int >= 1, got 0") as caught:
        loaded.engine(kv_slots=0)
    assert caught.value.field == "kv_slots"


def test_the_slots_of_an_engine_fit_in_the_free_memory_of_a_gpu(monkeypatch):
    loaded = models.load(
        small_model("llama"), draft=small_model("llama"), device="cpu", check=False
    )
    spec, requests = loaded.spec(page_size=4), gk.ReqToTokenPool(4, 512, "cpu")
    of_target = 4 * sum(2 * layer.heads * layer.key_size for layer in loaded.layout.attention)
    assert loaded._slot_bytes(spec, None) == 2 * of_target
    monkeypatch.setattr(type(loaded), "_slot_bytes", lambda *_: 1000)
    monkeypatch.setattr(type(loaded), "device", torch.device("cuda"))
    for free, slots in ((10**6, 700), (10**9, 4 * 512), (1000, 512)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10**10))
        assert loaded._kv_slots(None, requests, spec, None) == slots
    loaded.split = SimpleNamespace(least=lambda room: room // 1000 - 400)  # another rank has fewer
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**10))
    assert loaded._kv_slots(None, requests, spec, None) == 512
    loaded.split = SimpleNamespace(least=lambda room: room - 699_000)
    assert loaded._kv_slots(None, requests, spec, None) == 1000


def test_a_model_whose_own_forward_fails_is_refused(monkeypatch):
    model = small_model("llama")

    def fails(*_, **__):
        raise RuntimeError("sizes 32\nand 8 differ")

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", fails)
    with pytest.raises(
        ConfigError, match=r"two tokens: RuntimeError: sizes 32 and 8 differ\. Check"
    ):
        models.load(model, device="cpu")
