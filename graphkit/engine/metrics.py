"""Counts of runners and engines as Prometheus metrics.

Names and meanings of an engine's metrics are those of vLLM, of which SGLang shares some:
https://docs.vllm.ai/en/stable/usage/metrics/ and
https://docs.sglang.io/references/production_metrics.html
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphkit.config import require_type
from graphkit.engine import EngineThread, FinishReason, SpeculativeEngine
from graphkit.engine.stats import TIME_BOUNDS, EngineStats
from graphkit.errors import ConfigError, short_repr
from graphkit.records import ReplayStats
from graphkit.runners import Runner

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_PREFIX = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
"""A name of Prometheus up to its colon: https://prometheus.io/docs/concepts/data_model/"""
_LABEL = re.compile("[a-zA-Z][a-zA-Z0-9_]*")
_OWN_LABELS = "mode", "batch_size", "reason", "finished_reason", "position", "drafts", "le"
"""Labels that some of the metrics have."""
_FINISHED = {
    "stop": (FinishReason.STOP, FinishReason.STOP_STRING),
    "length": (FinishReason.LENGTH, FinishReason.CONTEXT),
    "abort": (FinishReason.ABORTED, FinishReason.DEADLINE),
    "error": (FinishReason.REFUSED, FinishReason.FAILED),
}
"""Reasons by their label in vLLM."""


class PrometheusCollector:
    """A collector of ``prometheus_client``: reads the counts of a runner or an engine on demand.

    A scrape reads counters of the host. Register it, and remove it before the runner is dropped::

        REGISTRY.register(PrometheusCollector(engine, model_name="llama"))

    Metrics of a runner, by ``mode``:

    - ``graph_replays_total`` by captured ``batch_size``, and ``padded_rows_total``;
    - ``eager_steps_total`` by ``reason``: steps that ran without a graph;
    - ``batch_size``: histogram of live requests per replay, with a bucket per captured size;
    - ``graph_pool_bytes``: memory of the captured graphs, loops included.

    Metrics of an engine, besides the metrics of its runners:

    - ``num_requests_running``, ``num_requests_waiting``, and ``kv_cache_usage_perc``: slots of the
      KV pools that requests hold, 0 to 1;
    - ``prompt_tokens_total`` and ``generation_tokens_total``;
    - ``request_success_total`` by ``finished_reason``: requests that have ended, by ``stop``,
      ``length``, ``abort`` or ``error``;
    - ``num_preemptions_total``;
    - histograms in seconds: ``time_to_first_token_seconds``, ``inter_token_latency_seconds``
      between two outputs of a request, ``e2e_request_latency_seconds`` and
      ``request_queue_time_seconds``; see ``EngineStats``;
    - ``spec_decode_num_drafts_total``: verify steps with drafts, once per request;
      ``spec_decode_num_draft_tokens_total`` and ``spec_decode_num_accepted_tokens_total``: drafts
      that they verified and accepted;
    - ``spec_decode_num_accepted_tokens_per_pos_total`` by ``position``: verify steps that accepted
      the draft at this position, from 0;
    - ``spec_decode_num_steps_total``: verify steps by the number of their ``drafts``, with several
      draft lengths;
    - ``spec_decode_plain_seconds_total`` and ``spec_decode_step_seconds_total``: the speed of the
      steps over plain decoding is their ratio; see ``EngineStats.gain_over_plain``;
    - ``spec_accept_length``: histogram of tokens per verify step, the bonus token included.

    Args:
        source: A runner, an engine, or an ``EngineThread``, which is read between two steps. A
            runner or an engine without it must not run on another thread during a scrape.
        prefix: What precedes the colon in each name: ``vllm`` serves dashboards and the benchmark
            client of vLLM.
        **labels: Labels of all metrics, such as ``model_name``.

    Raises:
        ConfigError: ``source`` has another type, the prefix or a label is no name, a label is one
            of a metric's own or has a value that is no string, or ``prometheus_client`` is not
            installed.
    """

    def __init__(
        self,
        source: Runner[Any, Any] | SpeculativeEngine | EngineThread,
        *,
        prefix: str = "graphkit",
        **labels: str,
    ) -> None:
        require_type(
            "PrometheusCollector", "source", source, (Runner, SpeculativeEngine, EngineThread),
            "a Runner, a SpeculativeEngine or an EngineThread",
        )  # fmt: skip
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError(
                "PrometheusCollector needs prometheus_client: install graphkit-cuda[metrics].",
                field="source",
            ) from error
        require_type("PrometheusCollector", "prefix", prefix, str, "a name such as 'vllm'")
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(
                "PrometheusCollector.prefix must be letters, digits and _, got "
                f"{short_repr(prefix)}.",
                field="prefix",
            )
        for name, value in labels.items():
            require_type("PrometheusCollector", name, value, str, "a string")
            if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
                raise ConfigError(
                    f"PrometheusCollector cannot have the label {short_repr(name)}: it must be "
                    f"letters, digits and _, and none of {', '.join(_OWN_LABELS)}.",
                    field=name,
                )
        self._source, self._core, self._labels = source, core, labels
        self._prefix = f"{prefix}:"

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with its present value."""
        source = self._source
        if isinstance(source, EngineThread):
            yield from source.call(lambda engine: [*self._of_engine(engine)])
        elif isinstance(source, SpeculativeEngine):
            yield from self._of_engine(source)
        else:
            yield from self._runner_metrics([source])

    def _of_engine(self, engine: SpeculativeEngine) -> Iterator[Metric]:
        yield from self._engine_metrics(engine, engine.stats)
        yield from self._runner_metrics(engine.runners)

    def _runner_metrics(self, runners: Iterable[Runner[Any, Any]]) -> Iterator[Metric]:
        # With several draft lengths, several runners have the same mode.
        by_mode: dict[str, list[Runner[Any, Any]]] = {}
        for runner in runners:
            by_mode.setdefault(runner.label, []).append(runner)
        stats = {mode: _sum([runner.stats for runner in same]) for mode, same in by_mode.items()}
        text = "Graph replays by captured batch size."
        replays = self._counter("graph_replays", text, "mode", "batch_size")
        text = "Rows (tokens) of padding that replays computed."
        rows = self._counter("padded_rows", text, "mode")
        text = "Steps that ran without a graph, by reason."
        eager = self._counter("eager_steps", text, "mode", "reason")
        pool = self._gauge("graph_pool_bytes", "Memory of the captured graphs.", "mode")
        sizes = self._histogram("batch_size", "Live requests per replay.", "mode")
        for mode, same in by_mode.items():
            for size, count in stats[mode].replays_by_size.items():
                replays.add(count, mode, size)
            rows.add(stats[mode].padded_rows, mode)
            for reason, count in stats[mode].fallbacks.items():
                eager.add(count, mode, reason)
            if all(runner.status == "captured" for runner in same):
                pool.add(sum(runner.graph_bytes for runner in same), mode)
            sizes.add_counts(stats[mode].live_sizes, same[0].table, mode)
        yield from (samples.family for samples in (replays, rows, eager, pool, sizes))

    def _engine_metrics(self, engine: SpeculativeEngine, stats: EngineStats) -> Iterator[Metric]:
        drafted, accepted = stats.drafted_lengths, stats.accepted_lengths
        gauges = {
            "num_requests_running": ("Requests that run.", stats.running),
            "num_requests_waiting": ("Requests that wait for memory.", stats.waiting),
            "kv_cache_usage_perc": ("KV slots that requests hold, 0 to 1.", stats.kv_usage),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text).add(value).family
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.new_tokens),
            "num_preemptions": (
                "Times that a request had to give its KV slots to earlier ones.",
                stats.preemptions,
            ),
            "spec_decode_num_drafts": (
                "Verify steps with drafts, once per request.",
                sum(count for drafts, count in drafted.items() if drafts),
            ),
            "spec_decode_num_draft_tokens": (
                "Drafts that were verified.",
                stats.num_draft_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Drafts that were accepted.",
                stats.num_accepted_tokens - stats.num_verifies,  # without bonus tokens
            ),
        }
        if stats.step_seconds:
            counters["spec_decode_step_seconds"] = "Time of the steps.", stats.step_seconds
            text = "Time of plain decoding for the tokens of these steps."
            counters["spec_decode_plain_seconds"] = text, stats.plain_seconds
        for name, (text, value) in counters.items():
            yield self._counter(name, text).add(value).family
        text = "Requests that have ended, by reason."
        success = self._counter("request_success", text, "finished_reason")
        for label, reasons in _FINISHED.items():
            success.add(sum(stats.finished.get(reason, 0) for reason in reasons), label)
        yield success.family
        times = {
            "time_to_first_token_seconds": (
                "Submission to first token.",
                stats.time_to_first_token,
            ),
            "inter_token_latency_seconds": ("Between two outputs.", stats.inter_token_latency),
            "e2e_request_latency_seconds": ("Submission to end.", stats.latency),
            "request_queue_time_seconds": ("Submission to admission.", stats.queue_time),
        }
        for name, (text, histogram) in times.items():
            samples = self._histogram(name, f"{text} In seconds.")
            samples.add_counts(histogram.counts, TIME_BOUNDS[:-1], total=histogram.seconds)
            yield samples.family
        text = "Verify steps that accepted the draft at a position, from 0."
        by_position = self._counter("spec_decode_num_accepted_tokens_per_pos", text, "position")
        for position in range(engine.max_path - 1):
            count = sum(n for length, n in accepted.items() if length > position + 1)
            by_position.add(count, position)
        yield by_position.family
        if engine.spec.is_adaptive:
            text = "Verify steps by the number of their drafts, once per request."
            steps = self._counter("spec_decode_num_steps", text, "drafts")
            for drafts, count in drafted.items():
                steps.add(count, drafts)
            yield steps.family
        text = "Tokens per verify step and request, the bonus token included."
        lengths = self._histogram("spec_accept_length", text)
        yield lengths.add_counts(accepted, range(1, engine.max_path + 1)).family

    def _counter(self, name: str, text: str, *labels: str) -> _Samples:
        return self._samples(self._core.CounterMetricFamily, name, text, labels)

    def _gauge(self, name: str, text: str, *labels: str) -> _Samples:
        return self._samples(self._core.GaugeMetricFamily, name, text, labels)

    def _histogram(self, name: str, text: str, *labels: str) -> _Samples:
        return self._samples(self._core.HistogramMetricFamily, name, text, labels)

    def _samples(self, family_type: Any, name: str, text: str, labels: Sequence[str]) -> _Samples:
        family = family_type(self._prefix + name, text, labels=[*self._labels, *labels])
        return _Samples(family, [*self._labels.values()])


class _Samples:
    """Adds samples to a metric.

    Args:
        family: The metric.
        shared: Values of the labels that all metrics have.
    """

    def __init__(self, family: Any, shared: Sequence[str]) -> None:
        self.family, self._shared = family, shared

    def add(self, value: float, *labels: object) -> _Samples:
        """Add a value with the values of its own labels."""
        self.family.add_metric([*self._shared, *map(str, labels)], value)
        return self

    def add_counts(
        self,
        counts: Mapping[int, int] | Mapping[float, int],
        bounds: Iterable[float],
        *labels: object,
        total: float | None = None,
    ) -> _Samples:
        """Add a histogram of counts by value, with the upper bounds of its buckets.

        ``total`` is the sum of the values, if those of ``counts`` are rounded.
        """
        buckets = [
            (str(float(bound)), sum(count for value, count in counts.items() if value <= bound))
            for bound in bounds
        ]
        self.family.add_metric(
            [*self._shared, *map(str, labels)],
            [*buckets, ("+Inf", sum(counts.values()))],
            sum(value * count for value, count in counts.items()) if total is None else total,
        )
        return self


def _sum(stats: Sequence[ReplayStats]) -> ReplayStats:
    """Return the counts of several runners together."""
    if len(stats) == 1:
        return stats[0]

    def added(name: str) -> Counter[Any]:
        return sum((Counter(getattr(runner_stats, name)) for runner_stats in stats), Counter())

    return ReplayStats(
        replays=sum(runner_stats.replays for runner_stats in stats),
        padded_rows=sum(runner_stats.padded_rows for runner_stats in stats),
        fallbacks=added("fallbacks"),
        replays_by_size=added("replays_by_size"),
        live_sizes=added("live_sizes"),
    )
