"""``graphkit bench``: measure speculative steps by generation and batch size."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.models import OpenModels, open_models
from graphkit.cli.options import (
    HelpFormatter,
    add_checkpoint_options,
    add_device_option,
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

    from graphkit.cli.benchmarks import Generation, StepBench
    from graphkit.distributed import RankGroup
    from graphkit.engine import SpeculativeEngine
    from graphkit.records import BenchReport

_GENERATIONS = ("v1", "v2", "v3")
_STEPS = {"cuda": 64, "cpu": 16}
_STEPS_PER_LAUNCH = {"cuda": (1, 4, 16, 64), "cpu": (1, 4, 16)}
_LEAST_STEPS = 4
"""Steps of a round below which defaults do not go."""
_USUAL_LENGTHS = (1.0, 2.0, 3.0)


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
steps that arrive together. On CUDA, the table also has the time of the host's thread without its
waits, the share of time that the GPU computes, and the CUDA calls per step. Below it are the bare
step, which is the captured step replayed back to back, and its bound: the weights that a step
reads, at the speed of a copy. With several formats of the weights, a table per batch size compares
them, one after another, by their bytes, times and bounds. On the CPU, the recorder runs the graphs,
and its times say nothing about a GPU.

Examples:
  graphkit bench
  graphkit bench --shape llama-8b --batch-sizes 1,8,32
  graphkit bench --shape llama-8b --algorithm EAGLE3 --num-steps 5
  graphkit bench --shape llama-8b --quantize none,fp8,int4
  torchrun --nproc-per-node 2 -m graphkit bench --tp 2 --shape llama-8b
  graphkit bench --shape qwen3-8b --algorithm NONE --context 8192 --batch-sizes 1
  graphkit bench --checkpoint ~/Llama-2-7b --draft ~/EAGLE-llama2-7B --topk 4 --out bench.json
""",
        formatter_class=HelpFormatter,
    )
    _add_models(parser)
    _add_measurements(parser)
    add_device_option(parser)
    add_tp_option(parser, _run)
    parser.add_argument("--out", type=Path, metavar="F", help="write the report as JSON to file F")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--shape", metavar="NAME|FILE",
        help="model with random weights, in bfloat16: llama-8b, qwen3-8b, tiny, or the config.json "
        "of a causal language model of transformers; the algorithm is EAGLE, EAGLE3 or DFLASH, "
        "with a random head, NGRAM or NONE",
    )  # fmt: skip
    add_checkpoint_options(parser, instead_of="the reference model", among=models, compares=True)


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", type=parse_list(parse_count, "1,8"), default=[1, 8], metavar="1,8",
        help="numbers of requests that run at the same time; default: 1,8",
    )  # fmt: skip
    parser.add_argument(
        "--generations", type=parse_list(_generation, "v1,v2,v3"), metavar="v1,v2,v3",
        help="generations to measure; default: v1, v2, and v3 where it can run",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-launch", type=parse_list(parse_count, "1,4,16,64"), metavar="1,4,16,64",
        help="steps of one launch of v3; default: 1,4,16,64, on the CPU 1,4,16, as far as the "
        "contexts of the target have room",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=parse_count, default=256, metavar="N",
        help="tokens of each request before the first step; default: 256",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=parse_count, metavar="N",
        help="steps of a round, rounded up to whole launches of the longest loop; default: 64, on "
        "the CPU 16, or fewer if the contexts of the target have no room for them",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=parse_count, default=3, metavar="N",
        help="rounds of each variant; default: 3",
    )  # fmt: skip
    parser.add_argument(
        "--accept-lengths", type=parse_list(_length, "1,2.5"), metavar="1,2.5",
        help="also give the tokens/s of steps that accept this many tokens per request, the bonus "
        "token included; default: none, but 1,2,3 for a --shape, which accepts drafts by chance",
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


def _measure(arguments: argparse.Namespace, group: RankGroup | None = None) -> BenchReport:
    """Measure steps with the options of ``graphkit bench``.

    Args:
        arguments: The parsed options.
        group: Ranks that split the target; each measures the same steps.

    Raises:
        UsageError: Options contradict each other.
        GraphkitError: A setting is refused, a folder cannot be loaded, a forward cannot be
            captured, or the device has too little memory.
    """
    import torch

    from graphkit.cli.benchmarks import compare_formats
    from graphkit.graphs import resolve_device

    device = resolve_device(arguments.device)
    reports: list[BenchReport] = []
    try:
        for quantize in arguments.quantize or [None]:
            reports.append(_measure_format(arguments, device, group, quantize))
            gc.collect()  # the weights of the next format need the memory
        if len(reports) == 1:
            return reports[0]
        names = (report.settings.get("quantize", report.settings["dtype"]) for report in reports)
        return compare_formats(dict(zip(map(str, names), reports, strict=True)))
    except torch.OutOfMemoryError as error:
        raise GraphkitError(
            f"the device has too little memory: {str(error).partition('. ')[0]}. All variants of a "
            "batch size need KV pools at the same time: measure smaller --batch-sizes, fewer or "
            "smaller --steps-per-launch, fewer --steps, or a shorter --context."
        ) from error


def _measure_format(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> BenchReport:
    """Measure the models with the weights of linear layers in one format."""
    bench, name, notes = _bench(arguments, device, group, quantize)
    if quantize is not None:
        notes = {**notes, "quantize": quantize}
    if arguments.row_invariant:
        notes = {**notes, "row-invariant": "True"}
    sizes = ", ".join(map(str, arguments.batch_sizes))
    variants = ", ".join(variant.name for variant in bench.variants)
    text = f"measuring {name}{f' in {quantize}' if quantize else ''} on {device}"
    print_message(f"{text}: batch sizes {sizes}; {variants}")
    with progress_on_stderr() as progress:
        return bench.report(f"steps of {name}", arguments.batch_sizes, notes, progress)


def _bench(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> tuple[StepBench, str, dict[str, str]]:
    """Return what to measure, the name of the models, and notes for the report."""
    from graphkit.cli.benchmarks import StepBench, WeightBytes, longest_path, make_variants

    generations, notes = _generations(arguments.generations, device, group)
    models = open_models(arguments, group, quantize)
    counts = _steps_per_launch(arguments.steps_per_launch, device, group)
    bench = StepBench(
        engine=_engine(models, arguments.context),
        spec=models.spec,
        algorithm=models.model.algorithm,
        device=device,
        dtype=models.model.dtype,
        weights=WeightBytes.of(models.model, models.spec.longest.num_steps),
        variants=tuple(make_variants(generations, counts)),
        text_ids=_text_ids(models),
        context=arguments.context,
        steps=arguments.steps or _STEPS[device.type],
        rounds=arguments.rounds,
        accept_lengths=_accept_lengths(arguments, longest_path(models.spec)),
    )
    if group is None or not group.no_loop_reason:
        bench = _fitted(bench, arguments, models.model.longest_context, generations, counts)
    folder = "the reference model" if models.folder is None else models.folder.resolve().name
    return bench, _shape_name(arguments.shape) or folder, notes


def _shape_name(shape: str | None) -> str | None:
    """Return the name of a shape: that of the folder for a ``config.json``."""
    if shape is None or not Path(shape).exists():
        return shape
    path = Path(shape).resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _fitted(
    bench: StepBench,
    arguments: argparse.Namespace,
    longest: int | None,
    generations: Sequence[Generation],
    counts: Sequence[int],
) -> StepBench:
    """Return the measurement with shorter loops and rounds if the target's contexts need it.

    Only defaults change: what was asked for is refused if there is no room for it.
    """
    from graphkit.cli.benchmarks import make_variants

    while longest is not None and bench.max_context_len > longest:
        has_loops = arguments.steps_per_launch is None and len(counts) > 1
        if has_loops and (counts[-1] >= bench.steps or arguments.steps is not None):
            counts = counts[:-1]
        elif arguments.steps is None and bench.steps > _LEAST_STEPS:
            bench = replace(bench, steps=bench.steps // 2)
        elif has_loops:
            counts = counts[:-1]
        else:
            break
        bench = replace(bench, variants=tuple(make_variants(generations, counts)))
    return bench


def _engine(models: OpenModels, context: int) -> Callable[..., SpeculativeEngine]:
    """Return what creates an engine over the models, and refuses a context that they lack."""
    longest = models.model.longest_context

    def create(*, max_context_len: int, **options: Any) -> SpeculativeEngine:
        if longest is not None and max_context_len > longest:
            raise UsageError(
                f"--context is {context}, and the steps of a round need room for "
                f"{max_context_len - context} tokens more, but the target has contexts of at most "
                f"{longest} tokens. Choose smaller --context, --steps or --steps-per-launch."
            )
        return models.engine(max_context_len=max_context_len, **options)

    return create


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
    if chosen is not None:
        return chosen, {}
    refusal = backend_for(device).no_loop_reason
    if refusal:
        return ("v1", "v2"), {"v3": f"cannot run: {refusal}"}
    return ("v1", "v2", "v3"), {}


def _steps_per_launch(
    chosen: Sequence[int] | None, device: torch.device, group: RankGroup | None
) -> Sequence[int]:
    """Return the steps of one launch of v3 to measure: 1 on ranks that have no loops."""
    refusal = "" if group is None else group.no_loop_reason
    if refusal and chosen is not None and list(chosen) != [1]:
        raise UsageError(f"--steps-per-launch must be 1: {refusal}.")
    return (1,) if refusal else chosen or _STEPS_PER_LAUNCH[device.type]


def _text_ids(models: OpenModels) -> Sequence[int]:
    """Return Python source in the tokens of the target."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    return models.load_tokenizer().encode(source)


def _accept_lengths(arguments: argparse.Namespace, longest: int) -> Sequence[float]:
    """Return the accept lengths to report, at most the longest path of a step."""
    if arguments.accept_lengths is None:
        has_random_drafts = arguments.shape is not None and longest > 1
        return [length for length in _USUAL_LENGTHS if has_random_drafts and length <= longest]
    for length in arguments.accept_lengths:
        if length > longest:
            raise UsageError(
                f"--accept-lengths has {length:g}, but a step accepts at most {longest} tokens. "
                "Choose smaller ones, or draft more tokens."
            )
    return list(arguments.accept_lengths)


def _length(text: str) -> float:
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if 1 <= length < math.inf:
        return length
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")


def _generation(text: str) -> str:
    if text in _GENERATIONS:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_GENERATIONS)}")
