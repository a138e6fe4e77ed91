"""Models of transformers that ranks split. Every rank runs every function; see ``rank_processes``.

Ranks save the same folder: transformers writes it on rank 0 alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from training.folders import save_draft_head

import graphkit as gk
from drafted_models import head_config
from graphkit import models
from graphkit.models.heads.eagle import Eagle3Head
from graphkit.models.heads.load import head_sources
from graphkit.models.tensor_parallel import GatheredColumns
from mtp_folders import save_with_mtp
from quantized_folders import write_quantized
from rank_commands import own_store, run
from rank_steps import rank_device, rank_group
from small_models import IS_OLD, KINDS, small_config, small_model

PROMPTS = [[5, 9, 17, 3, 22, 41, 7, 8, 30], [2, 4, 6]]
SPLIT_KINDS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 127},  # the last rank's head has padding
    "qwen3": {},  # norms of heads
    "gemma2": {},  # norms behind the sums
    "phi3": {},  # joined projections, whose columns are gathered
    "olmo2": {},  # norms over all heads
    "mixtral": {},  # experts, stored one by one
    "llama4_text": {},  # experts as one transposed tensor
    "deepseek_v3": {},  # latent attention
    "qwen3_next": {},  # recurrent layers, and a shared expert
}
"""Types that differ in the styles of their plans, and further settings."""


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give all ranks one folder, which is removed when all have left it."""
    folder = Path(tempfile.gettempdir()) / f"graphkit-plans-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    try:
        yield folder
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def generated(model, **options):
    """Return the tokens that an engine of a model generates after two prompts."""
    with model.engine(max_batch_size=2, max_context_len=64, **options) as engine:
        if model.group is not None and model.group.rank:
            engine.worker_loop()
            return None
        greedy = gk.SamplingParams(max_new_tokens=12)
        return [request.output_ids for request in engine.generate(PROMPTS, greedy)]


def check_split(source, group, **options):
    """Load a folder or model on one rank and split it; compare the texts."""
    expected = None
    if not group.rank:
        expected = generated(models.load(source(), device=rank_device(), check=False, **options))
    split = models.load(source(), device=rank_device(), group=group, **options)
    got = generated(split)
    assert got == expected
    return split


def split_every_kind():
    """Ranks that have a part of a model each generate the text of one rank."""
    group = rank_group(same_batch=True)
    for kind, settings in SPLIT_KINDS.items():
        if kind not in KINDS or (IS_OLD and kind == "qwen3_next"):  # see needs_recurrent
            continue
        with shared_folder() as folder:
            whole = small_model(kind, **settings)
            for name, parameter in whole.named_parameters():
                if name.endswith(".bias"):  # zeros before
                    parameter.normal_(std=0.5)
            whole.save_pretrained(folder)
            dist.barrier()
            split = check_split(lambda folder=folder: folder, group)
        for name, parameter in split.model.named_parameters():
            part = split.split.parts.get(name)
            if part is not None:
                size = group.size * parameter.numel() // whole.get_parameter(name).numel()
                assert size == 1, (kind, name)
        layer = split.layout.attention[-1]
        heads = small_model(kind, **settings).config.num_key_value_heads
        is_whole = kind in ("phi3", "olmo2", "deepseek_v3")
        assert kind == "deepseek_v3" or layer.heads == heads // (1 if is_whole else group.size)


def split_model_objects():
    """A model that is passed as an object is cut in place, and quantised in parts."""
    group = rank_group(same_batch=True)
    split = check_split(lambda: small_model("llama"), group)
    assert all(p.untyped_storage().nbytes() <= 2**18 for p in split.model.parameters())
    expected = generated(
        models.load(small_model("llama"), device=rank_device(), check=False, quantize="fp8")
    )
    got = generated(
        models.load(small_model("llama"), device=rank_device(), group=group, quantize="fp8")
    )
    assert group.rank or [len(ids) for ids in got] == [len(ids) for ids in expected]


def split_quantised_folders():
    """Ranks read parts of quantised layers; those that cannot be cut are dequantised."""
    group = rank_group(same_batch=True)
    cases = (("awq", "llama"), ("compressed fp8 channel", "phi3"), ("fp8 blocks", "mixtral"))
    for layout, kind in cases:
        with shared_folder() as folder:
            if not group.rank:
                write_quantized(folder / "quantised", layout, kind)
            dist.barrier()
            split = check_split(lambda folder=folder: folder / "quantised", group)
        assert any("Quantized" in type(module).__name__ for module in split.model.modules())


def split_scales_of_keys():
    """Pools have the stored scales of the heads of their rank."""
    group = rank_group(same_batch=True)
    with shared_folder() as folder:
        if not group.rank:
            small_model("llama").save_pretrained(folder)
            file = folder / "model.safetensors"
            path, scale = "model.layers.0.self_attn", torch.tensor([1.5, 2.5])
            tensors = load_file(file) | {f"{path}.k_scale": scale, f"{path}.v_scale": scale.clone()}
            save_file(tensors, file, metadata={"format": "pt"})
        dist.barrier()
        split = models.load(folder, device=rank_device(), group=group, check=False)
    first, second = split.layout.attention
    assert (first.key_scale, first.value_scale) == 2 * (((1.5, 2.5)[group.rank],),)
    assert second.key_scale == ()


def split_with_draft_heads():
    """An EAGLE-3 head is split with its target, and drafts what the whole one drafts."""
    group = rank_group(same_batch=True)
    with shared_folder() as folder:
        whole = models.load(small_model("llama"), device="cpu", check=False)
        torch.manual_seed(1)
        config = replace(head_config(whole.model), num_key_value_heads=2)
        shared = head_sources(whole.model, whole.layout)
        head = Eagle3Head(config, shared, aux_layers=(0, 1, 2), draft_vocab_size=128)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.15)
        if not group.rank:
            save_draft_head(head, Path(folder))
        dist.barrier()
        options = {"draft": folder, "device": rank_device(), "check": False}
        expected = models.load(small_model("llama"), **options)
        split = models.load(small_model("llama"), **options, group=group)
    assert generated(split) == generated(expected) or group.rank
    sizes = [sum(p.numel() for p in m.draft.module.parameters()) for m in (split, expected)]
    assert sizes[0] < 0.6 * sizes[1]
    mode = gk.ForwardMode.DRAFT_EXTEND_V2
    results = []
    for model in (split, expected):
        target = model.target(max_batch_size=2)
        with target.runner(mode, batch_sizes=[2]) as runner:
            results.append(runner.fall_back(target.batch(mode, 2, 1)).tensors())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def split_with_mtp_layers():
    """MTP layers are split as the layer of the target that they are like, and draft the same."""
    group = rank_group(same_batch=True)
    cases = (("deepseek_v3", None), ("qwen3_5_text", None), ("deepseek_v3", "fp8"))
    for kind, layout in cases[::2] if IS_OLD else cases:
        with shared_folder() as folder:
            if not group.rank:
                save_with_mtp(
                    small_model(kind), folder, small_model(kind).config.num_hidden_layers - 1
                )
            dist.barrier()
            options = {"draft": "mtp", "device": rank_device(), "check": False, "quantize": layout}
            whole = models.load(folder, **options)
            split = models.load(folder, **options, group=group)
        assert generated(split) == generated(whole) or group.rank or layout
        results = []
        for model in (split, whole):
            target = model.target(max_batch_size=2)
            with target.runner(gk.ForwardMode.DRAFT_EXTEND_V2, batch_sizes=[2]) as runner:
                batch = target.batch(runner.mode, 2, 1)
                results.append(runner.fall_back(batch).tensors())
        if layout:  # each rank has scales of its own, and routers may choose other experts
            of_ranks = [None] * group.size
            dist.all_gather_object(of_ranks, results[0]["hidden_states"].tolist())
            assert of_ranks == of_ranks[:1] * group.size
        else:
            torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def capture_a_split_target():
    """A target of a split model captures its collectives, and replays what it computes eagerly."""
    group = rank_group(same_batch=True)
    target = models.load(small_model("qwen3"), device=rank_device(), group=group).target()
    whole = models.load(small_model("qwen3"), device=rank_device()).target()
    for mode in target.forwards:
        batch = target.batch(mode, 2, 1)
        with target.runner(mode, batch_sizes=[2]) as runner:
            runner.capture()
            replayed = runner.replay(batch, clone=True).tensors()
        with whole.runner(mode, batch_sizes=[2]) as runner:
            expected = runner.fall_back(whole.batch(mode, 2, 1)).tensors()
        for name, tensor in replayed.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3)


def refuse_plans():
    """What ranks cannot split is refused by name on all of them, and the group goes on."""
    group, device = rank_group(same_batch=True), rank_device()
    strange = small_model("llama")
    strange._tp_plan = {**strange.tp_plan, "model.layers.*.mlp.up_proj": "sequence_parallel"}
    cases = (
        (small_model("gpt2"), "GPT2LMHeadModel has no tp_plan for its layers"),
        (strange, "the style 'sequence_parallel' for model.layers.0.mlp.up_proj"),
        (small_model("llama", num_key_value_heads=1), "num_key_value_heads is 1, which 2 ranks"),
        (small_model("llama", intermediate_size=97), "gate_proj.weight has 97 rows, which 2 ranks"),
    )
    for model, reason in cases:
        with pytest.raises(gk.ConfigError, match=reason) as caught:
            models.load(model, device=device, group=group)
        assert caught.value.field == "group"
    with pytest.raises(gk.ConfigError, match="group"):
        models.load(small_model("llama"), device=device, group="two")
    assert generated(models.load(small_model("llama"), device=device, group=group)) or group.rank


def keep_replacements_on_all_ranks():
    """Ranks replace the same modules, also if one of them compares other numbers."""
    group = rank_group(same_batch=True)
    model = small_model("llama")
    model.model.layers[0].input_layernorm.weight.data.fill_(1.0 + group.rank)
    with pytest.MonkeyPatch.context() as patch:
        if group.rank:
            from graphkit.models.fusion import observation

            patch.setattr(observation, "_equal", lambda *_: False)
        split = models.load(model, device=rank_device(), group=group, check=False)
    gathered = [None] * group.size
    dist.all_gather_object(gathered, sorted(split.layout.replaced))
    assert gathered[0] == gathered[-1]
    # No comparison decides on the head and on layers that are products alone.
    assert {name.rpartition("_")[2] for name in gathered[0]} == {"head", "proj"}
    hooks = split.head._forward_hooks.values()
    assert any(isinstance(hook, GatheredColumns) for hook in hooks)
    assert small_config("llama").vocab_size == split.head.out_features


def run_commands_of_a_folder():
    """Commands split a folder of any type with a plan."""
    tp, is_first = ["--tp", os.environ["WORLD_SIZE"]], os.environ["RANK"] == "0"
    folder = Path(tempfile.gettempdir()) / f"graphkit-plans-{os.environ['MASTER_PORT']}"
    if is_first:
        small_model("mixtral", vocab_size=256).save_pretrained(folder, is_main_process=True)
    with own_store():
        pass  # ends when the folder is complete
    words = ["--checkpoint", str(folder), *tp]
    texts = {}
    for command, options in {
        "generate": ["--prompt", "import os", "--max-new-tokens", "8", "--json"],
        "capture": ["--mode", "TARGET_VERIFY", "--batch-sizes", "1"],
        "bench": [
            "--batch-sizes",
            "1",
            "--steps",
            "2",
            "--rounds",
            "1",
            "--context",
            "8",
            "--steps-per-launch",
            "2",
        ],
    }.items():
        code, texts[command], error = run(command, *words, *options)
        assert code == 0, (command, error)
        assert bool(texts[command]) == is_first
    shutil.rmtree(folder, ignore_errors=True)


run_commands_of_a_folder.has_group = False
