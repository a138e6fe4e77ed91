"""Steps and first tokens of the shapes of published models, over the bytes of a step.

Random weights in bfloat16, for each shape a step of one row per request, one of four rows (a
verify), and a prompt beside an eager forward of transformers. The time of a step is that of its
graph, and of the commit of its last rows if layers are recurrent. The bytes are

- the weights without the embedding, of experts those that the rows of the step choose, each once;
- for each request and recurrent layer: the state, read and written by the step; what is kept of
  each row, written and read (``graphkit/engine/kv/scanned.py``); the state of the convolution,
  read, and written after each row, then read and written by the commit.

    python tools/bench/served_shapes.py --out tools/bench/results/served_shapes.json

``results/served_shapes.json`` joins reports of the shapes (``--shapes``).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from decode_graphs import TorchGraph
from report_file import add_out
from timing import show

from graphkit.cli.benchmarks import WeightBytes, copy_bandwidth
from graphkit.engine.step.verifier import Verifier
from graphkit.graphs import environment
from graphkit.models import TransformersModel, shapes
from graphkit.models.experts import counting_experts, experts_of
from graphkit.records import BenchReport, Measure

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B, 12 layers": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
    },
    "gpt-oss-20b, 12 layers": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 12, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    },
    "DeepSeek-V2-Lite, 9 layers": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 9,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "max_position_embeddings": 163840,
    },
    "Qwen3-Next, 12 layers": {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144, "full_attention_interval": 4,
    },
    "Mamba 2 2.7B": {
        "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64,
        "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2,
        "conv_kernel": 4, "chunk_size": 256, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Sizes as in the ``config.json`` of published models, some with fewer layers."""
HYBRIDS = "qwen3_next", "mamba2"
"""Model types with recurrent layers."""
CONTEXT, VERIFY_ROWS, BATCHES, PROMPTS = 64, 4, (1, 8, 32), (512, 8192)
STEP_BAR, HYBRID_BAR, VERIFY_BAR = 1.25, 1.30, 1.15
"""Most time of a step over that of its bytes, at any batch and at batch 1 and 8 of hybrids; most
time of a verify of a hybrid over that of a decode step and of the bytes that it has more."""


def report(
    names: Sequence[str], batches: Sequence[int], prompts: Sequence[int], rounds: int,
    device: torch.device,
) -> BenchReport:  # fmt: skip
    """Measure steps and prompts of some of ``SHAPES``."""
    measures: list[Measure] = []
    for name in names:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
            loaded = shapes.random_model(Path(folder), "NONE", device=device)
        for batch in batches:
            measures += steps(name, loaded, batch, rounds, device)
        measures += first_tokens(name, loaded, prompts, rounds, device)
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
    return BenchReport(
        name="steps of served shapes over their bytes",
        environment=environment(device),
        settings={
            "context": CONTEXT, "dtype": "bfloat16", "transformers": transformers.__version__,
            "rounds": rounds,
        },
        measures=tuple(measures),
    )  # fmt: skip


def steps(
    name: str, loaded: TransformersModel, batch: int, rounds: int, device: torch.device
) -> Iterator[Measure]:
    """Measure a decode step and a verify of ``VERIFY_ROWS`` rows."""
    speed_of_copy, decode_ms, decode_bytes = copy_bandwidth(device), 0.0, 0.0
    is_hybrid = SHAPES[name]["model_type"] in HYBRIDS
    for rows in (1, VERIFY_ROWS):
        with captured_verifier(loaded, batch, rows) as (verifier, inputs):
            states, commit_ms = verifier.recurrent_state, 0.0
            if states is not None:
                last = torch.full((batch,), rows - 1, device=device)
                requests = torch.as_tensor(inputs.req_pool_indices).to(device)
                commit = TorchGraph(partial(states.commit, requests, last))
                commit_ms = median_ms(commit.launch, rounds)
            ms = median_ms(partial(verifier.runner.replay, inputs), rounds) + commit_ms
        with (
            counting_experts(experts_of(loaded.model)) as counted,
            captured_verifier(loaded, batch, rows) as (verifier, inputs),
        ):
            before = counted()
            verifier.runner.replay(inputs)
            read = step_bytes(loaded, batch, rows) + counted() - before
        cell = partial(Measure, setting=f"{name}, {batch} requests", variant=f"{rows} rows")
        yield cell(name="step and commit", value=ms, unit="ms")
        yield cell(name="commit", value=commit_ms, unit="ms")
        bound = read / speed_of_copy * 1e3
        bar = None if is_hybrid else STEP_BAR
        if is_hybrid and rows == 1 and batch <= 8:
            bar = HYBRID_BAR
        yield cell(name="over its bytes", value=ms / bound, unit="x", bar=bar)
        if rows == 1:
            decode_ms, decode_bytes = ms, read
        else:
            further = (read - decode_bytes) / speed_of_copy * 1e3
            bar = VERIFY_BAR if is_hybrid else None
            over = ms / (decode_ms + further)
            yield cell(name="over one row and further bytes", value=over, unit="x", bar=bar)


@contextmanager
def captured_verifier(
    loaded: TransformersModel, batch: int, rows: int
) -> Iterator[tuple[Verifier, Any]]:
    """Capture the verifier of a full batch with so many rows per request; yield it with inputs.

    Requests have contexts of their own, of random keys, values and states. With one context, rows
    would become alike and choose the same experts.
    """
    spec: dict[str, Any] = {"algorithm": "NONE"}
    if rows > 1:
        spec = {"algorithm": "NGRAM", "num_steps": rows - 1}
    with loaded.engine(
        max_batch_size=batch, max_context_len=CONTEXT + 64, batch_sizes=[batch], **spec
    ) as engine:
        verifier = engine._spec_step.verifier
        verifier.runner.capture()
        table = engine._spec_step.context.req_to_token
        table[1:] = torch.arange(table[1:].numel(), dtype=table.dtype).view_as(table[1:])
        for state in engine._spec_step.tensors().values():
            if state.is_floating_point():
                state.normal_(std=0.5)
        yield verifier, verifier.runner.sample_batch(batch, seed=0)


def first_tokens(
    name: str, loaded: TransformersModel, lengths: Sequence[int], rounds: int, device: torch.device
) -> Iterator[Measure]:
    """Measure the time to the first token beside an eager forward of transformers."""
    import graphkit as gk

    for length in lengths:
        ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
        with loaded.engine(
            algorithm="NONE", max_batch_size=1, max_context_len=length + 64, batch_sizes=[1]
        ) as engine:
            engine.capture()
            sampling = gk.SamplingParams(max_new_tokens=1)
            own = median_s(partial(engine.generate, ids.tolist(), sampling), rounds)
        has_option = "logits_to_keep" in signature(loaded.original.forward).parameters
        options = {"logits_to_keep": 1} if has_option else {}
        forward = partial(loaded.original, ids.to(device), **options)
        theirs = median_s(forward, rounds)
        cell = partial(Measure, setting=f"{name}, prompt of {length}", unit="ms")
        yield cell(name="first token", value=own * 1e3, variant="graphkit")
        yield cell(name="first token", value=theirs * 1e3, variant="eager forward")


def step_bytes(loaded: TransformersModel, batch: int, rows: int) -> float:
    """Return the bytes that a step and its commit read and write, without those of experts."""
    total: float = WeightBytes.of(loaded, 0).total
    for layer in loaded.layout.recurrent:
        sizes = {
            kind: math.prod(shape) * layer.dtypes[kind].itemsize
            for kind, shape in layer.shapes.items()
        }
        total += batch * sizes.get("conv0", 0) * (1 + rows + 2)
        if layer.recurrence is not None:
            state = sizes[layer.recurrence.kind]
            total += batch * (2 * state + 2 * rows * 4 * layer.recurrence.update)
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


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median counts (5)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="requests")
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, help="prompt lengths")
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), metavar="NAME",
        help="shapes whose names start so (all)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    names = [name for name in SHAPES if name.startswith(tuple(options.shapes))]
    with torch.no_grad():
        found = report(
            names, options.batches, options.prompts, options.rounds, torch.device("cuda", 0)
        )
    return int(show(found, options.out))


if __name__ == "__main__":
    sys.exit(main())
