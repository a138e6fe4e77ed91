"""``graphkit bench``: measure speculative steps by generation and batch size."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.models import open_models
from graphkit.cli.options import (
    add_checkpoint_options,
    add_device_option,
    choice,
    parse_count,
    parse_list,
)
from graphkit.cli.output import (
    check_writable,
    print_message,
    print_result,
    progress_on_stderr,
    write_output,
)
from graphkit.cli.ranks import add_tp_option
from graphkit.errors import GraphkitError

if TYPE_CHECKING:
    import torch

    from graphkit.cli.benchmarks import Generation
    from graphkit.distributed import RankGroup
    from graphkit.records import BenchReport

_STEPS = {"cuda": 64, "cpu": 16}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure speculative steps by generation and batch size",
        description="Measure the speculative steps of a full batch in each generation: with the "
        "host in the loop (v1), overlapped (v2), and many steps in one launch (v3). Measures the "
        "reference model, a local folder, or a shape with random weights.",
        epilog="""
Requests never end. The variants of a batch size take turns, and times per step are medians of the
rounds. p50 and p99 are percentiles of the intervals between steps as the host receives them, 0 for
steps that arrive together. On CUDA, the table also has the share of time that the GPU computes.
Below it are the bare step, which is the captured step replayed back to back, and its bound: the
weights that a step reads, at the speed of a copy. Several formats of the weights are measured one
after another, and share the tables. On the CPU, the recorder runs the graphs, and its times say
nothing about a GPU.

Examples:
  graphkit bench
  graphkit bench --shape llama-8b --batch-sizes 1,8,32
  graphkit bench --shape llama-8b --algorithm EAGLE3 --num-steps 5
  graphkit bench --shape llama-8b --quantize none,fp8,int4
  torchrun --nproc-per-node 2 -m graphkit bench --tp 2 --shape llama-8b
  graphkit bench --shape qwen3-8b --algorithm NONE --context 8192 --batch-sizes 1
  graphkit bench --checkpoint ~/Llama-2-7b --draft ~/EAGLE-llama2-7B --topk 4 --out bench.json
""",
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--shape", metavar="NAME|FILE",
        help="model with random weights, in bfloat16: llama-8b, qwen3-8b, tiny, or the config.json "
        "of a causal language model of transformers; the algorithm is EAGLE, EAGLE3 or DFLASH, "
        "with a random draft head, NGRAM or NONE",
    )  # fmt: skip
    add_checkpoint_options(parser, instead_of="the reference model", among=models, compares=True)
    _add_measurements(parser)
    add_device_option(parser)
    add_tp_option(parser, _run)
    parser.add_argument("--out", type=Path, metavar="F", help="write the report as JSON to file F")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", type=parse_list(parse_count, "1,8"), default=[1, 8], metavar="1,8",
        help="numbers of requests that run at the same time; default: 1,8",
    )  # fmt: skip
    parser.add_argument(
        "--generations", type=parse_list(choice("v1", "v2", "v3"), "v1,v2,v3"), metavar="v1,v2,v3",
        help="generations to measure; default: v1, v2, and v3 where it can run",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-launch", type=parse_list(parse_count, "1,4,16"), metavar="1,4,16",
        help="steps of one launch of v3; default: 1,4,16",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=parse_count, default=256, metavar="N",
        help="tokens of each request before the first step; default: 256",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=parse_count, metavar="N",
        help="steps of a round, rounded up to whole launches of the longest loop; default: 64, on "
        "the CPU 16",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=parse_count, default=3, metavar="N",
        help="rounds of each variant; default: 3",
    )  # fmt: skip


def _run(arguments: argparse.Namespace, group: RankGroup | None) -> int:
    from graphkit.views import bench_view

    if arguments.out is not None:
        check_writable(arguments.out)
    report = _measure(arguments, group)
    print_result(report.to_json() if arguments.json else bench_view(report))
    if arguments.out is not None and (group is None or not group.rank):
        write_output(arguments.out, report.to_json())
    return DONE


def _measure(arguments: argparse.Namespace, group: RankGroup | None) -> BenchReport:
    import torch

    from graphkit.graphs import resolve_device

    device = resolve_device(arguments.device)
    formats = [None if name == "none" else name for name in arguments.quantize or ["none"]]
    reports: list[BenchReport] = []
    try:
        for quantize in formats:
            report = _measure_format(arguments, device, group, quantize)
            reports.append(report if len(formats) == 1 else _named(report))
            gc.collect()  # the weights of the next format need the memory
    except torch.OutOfMemoryError as error:
        raise GraphkitError(
            f"the device has too little memory: {str(error).partition('. ')[0]}. All variants of a "
            "batch size need KV pools at the same time: measure smaller --batch-sizes, fewer or "
            "smaller --steps-per-launch, fewer --steps, or a shorter --context."
        ) from error
    return replace(reports[0], measures=tuple(m for report in reports for m in report.measures))


def _named(report: BenchReport) -> BenchReport:
    """Return a report whose measures have the format of the weights, to stand beside others."""
    name = report.settings.get("quantize", report.settings["dtype"])
    measures = (
        replace(measure, variant=f"{measure.variant}, {name}")
        if measure.variant
        else replace(measure, name=f"{measure.name}, {name}")
        for measure in report.measures
    )
    return replace(report, measures=tuple(measures))


def _measure_format(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> BenchReport:
    """Measure the models with the weights of linear layers in one format."""
    from graphkit.cli.benchmarks import StepBench, WeightBytes, make_variants

    generations, notes = _generations(arguments.generations, device, group)
    models = open_models(arguments, group, quantize)
    model, shape = models.model, arguments.shape
    bench = StepBench(
        engine=models.engine,
        spec=models.spec,
        algorithm=model.algorithm,
        device=device,
        dtype=model.dtype,
        weights=WeightBytes.of(model, models.spec.longest.num_steps),
        variants=tuple(make_variants(generations, _steps_per_launch(arguments, group))),
        text_ids=models.tokenizer.encode(Path(argparse.__file__).read_text(encoding="utf-8")),
        context=arguments.context,
        steps=arguments.steps or _STEPS[device.type],
        rounds=arguments.rounds,
    )
    longest, needed = model.longest_context, bench.max_context_len(max(arguments.batch_sizes))
    if longest is not None and needed > longest:
        raise UsageError(
            f"--context is {bench.context}, and the steps of a round need room for "
            f"{needed - bench.context} tokens more, but the target has contexts of at most "
            f"{longest} tokens. Choose smaller --context, --steps or --steps-per-launch."
        )
    folder = arguments.checkpoint
    name = "the reference model" if folder is None else folder.resolve().name
    if shape is not None:
        path = Path(shape).resolve()
        name = path.parent.name if path.name == "config.json" else path.stem
    if quantize is not None:
        notes["quantize"] = quantize
    if arguments.row_invariant:
        notes["row-invariant"] = "True"
    sizes = ", ".join(map(str, arguments.batch_sizes))
    variants = ", ".join(variant.name for variant in bench.variants)
    text = f"measuring {name}{f' in {quantize}' if quantize else ''} on {device}"
    print_message(f"{text}: batch sizes {sizes}; {variants}")
    with progress_on_stderr() as progress:
        return bench.report(f"steps of {name}", arguments.batch_sizes, notes, progress)


def _generations(
    chosen: Sequence[Generation] | None, device: torch.device, group: RankGroup | None
) -> tuple[Sequence[Generation], dict[str, str]]:
    """Return the generations to measure, and notes: the ranks, or why v3 is left out."""
    from graphkit.distributed import OneShotCollectives
    from graphkit.graphs import backend_for

    if group is not None:
        notes = {"tensor parallel": str(group.size)}
        if isinstance(group.collectives, OneShotCollectives):
            notes["collectives"] = "one-shot"
        return chosen or ("v1", "v2", "v3"), notes
    refusal = backend_for(device).no_loop_reason
    if chosen is None and refusal:
        return ("v1", "v2"), {"v3": f"cannot run: {refusal}"}
    return chosen or ("v1", "v2", "v3"), {}


def _steps_per_launch(arguments: argparse.Namespace, group: RankGroup | None) -> Sequence[int]:
    """Return the steps of one launch of v3 to measure: 1 on ranks that have no loops."""
    chosen, refusal = arguments.steps_per_launch, "" if group is None else group.no_loop_reason
    if refusal and chosen not in (None, [1]):
        raise UsageError(f"--steps-per-launch must be 1: {refusal}.")
    return (1,) if refusal else chosen or (1, 4, 16)
