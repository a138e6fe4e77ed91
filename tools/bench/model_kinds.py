"""Tokens per second of models of transformers, through graphkit and by transformers itself.

Random weights in bfloat16, greedy decoding, batches of one request and of eight. All ways of a kind
run in one process, which runs no other kind, since compiled code and process state of one kind
would change the next. Before that, all kinds run side by side without being measured, which fills
the caches of torch and Triton. Then each GPU of the machine measures one kind at a time. The report
is written after each kind. ``--add`` keeps the kinds that an earlier report of the same device and
versions has completely, and measures the others.

- graphkit: device loops (v3), plain and with NGRAM drafts. Random weights repeat themselves, so
  NGRAM shows what long drafts cost and gain, not what a trained model accepts.
- generate: dynamic cache, static cache (compiled by transformers), and continuous batching, which
  captures CUDA graphs and keeps its manager between calls.

    python tools/bench/model_kinds.py --out tools/bench/results/model_kinds.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import torch
import transformers
from report_file import add_out, write_report
from rich.console import Console

from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure
from graphkit.views import bench_view

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from small_models import DIFFERENT_KINDS, random_model

SIZES = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "ffn_dim": 4096,
    "word_embed_proj_dim": 1024, "max_position_embeddings": 2048, "moe_intermediate_size": 512,
    "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
}  # fmt: skip
SIZES_OF_KIND = {"deepseek_v3": {"num_key_value_heads": 16}}
"""Sizes that differ: latent attention has as many key heads as query heads."""
_PROMPT, _NEW = 64, 128
_BATCHES = (1, 8)
_COMPILED = ("generate, static cache", "graphkit, NONE", "graphkit, NGRAM")
"""Ways that compile. Continuous batching compiles nothing and takes most of the memory of a GPU."""
_LAST_WAY = "graphkit, NGRAM"
"""The way that ``ways`` yields last: a kind that has it at the last batch size is complete."""
_KIND_S = 150.0
"""Time limit of a kind."""
_SLOW_S = 2.0
"""A second run that takes longer than this is the result, with the graphs that it records: no
further run is measured."""


def ways(kind: str, batch: int, device: torch.device) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield each way to generate: its name, and a function that returns the number of tokens."""
    import graphkit as gk
    from graphkit import models

    changes = SIZES_OF_KIND.get(kind, {})
    model = random_model(kind, SIZES, std=0.03, dtype=torch.bfloat16, **changes).to(device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (batch, _PROMPT), generator=generator)
    prompts, on_device = ids.tolist(), ids.to(device)

    def generate(**options: object) -> int:
        out = model.generate(
            on_device, attention_mask=torch.ones_like(on_device), do_sample=False, pad_token_id=0,
            eos_token_id=None, max_new_tokens=_NEW, **options,
        )  # fmt: skip
        return batch * (out.shape[1] - _PROMPT)

    def continuous() -> int:
        outputs = model.generate_batch(
            prompts, max_new_tokens=_NEW, progress_bar=False, persistent_manager=True
        )
        return sum(len(each.generated_tokens) for each in outputs.values())

    yield "generate, dynamic cache", generate
    yield "generate, static cache", lambda: generate(cache_implementation="static")
    yield "generate, continuous batching", continuous
    model.destroy_cached_continuous_batching_manager()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    loaded = models.load(model)
    for algorithm in ("NONE", "NGRAM"):
        with loaded.engine(
            algorithm=algorithm, max_batch_size=batch, max_context_len=_PROMPT + _NEW + 8,
            generation="v3", steps_per_launch=64, batch_sizes=[batch],
        ) as engine:  # fmt: skip
            engine.capture()

            def run(engine: gk.SpeculativeEngine = engine) -> int:
                sampling = gk.SamplingParams(max_new_tokens=_NEW)
                return sum(len(r.output_ids) for r in engine.generate(prompts, sampling))

            yield f"graphkit, {algorithm}", run


def measured(kind: str, device: torch.device, rounds: int) -> Iterator[dict[str, object]]:
    """Yield the tokens per second of each way; of one that fails, the error.

    Without rounds, ways that compile run once.
    """
    for batch in _BATCHES:
        for name, run in ways(kind, batch, device):
            result: dict[str, object] = {"setting": f"{kind}, {batch} requests", "variant": name}
            try:
                if not rounds:
                    if name in _COMPILED:
                        run()
                    continue
                run()  # compiles
                value = speed(run, batch, device)  # records graphs
                if batch * _NEW / value < _SLOW_S:
                    value = max(speed(run, batch, device) for _ in range(rounds))
                result["value"] = value
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield result


def speed(run: Callable[[], int], batch: int, device: torch.device) -> float:
    """Return the tokens per second of a run."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    tokens = run()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    if tokens != batch * _NEW:
        raise RuntimeError(f"{tokens} tokens instead of {batch * _NEW}")
    return tokens / seconds


def run_kind(kind: str, rounds: int, seconds: float, gpu: int) -> tuple[str, str]:
    """Run a kind in a process; return what it printed, and how it failed, empty if it did not."""
    command = [sys.executable, __file__, "--kind", kind, "--rounds", str(rounds)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with processes that compile for it
        printed, _ = process.communicate()
        return printed, f"{kind}: stopped after {seconds:.0f} s"
    return printed, f"{kind}: exit code {process.returncode}" if process.returncode else ""


def run_kinds(
    kinds: Sequence[str], rounds: int, seconds: float, processes: int, gpus: int
) -> Iterator[tuple[str, str]]:
    """Run kinds, ``processes`` at a time, and yield what ``run_kind`` returns as they end."""
    end, free = time.monotonic() + seconds, SimpleQueue[int]()
    for number in range(processes):
        free.put(number % gpus)

    def run(kind: str) -> tuple[str, str]:
        gpu = free.get()
        try:
            left = min(_KIND_S, end - time.monotonic())
            if left < _KIND_S / 10:
                return "", f"{kind}: not started"
            return run_kind(kind, rounds, left, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(processes) as pool:
        for future in as_completed([pool.submit(run, kind) for kind in kinds]):
            yield future.result()


def report(
    kinds: Sequence[str], rounds: int, seconds: float, out: Path | None, earlier: BenchReport
) -> BenchReport:
    """Measure every kind in a process of its own, one at a time on each GPU; add to a report."""
    result, gpus = earlier, torch.cuda.device_count()
    for printed, failure in run_kinds(kinds, rounds, seconds, gpus, gpus):
        measures, failures = list(result.measures), [result.settings["failures"], failure]
        for line in filter(lambda text: text.startswith("{"), printed.splitlines()):
            found = json.loads(line)
            if "error" in found:
                failures.append(f"{found['setting']}, {found['variant']}: {found['error']}")
            else:
                measures.append(Measure(name="tokens per second", unit="1/s", **found))
        failed = "; ".join(str(each) for each in failures if each)
        settings = {**result.settings, "failures": failed}
        result = replace(result, measures=tuple(measures), settings=settings)
        write_report(result, out)
    return result


def empty_report() -> BenchReport:
    """Return a report of this device without results."""
    return BenchReport(
        name="model_kinds: tokens per second of models of transformers",
        environment=environment(torch.device("cuda", 0)),
        settings={
            "prompt": _PROMPT, "new tokens": _NEW, "layers": SIZES["num_hidden_layers"],
            "transformers": transformers.__version__, "failures": "",
        },
        measures=(),
    )  # fmt: skip


def earlier_report(path: Path) -> BenchReport:
    """Return the complete kinds of a report, to which others can be added.

    Raises:
        ValueError: The report is of another device, version or size.
    """
    found, here = BenchReport.from_json(path.read_text()), empty_report()
    settings = {**found.settings, "failures": ""}
    if replace(found, measures=(), settings=settings) != here:
        raise ValueError(f"{path} is a report of another device, version or size.")
    complete = complete_kinds(found)
    failures = str(found.settings["failures"]).split("; ")
    settings["failures"] = "; ".join(each for each in failures if kind_of(each) in complete)
    measures = tuple(each for each in found.measures if kind_of(each.setting) in complete)
    return replace(here, measures=measures, settings=settings)


def kind_of(text: str) -> str:
    """Return the kind that a setting or a failure is about."""
    return re.split("[,:]", text, maxsplit=1)[0]


def complete_kinds(report: BenchReport) -> set[str]:
    """Return the kinds of a report whose last way at the last batch size was measured."""
    last = f"{_BATCHES[-1]} requests", _LAST_WAY
    return {
        kind_of(each.setting)
        for each in report.measures
        if each.setting.endswith(last[0]) and each.variant == last[1]
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument(
        "--rounds", type=int, default=2, help="repetitions; the best counts; 0 only compiles (2)"
    )
    parser.add_argument("--seconds", type=float, default=560, help="time for all kinds (560)")
    parser.add_argument(
        "--compile", type=int, default=10, metavar="N",
        help="kinds that compile side by side before all are measured; 0 for none (10)",
    )  # fmt: skip
    parser.add_argument(
        "--add", action="store_true", help="keep the kinds that --out has, and measure the others"
    )
    parser.add_argument("--kinds", nargs="+", default=list(DIFFERENT_KINDS), help="model types")
    parser.add_argument("--kind", help="print the results of one kind, a JSON object per line")
    options = parser.parse_args(argv)
    if options.kind:
        with torch.no_grad():
            for result in measured(options.kind, torch.device("cuda", 0), options.rounds):
                print(json.dumps(result), flush=True)
        return 0
    if options.add and options.out is None:
        parser.error("--add needs --out, the report to add to.")
    earlier = earlier_report(options.out) if options.add else empty_report()
    kinds = [each for each in options.kinds if each not in complete_kinds(earlier)]
    if options.compile:
        gpus = torch.cuda.device_count()
        for _ in run_kinds(kinds, 0, _KIND_S, options.compile, gpus):
            pass
    found = report(kinds, options.rounds, options.seconds, options.out, earlier)
    Console(width=120).print(bench_view(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
