"""A verify step of a model of transformers beside the fast layout, at the shape of an 8B Llama.

Three forwards with random bfloat16 weights: the fast Llama layout, ``gk.models.load``, and
``gk.models.load(fuse=False)``. Each verifies chains of 4 tokens in a captured graph. The result is
the number of nodes and the time of a replay on the device. Needs 55 GB on the device.

    python tools/bench/fusion.py --out tools/bench/results/fusion.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from timing import show
from transformers import LlamaConfig, LlamaForCausalLM

import graphkit as gk
from graphkit.cli.benchmarks import device_ms, synchronise
from graphkit.graphs import environment, resolve_device
from graphkit.models.shapes import SHAPES
from graphkit.models.sharded import model_target
from graphkit.models.sharded.shapes import random_models
from graphkit.records import BenchReport, Measure
from graphkit.runners.targets import CaptureTarget

MODE, BATCH_SIZES, REPLAYS = gk.ForwardMode.TARGET_VERIFY, (1, 8), 20
FAST = "fast layout"


def model_of_transformers(shape: str, device: torch.device) -> LlamaForCausalLM:
    """Create a Llama of a shape with random weights, on the device."""
    sizes = asdict(SHAPES[shape])
    rope = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    if sizes["rope_scaling"]:
        rope |= {"rope_type": "llama3", **sizes["rope_scaling"]}
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps",
    )  # fmt: skip
    config = LlamaConfig(
        **{name: sizes[name] for name in names}, rope_parameters=rope, dtype="bfloat16"
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def targets(shape: str, device: torch.device) -> Mapping[str, CaptureTarget]:
    """Return a target of each forward."""
    largest = max(BATCH_SIZES)
    models = random_models(shape, "NONE", device=device).target
    fast = model_target(models, name=FAST, max_batch_size=largest)
    context = fast.sizes.max_context_len  # attention splits longer contexts

    def loaded(*, fuse: bool) -> CaptureTarget:
        model = gk.models.load(model_of_transformers(shape, device), device=device.type, fuse=fuse)
        return model.target(max_batch_size=largest, max_context_len=context)

    return {
        FAST: fast,
        "gk.models": loaded(fuse=True),
        "gk.models, fuse=False": loaded(fuse=False),
    }


def measures(shape: str, device: torch.device, rounds: int) -> Iterator[Measure]:
    """Measure all forwards at each batch size; they take turns."""
    runners = {
        name: target.runner(MODE, device=device.type, batch_sizes=list(BATCH_SIZES))
        for name, target in targets(shape, device).items()
    }
    for runner in runners.values():
        runner.capture()
    for size in BATCH_SIZES:
        batches = {name: runner.sample_batch(size) for name, runner in runners.items()}
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(rounds):
            for name, runner in runners.items():
                runner.replay(batches[name])
                synchronise(device)
                with device_ms(device) as ms:
                    for _ in range(REPLAYS):
                        runner.replay(batches[name])
                times[name].append(ms[0] / REPLAYS)
        nodes = {name: len(runner.inspect(size).nodes) for name, runner in runners.items()}
        for name in runners:
            values = {
                "nodes": (nodes[name], "nodes"),
                "nodes over the fast layout": (nodes[name] / nodes[FAST], "x"),
                "replay": (median(times[name]), "ms"),
                "replay over the fast layout": (median(times[name]) / median(times[FAST]), "x"),
            }
            for what, (value, unit) in values.items():
                yield Measure(
                    name=what, value=value, unit=unit, setting=f"batch {size}", variant=name
                )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement (9)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    with torch.no_grad():
        found = tuple(measures(options.shape, device, options.rounds))
    report = BenchReport(
        name="verify step of transformers models",
        environment=environment(device),
        settings={"shape": options.shape, "dtype": "bfloat16", "tokens per request": 4,
                  "rounds": options.rounds, "replays per round": REPLAYS},
        measures=found,
    )  # fmt: skip
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
