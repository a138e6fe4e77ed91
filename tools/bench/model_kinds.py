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

With ``--hybrids``, the steps of models with recurrent layers are measured over their bytes, in the
shapes of published models: a step of one row per request, one of four rows (a verify), and a
prompt. The time of a step is that of its graph and of the commit of its last rows. The bytes are

- the weights, those of experts as often as that many rows choose them at random, without the
  embedding;
- for each request and recurrent layer: the state read by the step, then read and written by the
  commit; what is kept of each row, written and read (``graphkit/engine/kv/scanned.py``); the state
  of the convolution, read, and written after each row, then read and written by the commit.

    python tools/bench/model_kinds.py --hybrids --out tools/bench/results/hybrids.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory

import torch
import transformers
from decode_graphs import TorchGraph
from rich.console import Console
from timing import show

from graphkit.cli.benchmarks import copy_bandwidth
from graphkit.graphs import environment
from graphkit.models import shapes
from graphkit.models.model import TransformersModel
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


HYBRIDS = {
    "Qwen3-Next, 12 layers": {  # Qwen/Qwen3-Next-80B-A3B, a quarter of its layers
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144, "full_attention_interval": 4,
    },
    "Mamba 2 2.7B": {  # state-spaces/mamba2-2.7b
        "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64,
        "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2,
        "conv_kernel": 4, "chunk_size": 256, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes with recurrent layers, as in the ``config.json`` of published models."""
_VERIFY_ROWS, _HYBRID_BATCHES, _HYBRID_PROMPTS = 4, (1, 8, 64), (512, 8192)


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


def hybrid_report(rounds: int, device: torch.device) -> BenchReport:
    """Measure steps and prompts of each of ``HYBRIDS``."""
    measures: list[Measure] = []
    for name, sizes in HYBRIDS.items():
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(sizes))
            loaded = shapes.random_model(Path(folder), "NONE", device=device)
        for batch in _HYBRID_BATCHES:
            measures += hybrid_steps(name, loaded, batch, rounds, device)
        measures += hybrid_prompts(name, loaded, rounds, device)
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
    return BenchReport(
        name="model_kinds: steps of hybrids over their bytes",
        environment=environment(device),
        settings={
            "context": _PROMPT,
            "dtype": "bfloat16",
            "transformers": transformers.__version__,
        },
        measures=tuple(measures),
    )


def hybrid_steps(
    name: str, loaded: TransformersModel, batch: int, rounds: int, device: torch.device
) -> Iterator[Measure]:
    """Measure a decode step and a verify of ``_VERIFY_ROWS`` rows."""
    speed_of_copy, decode_ms = copy_bandwidth(device), 0.0
    for rows in (1, _VERIFY_ROWS):
        algorithm = "NONE" if rows == 1 else "NGRAM"
        spec = {} if rows == 1 else {"num_steps": rows - 1}
        with loaded.engine(
            algorithm=algorithm, max_batch_size=batch, max_context_len=_PROMPT + 64,
            batch_sizes=[batch], **spec,
        ) as engine:  # fmt: skip
            verifier = engine._spec_step.verifier
            runner, states = verifier.runner, verifier.recurrent_state
            runner.capture()
            inputs = runner.sample_batch(batch, seed=0)
            last = torch.full((batch,), rows - 1, device=device)
            requests = torch.as_tensor(inputs.req_pool_indices).to(device)
            commit_ms = median_ms(TorchGraph(partial(states.commit, requests, last)).launch, rounds)
            ms = median_ms(partial(runner.replay, inputs), rounds) + commit_ms
        read = hybrid_bytes(loaded, batch, rows)
        cell = partial(Measure, setting=f"{name}, {batch} requests", variant=f"{rows} rows")
        yield cell(name="step and commit", value=ms, unit="ms")
        yield cell(name="commit", value=commit_ms, unit="ms")
        bound = read / speed_of_copy * 1e3
        bar = 1.30 if rows == 1 and batch in (1, 8) else None
        yield cell(name="over its bytes", value=ms / bound, unit="x", bar=bar)
        if rows == 1:
            decode_ms, decode_bytes = ms, read
        else:
            further = (read - decode_bytes) / speed_of_copy * 1e3
            yield cell(name="over one row and further bytes", value=ms / (decode_ms + further),
                       unit="x", bar=1.15)  # fmt: skip


def hybrid_prompts(
    name: str, loaded: TransformersModel, rounds: int, device: torch.device
) -> Iterator[Measure]:
    """Measure the time to the first token beside an eager forward of transformers."""
    import graphkit as gk

    for length in _HYBRID_PROMPTS:
        ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
        with loaded.engine(
            algorithm="NONE", max_batch_size=1, max_context_len=length + 64, batch_sizes=[1],
            chunked_prefill_size=length,
        ) as engine:  # fmt: skip
            sampling = gk.SamplingParams(max_new_tokens=1)
            own = median_s(partial(engine.generate, ids.tolist(), sampling), rounds)
        has_option = "logits_to_keep" in signature(loaded.original.forward).parameters
        options = {"logits_to_keep": 1} if has_option else {}
        forward = partial(loaded.original, ids.to(device), **options)
        theirs = median_s(forward, rounds)
        cell = partial(Measure, setting=f"{name}, prompt of {length}", unit="ms")
        yield cell(name="first token", value=own * 1e3, variant="graphkit")
        yield cell(name="first token", value=theirs * 1e3, variant="eager forward")


def hybrid_bytes(loaded: TransformersModel, batch: int, rows: int) -> float:
    """Return the bytes that a step and its commit read and write."""
    model, tokens = loaded.model, batch * rows
    config = model.config.get_text_config(decoder=True)
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            total += parameter.nbytes if config.tie_word_embeddings else 0
        elif ".experts." in name:
            chosen = config.num_experts_per_tok / config.num_experts
            total += parameter.nbytes * (1 - (1 - chosen) ** tokens)
        else:
            total += parameter.nbytes
    for layer in loaded.layout.recurrent:
        sizes = {
            kind: math.prod(shape) * layer.dtypes[kind].itemsize
            for kind, shape in layer.shapes.items()
        }
        total += batch * sizes.get("conv0", 0) * (1 + rows + 2)
        if layer.recurrence is not None:
            state = sizes[layer.recurrence.kind]
            total += batch * (3 * state + 2 * rows * 4 * layer.recurrence.update)
    return total


def median_ms(act: Callable[[], object], rounds: int) -> float:
    """Return the median time on the GPU of work that a stream runs 20 times in a row."""
    times = []
    for turn in range(1 + rounds):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(20):
            act()
        after.record()
        after.synchronize()
        times += [before.elapsed_time(after) / 20] if turn else []
    return median(times)


def median_s(act: Callable[[], object], rounds: int) -> float:
    """Return the median time of calls, the first two not counted."""
    times = []
    for _ in range(2 + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[2:])


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
        if out:
            out.write_text(result.to_json())
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
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
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
    parser.add_argument(
        "--hybrids",
        action="store_true",
        help="measure models with recurrent layers over their bytes",
    )
    parser.add_argument("--kind", help="print the results of one kind, a JSON object per line")
    options = parser.parse_args(argv)
    if options.kind:
        with torch.no_grad():
            for result in measured(options.kind, torch.device("cuda", 0), options.rounds):
                print(json.dumps(result), flush=True)
        return 0
    if options.hybrids:
        with torch.no_grad():
            found = hybrid_report(max(1, options.rounds), torch.device("cuda", 0))
        return int(show(found, options.out))
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
