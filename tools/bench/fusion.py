"""A verify step of a fused model of transformers beside the plain one, at the shape of an 8B Llama.

Two forwards with random bfloat16 weights: ``gk.models.load`` and ``gk.models.load(fuse=False)``.
Each verifies chains of 4 tokens in a captured graph. The result is the number of nodes and the time
of a replay on the device. Needs 40 GB on the device.

    python tools/bench/fusion.py --out tools/bench/results/fusion.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from statistics import median

import torch
from report_file import add_out
from timing import show
from transformers import AutoModelForCausalLM, PreTrainedModel

import graphkit as gk
from graphkit.cli.benchmarks import device_ms, synchronise
from graphkit.graphs import environment, resolve_device
from graphkit.models.shapes import SHAPES, shape_config
from graphkit.records import BenchReport, Measure
from graphkit.runners.targets import CaptureTarget

MODE, BATCH_SIZES, REPLAYS = gk.ForwardMode.TARGET_VERIFY, (1, 8), 20
FUSED, PLAIN = "gk.models", "gk.models, fuse=False"


def model_of_transformers(shape: str, device: torch.device) -> PreTrainedModel:
    """Return a model of a shape with random weights in bfloat16, on the device."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape_config(shape), dtype=torch.bfloat16
        )
    return model


def targets(shape: str, device: torch.device) -> Mapping[str, CaptureTarget]:
    """Return a target of each forward."""
    created: dict[str, CaptureTarget] = {}
    for name, fuse in ((FUSED, True), (PLAIN, False)):
        plain = model_of_transformers(shape, device)
        model = gk.models.load(plain, device=device.type, fuse=fuse)
        created[name] = model.target(max_batch_size=max(BATCH_SIZES), max_context_len=128)
    return created


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
                "nodes over the fused model": (nodes[name] / nodes[FUSED], "x"),
                "replay": (median(times[name]), "ms"),
                "replay over the fused model": (median(times[name]) / median(times[FUSED]), "x"),
            }
            for what, (value, unit) in values.items():
                yield Measure(
                    name=what, value=value, unit=unit, setting=f"batch {size}", variant=name
                )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
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
