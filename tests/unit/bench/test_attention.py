"""``tools/bench/attention.py`` on the CPU: what it measures, and that the variants agree."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from graphkit.ops.registration import OPS
from graphkit.records import BenchReport


def test_every_variant_is_measured_at_each_condition(bench, tmp_path, capsys):
    out = tmp_path / "attention.json"
    assert bench.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    assert report.environment.torch == torch.__version__
    seen = {}
    for measure in report.measures:
        if measure.setting:
            seen.setdefault(measure.setting, set()).add(measure.variant)
    assert list(seen) == [str(each) for each in bench.conditions(quick=True)]
    pooled = {"paged_attention", "row-invariant", "TritonAttention"}
    everywhere = pooled | {"SdpaAttention", "torch SDPA"}
    for setting, variants in seen.items():
        with_sdpa = "page size 16" in setting and not setting.startswith("FP8")
        assert variants == (everywhere if with_sdpa else pooled)
    names = [measure.name for measure in report.measures if not measure.setting]
    assert names == ["FP8, 64 context, batch 2, chain, page size 16: time over bfloat16"]
    assert "64 context, batch 2, tree, page size 1" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["GQA", "FP8", "MLA"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_dense_copies_hold_the_paged_batch(bench, page_size, kind):
    """The rows of a tree see the same keys in both; those of a chain all keys in the copies."""
    shape = getattr(importlib.import_module("attention_batch"), kind)
    batch = bench.Batch(bench.Condition(64, 2, True, page_size, shape), torch.device("cpu"))
    attend = torch.nn.functional.scaled_dot_product_attention
    query, mask = batch.dense_rows
    dense = attend(query, *batch.dense[0], attn_mask=mask).unflatten(2, (4, -1))
    paged = torch.ops.graphkit.paged_attention(*batch.op_args(0))
    want = dense.permute(0, 2, 1, 3, 4).reshape_as(paged)
    torch.testing.assert_close(paged, want, atol=2e-2, rtol=2e-2)


def test_a_batch_stores_once_between_its_metadata_and_the_op(bench, monkeypatch):
    """The op reads what was written before the last store while another kernel runs."""
    module, calls = importlib.import_module("attention_batch"), []

    class Observed(bench.Batch):
        def metadata(self, backend):
            calls.append("metadata")
            return super().metadata(backend)

        def attend(self, *args):
            calls.append("store")

    monkeypatch.setattr(module, "paged_attention", lambda *_: calls.append("op"))
    batch = Observed(bench.Condition(64, 2, False, 16, module.GQA), torch.device("cpu"))
    for _ in range(2):
        batch.run_op(False, 0)
    assert calls == ["metadata", "store", "op", "op"]


def test_a_batch_launches_with_the_splits_and_the_configuration(bench, monkeypatch):
    op, calls = OPS["paged_attention"], []
    bind = inspect.signature(op.launcher).bind
    monkeypatch.setitem(vars(op), "launcher", lambda *args: calls.append(bind(*args).arguments))
    batch = bench.Batch(bench.Condition(64, 2, False, 16), torch.device("cpu"))
    out = batch.launch(0, config="config", splits=3)
    (call,) = calls
    assert (call["out"] is out, call["splits"], call["config"]) == (True, 3, "config")


def test_the_sweep_over_float8_shows_the_fastest_and_the_default(bench, monkeypatch):
    """Times are made up: many stages are fast, and 32 keys need more memory than there is."""
    sweeps = importlib.import_module("attention_sweep")

    class Batch:
        def __init__(self, condition, device):
            self.condition = condition

        def launch(self, layer, config, splits):
            return config

    class Calls:
        def __init__(self, act, batch, rounds):
            config, condition = act(0), batch.condition
            if config.block_keys == 32:
                raise sweeps.triton.runtime.errors.OutOfResources(2, 1, "shared memory")
            per_key = condition.shape.slot_bytes / config.num_stages + config.programs
            self.us = condition.batch_size * per_key

    monkeypatch.setattr(sweeps, "Batch", Batch)
    monkeypatch.setattr(sweeps, "Calls", Calls)
    found = list(sweeps.sweep_float8(torch.device("cpu"), 1, lambda text: None))
    table = {}
    for measure in found:
        table.setdefault(measure.variant, []).append(measure.name)
    assert all(names == ["batch 1", "batch 8", "batch 32"] for names in table.values())
    *best, default, wide = table
    assert len(best) == 5
    assert all("6 stages" in name for name in best)
    assert best[0].endswith("2 per SM")
    assert best[-1].endswith("3 per SM")
    assert default.startswith("default: 16 x 128")
    assert wide == "default over bfloat16"


def test_the_sweep_needs_cuda(bench, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--sweep", "--device", "cpu"])
    assert stopped.value.code == 2
    assert "--sweep needs a CUDA device" in capsys.readouterr().err
