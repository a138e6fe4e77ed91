"""Time of the first requests of an engine after ``capture``, by generation.

An engine that has captured its graphs and compiled the kernels of prefills serves its first request
about as fast as the next ones. Each generation runs in a process of its own, with an empty cache of
Triton kernels, so that a kernel that is left to the first request is compiled in it. The processes
start and capture together, and measure one after the other: several requests of each kind, with the
same prompt. Kinds differ in the length of the prompt, too, since kernels depend on it.

    python tools/bench/first_request.py --out tools/bench/results/first_request.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from report_file import add_out
from timing import show

from graphkit.cli.benchmarks import pieces, synchronise
from graphkit.engine.step import SamplingParams
from graphkit.graphs import environment, resolve_device
from graphkit.models.reference import reference_engine
from graphkit.records import BenchReport, Measure

GENERATIONS = ("v1", "v2", "v3")
TOKENS, REQUESTS, BAR = 64, 5, 2.0
GREEDY = SamplingParams(max_new_tokens=TOKENS)
SAMPLED = SamplingParams(max_new_tokens=TOKENS, temperature=0.8, top_k=50, top_p=0.9, seed=1)
KINDS = {
    "greedy": (100, GREEDY),
    "sampled": (100, SAMPLED),
    "greedy, 24 tokens": (24, GREEDY),
    "greedy, 300 tokens": (300, GREEDY),
}
"""Kinds of requests: the tokens of the prompt, and how to generate."""
Answer = Mapping[str, Mapping[str, list[float]]]
"""Of each kind of request, milliseconds and compiled kernels of each request."""


def serve(generation: str, device: torch.device) -> None:
    """Capture an engine, wait for a line on stdin, run requests, and print an ``Answer``."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    engine = reference_engine("EAGLE", max_batch_size=1, device=device, generation=generation)
    with engine, torch.no_grad():
        engine.capture()
        synchronise(device)
        print("captured", flush=True)
        sys.stdin.readline()
        text = Path(argparse.__file__).read_bytes()
        compiled: list[object] = []
        if device.type == "cuda":
            import triton

            triton.knobs.runtime.jit_post_compile_hook = lambda **each: compiled.append(each)
        answer: dict[str, dict[str, list[float]]] = {}
        for kind, (length, sampling) in KINDS.items():
            (prompt,) = pieces(text, 1, length)
            answer[kind] = requests = {"ms": [], "kernels": []}
            for _ in range(REQUESTS):
                before, began = len(compiled), time.perf_counter()
                engine.generate([prompt], sampling)
                requests["ms"].append((time.perf_counter() - began) * 1e3)
                requests["kernels"].append(len(compiled) - before)
        print(json.dumps(answer), flush=True)


def answers(device: torch.device, generations: Sequence[str]) -> dict[str, Answer]:
    """Run a process per generation and return their answers.

    Raises:
        RuntimeError: A process failed; its errors are on stderr.
    """
    command = [sys.executable, __file__, "--device", str(device), "--serve"]
    with ExitStack() as stack:
        processes = {}
        for generation in generations:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            processes[generation] = stack.enter_context(
                subprocess.Popen(
                    [*command, generation], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={**os.environ, "TRITON_CACHE_DIR": cache}, text=True,
                )
            )  # fmt: skip
        try:
            for process in processes.values():
                assert process.stdout is not None
                process.stdout.readline()  # captured, or the end of a process that failed
            found = {}
            for generation, process in processes.items():
                out, _ = process.communicate("go\n")
                if process.returncode:
                    raise RuntimeError(f"{generation} ended with code {process.returncode}")
                found[generation] = json.loads(out)
        finally:
            for process in processes.values():
                process.kill()
    return found


def measures(found: Mapping[str, Answer]) -> Iterator[Measure]:
    """Yield the times of all requests, and the first over the second with its bar."""
    ratios = {}
    for generation, answer in found.items():
        for kind, requests in answer.items():
            for number, (ms, kernels) in enumerate(
                zip(requests["ms"], requests["kernels"], strict=True), 1
            ):
                place = {"setting": f"{generation}, {kind}", "variant": f"request {number}"}
                yield Measure(name="time", value=ms, unit="ms", **place)
                yield Measure(name="compiled kernels", value=kernels, unit="", **place)
            first, second, *_ = requests["ms"]
            ratios[f"{generation}, {kind}: first over second request"] = first / second
    for name, ratio in ratios.items():
        yield Measure(name=name, value=ratio, unit="x", bar=BAR)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument(
        "--generations", nargs="+", choices=GENERATIONS, default=GENERATIONS, help="v1 v2 v3"
    )
    parser.add_argument("--serve", choices=GENERATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    if options.serve:
        serve(options.serve, device)
        return 0
    began = time.perf_counter()
    found = answers(device, options.generations)
    report = BenchReport(
        name="first requests after capture",
        environment=environment(device),
        settings={
            "model": "the reference model", "algorithm": "EAGLE",
            "prompt tokens": "100, unless a kind says otherwise", "new tokens": TOKENS,
            "seconds": round(time.perf_counter() - began),
        },
        measures=tuple(measures(found)),
    )  # fmt: skip
    show(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
