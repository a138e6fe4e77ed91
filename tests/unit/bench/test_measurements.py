"""Scripts that measure one thing each: their reports, and that compared ways compute the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from graphkit.errors import DeviceError
from graphkit.ops.quantized_linear import quantized_linear
from graphkit.records import BenchReport
from graphkit.spec import ForwardMode
from tools.bench import shape_targets
from tools.bench.shape_targets import shape_target


def of(script):
    """Give a test that script of ``tools/bench``."""
    return pytest.mark.parametrize("bench", [script], indirect=True, ids=[script])


@of("adaptive")
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
def test_adaptive_drafts_keep_up_with_the_best_length(bench, batch_size, chance):
    cpu = torch.device("cpu")
    rates, drafted = bench.Bench(bench.SHAPES["cpu"], cpu).rates(batch_size, chance, 1)
    adaptive = rates.pop(bench.ADAPTIVE)
    assert adaptive >= 0.98 * max(rates.values()), (adaptive, rates, drafted)
    assert adaptive >= 0.98 * rates[bench.PLAIN], (adaptive, rates, drafted)


@of("adaptive")
def test_the_report_names_every_variant(bench, tmp_path, monkeypatch):
    small = replace(bench.SHAPES["cpu"], target_layers=20, draft_layers=2, tokens={2: 12})
    monkeypatch.setitem(bench.SHAPES, "cpu", small)
    monkeypatch.setattr(bench, "BATCH_SIZES", (2,))
    monkeypatch.setattr(bench, "CHANCES", (0.5, "mixed"))
    out = tmp_path / "adaptive.json"
    assert bench.main(["--device", "cpu", "--out", str(out)]) in (0, 1)
    found = BenchReport.from_json(out.read_text()).measures
    assert {each.variant for each in found if each.name == "speed"} == {
        "plain", "1 drafts", "3 drafts", "adaptive", "one length for all",
    }  # fmt: skip
    assert sum(each.bar is not None for each in found) == 5, "two, and three of mixed requests"


CPU = torch.device("cpu")


@of("decode_step")
@pytest.mark.slow
def test_every_way_is_measured_at_each_size(bench, monkeypatch):
    monkeypatch.setattr(bench, "TOKENS", 4)
    monkeypatch.setattr(bench, "CONTEXT", 8)
    report = bench.report(1, CPU, "tiny")
    ways = (
        "generate, dynamic cache", "generate, static cache", "torch.compile, max-autotune",
        "graphkit",
    )  # fmt: skip
    assert {(each.setting, each.variant) for each in report.measures} == {
        (f"batch {size}", way) for size in bench.BATCH_SIZES for way in ways
    }


@of("decode_step")
@pytest.mark.slow
def test_the_compiled_loop_generates_what_the_model_does(bench):
    model = bench.model_of_transformers("tiny", CPU).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, bench.CONTEXT))
    with torch.no_grad(), bench.by_max_autotune(model, ids) as generate:
        compiled = generate(4)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            eos_token_id=None, max_new_tokens=4,
        )  # fmt: skip
    assert compiled.flatten().tolist() == expected[:, -1].tolist()


@of("foreign_audit")
def test_the_report_measures_replays_and_checks(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CALLS", 3)
    out = tmp_path / "foreign_audit.json"
    arguments = ["--device", "cpu", "--nodes", "6", "--gigabytes", "0.002", "--rounds", "1"]
    assert bench.main([*arguments, "--out", str(out)]) in (0, 1)  # its bars are those of a GPU
    measures = BenchReport.from_json(out.read_text()).measures
    found = {(each.name, each.variant): each.value for each in measures}
    assert found["nodes", ""] == 7
    assert found["checks not done", ""] == found["errors", ""] == 0
    for variant in ("no audit", "audit"):
        assert {("capture", variant), ("host", variant), ("replay", variant)} <= found.keys()
    assert ("capture", "audit, known memory") in found
    assert {("first check", ""), ("one check", "")} <= found.keys()


@of("fusion")
def test_every_forward_is_measured_at_each_size(bench, tmp_path, monkeypatch):
    out = tmp_path / "fusion.json"
    monkeypatch.setattr(bench, "REPLAYS", 1)
    arguments = ["--shape", "tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    assert bench.main(arguments) == 0
    nodes = {
        (each.setting, each.variant): each.value
        for each in BenchReport.from_json(out.read_text()).measures
        if each.name == "nodes"
    }
    assert len(nodes) == 4
    for size in bench.BATCH_SIZES:
        setting = f"batch {size}"
        assert nodes[setting, bench.PLAIN] > 1.5 * nodes[setting, bench.FUSED]


@of("latency")
@pytest.mark.slow
def test_times_of_a_burst(bench, tmp_path, monkeypatch, capsys):
    small = {"RUNNING": 4, "CONTEXT": 200, "BUDGET": 32, "SHORT": 3, "LONG": 90, "NEW": 4}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    out = tmp_path / "latency.json"
    assert bench.main(["--rounds", "2", "--device", "cpu", "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert body["settings"]["bursts"] == 2
    found = {(each["setting"], each["name"], each["variant"]) for each in body["measures"]}
    names = ("first token, long prompt", "first token, short prompt", "between tokens")
    assert found == {(g, n, p) for g in ("v2", "v3") for n in names for p in ("p50", "p99")}
    assert all(each["value"] > 0 for each in body["measures"])
    assert "between tokens" in capsys.readouterr().out


@of("latency")
def test_a_device_that_is_missing_is_refused(bench):
    with pytest.raises(DeviceError):
        bench.main(["--rounds", "1", "--device", "cuda:77"])


@pytest.mark.slow
@of("long_run")
def test_a_long_run_loses_and_keeps_nothing(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RUNNING", 16)
    monkeypatch.setattr(bench, "SLOTS", 150)
    monkeypatch.setattr(bench, "IN_SYSTEM", 40)
    monkeypatch.setattr(bench, "PARTS", 3)
    out = tmp_path / "long_run.json"
    assert bench.main(["--requests", "900", "--device", "cpu", "--out", str(out)]) == 0
    found = {}
    for measure in json.loads(out.read_text())["measures"]:
        found.setdefault(measure["setting"], {})[measure["name"]] = measure["value"]
    assert set(found) == {"v1", "v2", "v3"}
    for counts in found.values():
        assert counts["wrong texts"] == counts["rows and slots held"] == 0
        assert counts["more device memory"] == 0
        assert counts["steps past 2**31"] > 0
        assert counts["ended: aborted"] > 0
        assert counts["ended: failed"] > 0
        assert sum(n for name, n in counts.items() if name.startswith("ended")) == 300
    assert sum(counts["preemptions"] for counts in found.values()) > 0
    assert sum(counts["interrupted steps"] for counts in found.values()) > 0
    assert "wrong texts" in capsys.readouterr().out


@of("quantized_linear")
def test_every_format_is_measured_beside_bfloat16(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "resolve_device", lambda _: torch.device("cpu"))
    out = tmp_path / "report.json"
    assert bench.main(["--quick", "--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    seen = {}
    for measure in report.measures:
        seen.setdefault(measure.setting, {})[measure.variant, measure.name] = measure.value
    assert list(seen) == ["small, 1 rows", "small, 3 rows"]
    for cells in seen.values():
        assert {variant for variant, _ in cells} == {"bfloat16", *bench.KINDS}
        whole, fp8, int4 = (cells[name, "weight"] for name in ("bfloat16", "fp8 channel", "int4"))
        assert int4 < 0.6 * fp8 < 0.4 * whole


@of("quantized_linear")
def test_variants_compute_the_same_but_for_their_rounding(bench):
    weight, x = bench.random_inputs((192, 256), 3, torch.device("cpu"))
    expected, *results = (
        calls[0]().float() for _, _, calls in bench.variants(weight, x, torch.device("cpu"))
    )
    same, channel, _, int4 = results  # blocks have the scale of an average output
    assert torch.equal(same, expected)
    for got, error in ((channel, 0.04), (int4, 0.15)):
        assert (got - expected).norm() < error * expected.norm()
    blocks = bench.blocks_of_fp8(weight)
    assert quantized_linear(x, blocks.numbers, blocks.scale).shape == (3, 192)


@pytest.mark.slow
@of("experts")
@pytest.mark.parametrize("options", [[], ["--sweep"]])
def test_experts_are_measured_over_the_bytes_of_those_that_are_chosen(
    bench, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "resolve_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(bench, "SWEPT", bench.SWEPT[:5])
    out = tmp_path / "report.json"
    assert bench.main(["--quick", "--rounds", "1", "--out", str(out), *options]) == 0
    measures = BenchReport.from_json(out.read_text()).measures
    if options:
        settings = {f"{name}, {rows} rows" for name in FORMATS for rows in (1, 3)}
        assert {measure.setting for measure in measures} == settings
        return
    assert {measure.setting for measure in measures} == {"1 rows", "3 rows"}
    touched = [m.value for m in measures if (m.name, m.setting) == ("touched experts", "1 rows")]
    assert touched == [2.0] * len(touched)
    read = {m.variant: m.value for m in measures if (m.name, m.setting) == ("read", "1 rows")}
    assert read["grouped_mm"] == read["batched_mm"] == 2 * 3 * 256 * 256 * 2 / 1e6
    assert read["graphkit int4"] < 0.6 * read["graphkit fp8 channel"] < 0.4 * read["grouped_mm"]


FORMATS = "bfloat16", "fp8 channel", "fp8 blocks", "int4"


@of("experts")
def test_ways_to_run_experts_compute_the_same_but_for_their_rounding(bench):
    module = bench.Experts(bench.QUICK_SHAPE, CPU)
    ((x, index, weights), *_), _ = bench.calls(module, 3, CPU)
    with torch.no_grad():
        results = {
            name: function(held, x, index, weights).float()
            for name, function, held in bench.variants(module, 3)
        }
    expected = results["grouped_mm"]
    errors = {name: (got - expected).norm() / expected.norm() for name, got in results.items()}
    assert max(errors["batched_mm"], errors["graphkit bfloat16"]) < 0.01
    assert errors["graphkit fp8 channel"] < 0.08
    assert errors["graphkit int4"] < 0.3
    assert "graphkit fp8 blocks" in errors  # it has the scale of an average output


@of("sampling")
def test_torch_computes_the_same(bench):
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2)) * 3
    ours, theirs = bench.ops(logits), bench.with_torch(logits)
    assert list(ours) == list(theirs)
    for name, act in ours.items():
        torch.testing.assert_close(act(), theirs[name](), rtol=1e-4, atol=1e-8)


@of("sampling")
def test_every_op_is_measured_at_each_size(bench, tmp_path, capsys):
    out = tmp_path / "sampling.json"
    assert bench.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    names = list(bench.ops(torch.zeros(1, 500)))
    columns = ("graphkit", "torch", "torch over graphkit")
    expected = [
        (f"500 tokens, {rows} rows", name, column)
        for rows in (1, 4) for name in names for column in columns
    ]  # fmt: skip
    assert [(each.setting, each.variant, each.name) for each in report.measures] == expected
    assert all(measure.value > 0 for measure in report.measures)
    assert "target_probs, top_k 50, top_p 0.9, min_p 0.05" in capsys.readouterr().out


@of("scale")
def test_engines_serve_all_requests_and_are_judged(bench, monkeypatch):
    small, large = bench.Work(2, 0, 96, 400), bench.Work(3, 5, 128, 800, 4)
    monkeypatch.setattr(bench, "GENERATIONS", ("v2", "v3"))
    monkeypatch.setattr(bench, "COMPARISONS", {"waiting": (small, large)})
    monkeypatch.setattr(bench, "NEW", 6)
    monkeypatch.setattr(bench, "PROMPTS", (20, 40))
    served, serve = [], bench.serve

    def noted(engine):
        served.append((engine.generation, engine.memory.total_slots))
        before = engine.stats
        time = serve(engine)
        after, running = engine.stats, engine.sizes.max_batch_size
        assert after.new_tokens - before.new_tokens >= 6 * (bench.PER_ROUND - 1) * running
        assert after.waiting + after.running <= before.waiting
        return time

    monkeypatch.setattr(bench, "serve", noted)
    with torch.no_grad():
        measures = list(bench.measures(2))
    assert served[:6] == [("v2", slots) for slots in (400, 800, 800, 400, 400, 800)]
    times = {each.setting for each in measures if each.bar is None}
    assert times == {"v2: waiting", "v3: waiting", "queue", "prompt"}
    judged = [each for each in measures if each.bar is not None]
    assert [each.bar for each in judged] == [1.3] * 4
    assert judged[0].name == f"v2: waiting: {large}, over the first"
    assert str(large) == "3 running, 5 waiting, context 128, 800 slots in pages of 4"
    by_name = {(each.setting, each.variant): each.value for each in measures}
    assert judged[-1].value == by_name["prompt", "40 tokens"] / by_name["prompt", "20 tokens"]


@of("screen")
def test_the_record_repeats_a_graph_as_further_layers_that_run_later(bench):
    graph = bench.large_record(300)
    assert len(graph.nodes) == 352
    graph.check_contents()
    starts = [node.start_us for node in graph.nodes]
    assert starts == sorted(starts)
    assert len({node.module for node in graph.nodes}) > 80


@of("screen")
def test_opening_and_every_act_are_measured(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "NUM_NODES", 100)
    out = tmp_path / "screen.json"
    assert bench.main(["--rounds", "1", "--out", str(out)]) == 0
    report = BenchReport.from_json(out.read_text())
    assert [each.name for each in report.measures] == ["open", *bench.ACTS]
    assert all(measure.value > 0 for measure in report.measures)
    assert report.settings["nodes"] == 176
    assert "open" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_a_served_shape_has_few_layers(name, monkeypatch):
    import served_shapes

    small = {
        "vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_attention_heads": 4,
        "shared_expert_intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2,
    }  # fmt: skip
    shapes = {
        each: {key: small.get(key, size) for key, size in shape.items()}
        for each, shape in served_shapes.SHAPES.items()
    }
    monkeypatch.setattr(served_shapes, "SHAPES", shapes)
    target = getattr(shape_targets, name)("cpu")
    assert "NGRAM" in target.name
    assert set(target.forwards) == {ForwardMode.TARGET_VERIFY, ForwardMode.DECODE}


def test_a_shape_has_the_whole_step():
    target = shape_target("tiny", "cpu")
    assert target.engine is not None
    with target.runner(ForwardMode.DRAFT_EXTEND_V2, device="cpu") as runner:
        runner.capture()
        assert list(runner.graphs) == [1]
