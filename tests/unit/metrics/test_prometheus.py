"""Prometheus metrics, read back with the parser of prometheus_client."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metric_families,
)
from prometheus_client.parser import text_string_to_metric_families

import graphkit as gk
from engine_target import VOCAB, TableForward, engine_target
from graphkit.engine.metrics import PrometheusCollector
from graphkit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def samples(source, **options):
    """Return the value of each sample by name and labels, as a scrape reads it."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(source, **options))
    text = generate_latest(registry).decode()
    list(open_metric_families(generate_open_metrics(registry).decode()))  # both formats are valid
    return {
        (each.name, *sorted(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


@pytest.fixture(scope="module")
def engine():
    """Return an engine that has generated for three requests and has two more."""
    with engine_target().engine(batch_sizes=[1, 3], device="cpu", backend=None) as engine:
        engine.capture()
        sampling = gk.SamplingParams(max_new_tokens=6)
        engine.generate([[1, 2, 3], [4], [5, 6]], sampling)
        for prompt in ([1], [2], [3], [4], [5]):
            engine.submit(prompt, gk.SamplingParams(max_new_tokens=20))
        engine.step()
        yield engine


@pytest.fixture
def runner():
    """Return a captured runner of sizes 1 and 4."""
    runner = gk.DecodeRunner(
        lambda inputs: gk.ForwardOutput(
            next_token_logits=inputs.input_ids[:, None].float().expand(-1, 8)
        ),
        spec=gk.SpecConfig("NONE", 0, 1, 1),
        sizes=gk.BufferSizes(4, 16, 1, 8, torch.float32),
        batch_sizes=[1],
        device="cpu",
    )
    runner.capture()
    with runner:
        yield runner


def batch_of(live):
    index = torch.arange(1, live + 1)
    return gk.TargetVerifyInputs(
        req_pool_indices=index, seq_lens=index.int(), input_ids=index, positions=index,
        out_cache_loc=index,
    )  # fmt: skip


def test_an_engine_has_the_counts_of_its_stats(engine):
    found, stats = samples(engine, model_name="table"), engine.stats
    label = ("model_name", "table")
    assert found["graphkit:generation_tokens_total", label] == stats.new_tokens > 18
    assert found["graphkit:num_requests_running", label] == 3
    assert found["graphkit:num_requests_waiting", label] == 2
    assert 0 < found["graphkit:kv_cache_usage_perc", label] <= 1
    verifies = found["graphkit:spec_decode_num_drafts_total", label]
    assert verifies == stats.num_verifies
    width = engine.spec.num_draft_tokens
    drafts = found["graphkit:spec_decode_num_draft_tokens_total", label]
    assert drafts == verifies * (width - 1)
    accepted = found["graphkit:spec_decode_num_accepted_tokens_total", label]
    assert accepted == pytest.approx(verifies * (stats.accept_length - 1))
    assert found["graphkit:spec_accept_length_count", label] == verifies
    assert found["graphkit:spec_accept_length_sum", label] == accepted + verifies
    first = found["graphkit:spec_accept_length_bucket", ("le", "1.0"), label]
    assert first == stats.accepted_lengths.get(1, 0)
    replays = {
        key: value for key, value in found.items() if key[0] == "graphkit:graph_replays_total"
    }
    assert sum(replays.values()) == sum(stats.replays.values()) > 0


def test_requests_are_counted_by_reason_and_their_times_by_bucket():
    with engine_target().engine(batch_sizes=[3], device="cpu", backend=None) as engine:
        requests = [engine.submit([1, 2], gk.SamplingParams(max_new_tokens=9)) for _ in range(5)]
        engine.step()
        engine.abort(requests[0])
        engine.abort(requests[4], gk.FinishReason.STOP_STRING)
        while engine.has_work:
            engine.step()
        found, stats = samples(engine, prefix="vllm"), engine.stats
        between = stats.inter_token_latency
        with gk.EngineThread(engine) as thread:
            assert samples(thread, prefix="vllm") == found
    assert found["vllm:prompt_tokens_total",] == 2 * 4
    assert found["vllm:num_preemptions_total",] == 0
    ended = {"stop": 1, "length": 3, "abort": 1, "error": 0}
    for reason, count in ended.items():
        assert found["vllm:request_success_total", ("finished_reason", reason)] == count
    for name, times, count in (
        ("time_to_first_token", stats.time_to_first_token, 4),
        ("inter_token_latency", between, between.counts.total()),
        ("e2e_request_latency", stats.latency, 5),
        ("request_queue_time", stats.queue_time, 4),
    ):
        name = f"vllm:{name}_seconds"
        assert found[f"{name}_count",] == found[f"{name}_bucket", ("le", "+Inf")] == count > 0
        assert found[f"{name}_sum",] == times.seconds > 0
        assert found[f"{name}_bucket", ("le", "300.0")] == count


def test_the_prefix_gives_the_names_of_vllm():
    """The counters that ``vllm bench serve`` reads before and after a run."""
    label, prefix = ("model_name", "table"), "vllm:spec_decode_num"
    with wide_engine("v3") as engine:
        engine.capture()
        engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=64))
        found, stats = samples(engine, prefix="vllm", model_name="table"), engine.stats
    assert all(name.startswith("vllm:") for name, *_ in found)
    accepted = [
        found[f"{prefix}_accepted_tokens_per_pos_total", label, ("position", str(position))]
        for position in range(7)
    ]
    assert sum(accepted) == found[f"{prefix}_accepted_tokens_total", label] > 0
    assert accepted[0] == found[f"{prefix}_drafts_total", label] - stats.accepted_lengths.get(1, 0)
    assert accepted == sorted(accepted, reverse=True)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert (f"vllm:{name}", label) in found


def test_the_dashboard_of_grafana_reads_metrics_that_exist(engine):
    board = json.loads((ROOT / "docs" / "static" / "grafana.json").read_text())
    names = {name for name, *_ in samples(engine, prefix="graphkit", model_name="table")}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) == len({str(panel["gridPos"]) for panel in board["panels"]})
    variables = {variable["name"] for variable in board["templating"]["list"]}
    read = set()
    for target in (target for panel in board["panels"] for target in panel["targets"]):
        expression = target["expr"].replace("${prefix}", "graphkit")
        read.update(re.findall(r"graphkit:\w+", expression))
        assert set(re.findall(r"\$\{?(\w+)", expression)) <= variables | {"__rate_interval"}
        assert expression.count("(") == expression.count(")")
    # No step of this engine ran without a graph, and it has one draft length.
    assert read - names == {
        f"graphkit:{name}_total"
        for name in ("eager_steps", "spec_decode_plain_seconds", "spec_decode_step_seconds")
    }
    assert {"time_to_first_token_seconds_bucket", "request_success_total"} <= {
        name.removeprefix("graphkit:") for name in read
    }


@pytest.mark.parametrize("prefix", ["", "vllm:", "1", None])
def test_a_prefix_is_a_name(engine, prefix):
    with pytest.raises(ConfigError, match=r"PrometheusCollector\.prefix"):
        PrometheusCollector(engine, prefix=prefix)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"mode": "test"}, "cannot have the label 'mode'"),
        ({"le": "1"}, "cannot have the label 'le'"),
        ({"a-b": "c"}, "cannot have the label 'a-b'"),
        ({"__name": "c"}, "cannot have the label '__name'"),
        ({"rank": 0}, r"PrometheusCollector\.rank must be a string"),
    ],
)
def test_labels_that_a_scrape_could_not_show_are_refused(runner, labels, reason):
    with pytest.raises(ConfigError, match=reason):
        PrometheusCollector(runner, **labels)


def test_no_label_of_a_metric_can_be_given_to_all(engine):
    families = PrometheusCollector(engine).collect()
    names = {name for family in families for sample in family.samples for name in sample.labels}
    assert {"mode", "position", "le"} <= names
    for name in names:
        with pytest.raises(ConfigError, match=f"cannot have the label '{name}'"):
            PrometheusCollector(engine, **{name: "a"})


def test_a_runner_has_its_replays_pads_and_fallbacks(runner):
    for live in (1, 2, 3, 3):
        runner.run(batch_of(live))
    runner.run(batch_of(5))
    found = samples(runner)
    mode = ("mode", "DECODE")
    assert found["graphkit:graph_replays_total", ("batch_size", "1"), mode] == 1
    assert found["graphkit:graph_replays_total", ("batch_size", "4"), mode] == 3
    assert found["graphkit:padded_rows_total", mode] == runner.stats.padded_rows > 0
    (reason,) = runner.stats.fallbacks
    assert found["graphkit:eager_steps_total", mode, ("reason", reason)] == 1
    assert found["graphkit:batch_size_bucket", ("le", "1.0"), mode] == 1
    assert found["graphkit:batch_size_bucket", ("le", "4.0"), mode] == 4
    assert found["graphkit:batch_size_sum", mode] == 9
    pool = sum(graph.pool_bytes for graph in runner.graphs.values())
    assert found["graphkit:graph_pool_bytes", mode] == pool > 0
    runner.close()
    after = samples(runner)
    assert ("graphkit:graph_pool_bytes", mode) not in after
    assert after["graphkit:batch_size_count", mode] == 4


def test_the_memory_of_a_step_is_that_of_its_loops_too(engine):
    (runner,) = engine.runners
    replays = sum(graph.pool_bytes for graph in runner.graphs.values())
    found = samples(engine)["graphkit:graph_pool_bytes", ("mode", "STEP")]
    assert found == engine.estimate().graph_pools > 2 * replays


@pytest.mark.parametrize("generation", ["v2", "v3"])
def test_buckets_hold_paths_longer_than_the_draft_steps(generation):
    """The width of verify limits a path of n-gram drafts, not ``num_steps``."""
    with wide_engine(generation) as engine:
        engine.capture()
        engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=64))
        found, stats = samples(engine), engine.stats
    assert max(stats.accepted_lengths) == engine.max_path == 8
    buckets = {
        dict(labels)["le"]: value
        for name, *labels in found
        for value in [found[name, *labels]]
        if name == "graphkit:spec_accept_length_bucket"
    }
    assert list(buckets) == [*(f"{bound}.0" for bound in range(1, 9)), "+Inf"]
    assert buckets["8.0"] == buckets["+Inf"] > buckets["7.0"]
    assert found["graphkit:spec_decode_num_draft_tokens_total",] == 7 * stats.num_verifies
    mode = ("mode", "STEP" if generation == "v3" else "TARGET_VERIFY")
    assert found["graphkit:batch_size_count", mode] == stats.replays[mode[1]] > 0


@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_counts_by_draft_length(generation):
    spec = gk.SpecConfig("NGRAM", (0, 1, 3), 1, 4)
    target = engine_target(generation=generation, spec=spec)
    with target.engine(batch_sizes=[1, 3], device="cpu", backend=None) as engine:
        engine.capture()
        engine.generate([[1, 2, 3], [4], [5, 6]], gk.SamplingParams(max_new_tokens=60))
        found, stats = samples(engine), engine.stats
    by_drafts = {
        int(dict(labels)["drafts"]): value
        for (name, *labels), value in found.items()
        if name == "graphkit:spec_decode_num_steps_total"
    }
    assert by_drafts == stats.drafted_lengths
    assert sum(by_drafts.values()) == stats.num_verifies
    drafted = found["graphkit:spec_decode_num_draft_tokens_total",]
    assert drafted == sum(drafts * steps for drafts, steps in by_drafts.items())
    plain, taken = (
        found[f"graphkit:spec_decode_{name}_seconds_total",] for name in ("plain", "step")
    )
    assert plain / taken == stats.gain_over_plain > 0


class Eight(gk.CustomSpecAlgorithm):
    """Verifies eight rows, whatever the draft steps are."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return 8


def wide_engine(generation):
    requests = gk.ReqToTokenPool(1, 160, "cpu")
    pool = gk.MHATokenToKVPool(160, 1, torch.float32, 1, 1, 1, "cpu")
    return gk.SpeculativeEngine(
        gk.EngineModel(TableForward(pool, "cpu"), gk.SdpaAttention(requests, pool)),
        gk.NgramDrafter(),
        spec=gk.SpecConfig(Eight("EIGHT"), 3, 1, 4),
        sizes=gk.BufferSizes(1, 160, 1, VOCAB, torch.float32),
        generation=generation,
        device="cpu",
    )


def test_refusals(monkeypatch, runner):
    with pytest.raises(ConfigError, match="source must be a Runner, a SpeculativeEngine or an"):
        PrometheusCollector(torch.nn.Linear(1, 1))
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ConfigError, match=r"needs prometheus_client: install graphkit-cuda\[metrics\]"
    ):
        PrometheusCollector(runner)
