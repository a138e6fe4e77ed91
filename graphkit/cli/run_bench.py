"""The models and settings that ``graphkit bench`` measures, and the measurement."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from graphkit.benchmarks import Generation, StepBench, longest_path, make_variants
from graphkit.cli.exits import UsageError
from graphkit.cli.options import chosen_algorithm, model_dtype, use_one_thread
from graphkit.cli.output import print_message, progress_on_stderr
from graphkit.distributed import OneShotCollectives, RankGroup
from graphkit.errors import GraphkitError
from graphkit.graphs import backend_for, resolve_device
from graphkit.records import BenchReport
from graphkit.reference import (
    EngineModels,
    load_models,
    load_tokenizer,
    random_models,
    spec_of,
)
from graphkit.reference.engine_models import check_algorithm

_STEPS = {"cuda": 64, "cpu": 16}
_STEPS_PER_LAUNCH = {"cuda": (1, 4, 16, 64), "cpu": (1, 4, 16)}
_USUAL_LENGTHS = (1.0, 2.0, 3.0)


def measure(arguments: argparse.Namespace, group: RankGroup | None = None) -> BenchReport:
    """Measure steps with the options of ``graphkit bench``.

    Args:
        arguments: The parsed options.
        group: Ranks that split the target; each measures the same steps.

    Raises:
        UsageError: Options contradict each other.
        GraphkitError: A setting is refused, a folder cannot be loaded, a forward cannot be
            captured, or the device has too little memory.
    """
    if arguments.draft is not None and arguments.checkpoint is None:
        raise UsageError(
            "--draft is given without the --checkpoint that it was trained for. Give both."
        )
    device = resolve_device(arguments.device)
    try:
        bench, name, notes = _bench(arguments, device, group)
        sizes = ", ".join(map(str, arguments.batch_sizes))
        variants = ", ".join(variant.name for variant in bench.variants)
        print_message(f"measuring {name} on {device}: batch sizes {sizes}; {variants}")
        with progress_on_stderr() as progress:
            return bench.report(f"steps of {name}", arguments.batch_sizes, notes, progress)
    except torch.OutOfMemoryError as error:
        raise GraphkitError(
            f"the device has too little memory: {str(error).partition('. ')[0]}. All variants of a "
            "batch size need KV pools at the same time: measure smaller --batch-sizes, fewer or "
            "smaller --steps-per-launch, fewer --steps, or a shorter --context."
        ) from error


def _bench(
    arguments: argparse.Namespace, device: torch.device, group: RankGroup | None
) -> tuple[StepBench, str, dict[str, str]]:
    """Return what to measure, the name of the models, and notes for the report."""
    algorithm = check_algorithm(chosen_algorithm(arguments))
    spec = spec_of(algorithm, arguments.num_steps, arguments.topk, arguments.num_draft_tokens)
    generations, notes = _generations(arguments.generations, device, group)
    if device.type == "cpu" and arguments.checkpoint is None:
        use_one_thread()
    models, name = _models(arguments, algorithm, device, group)
    longest = models.target.config.max_position_embeddings
    if arguments.context > longest:
        raise UsageError(
            f"--context is {arguments.context}, but the target has contexts of at most {longest} "
            "tokens. Choose a smaller number."
        )
    counts = _steps_per_launch(arguments.steps_per_launch, device, group)
    bench = StepBench(
        models=models,
        spec=spec,
        variants=tuple(make_variants(generations, counts)),
        text_ids=_text_ids(arguments.checkpoint, models),
        context=arguments.context,
        steps=arguments.steps or _STEPS[device.type],
        rounds=arguments.rounds,
        accept_lengths=_accept_lengths(arguments, longest_path(models, spec)),
    )
    return bench, name, notes


def _generations(
    chosen: Sequence[Generation] | None, device: torch.device, group: RankGroup | None
) -> tuple[Sequence[Generation], dict[str, str]]:
    """Return the generations to measure, and notes: the ranks, or why v3 is left out."""
    if group is not None:
        notes = {"tensor parallel": str(group.size)}
        if isinstance(group.collectives, OneShotCollectives):
            notes["collectives"] = "one-shot"
        return chosen or ("v1", "v2", "v3"), notes
    if chosen is not None:
        return chosen, {}
    refusal = backend_for(device).loop_refusal
    if refusal:
        return ("v1", "v2"), {"v3": f"cannot run: {refusal}"}
    return ("v1", "v2", "v3"), {}


def _steps_per_launch(
    chosen: Sequence[int] | None, device: torch.device, group: RankGroup | None
) -> Sequence[int]:
    """Return the steps of one launch of v3 to measure: 1 on ranks that have no loops."""
    refusal = "" if group is None else group.loop_refusal
    if refusal and chosen is not None and list(chosen) != [1]:
        raise UsageError(f"--steps-per-launch must be 1: {refusal}.")
    return (1,) if refusal else chosen or _STEPS_PER_LAUNCH[device.type]


def _models(
    arguments: argparse.Namespace,
    algorithm: str,
    device: torch.device,
    group: RankGroup | None,
) -> tuple[EngineModels, str]:
    """Return the models and their name."""
    if arguments.shape is not None:
        models = random_models(arguments.shape, algorithm, device=device, group=group)
        return models, arguments.shape
    folder = arguments.checkpoint
    dtype = model_dtype(folder, device)
    models = load_models(
        algorithm,
        checkpoint=folder,
        draft=arguments.draft,
        device=device,
        dtype=dtype,
        group=group,
    )
    return models, "the reference model" if folder is None else folder.resolve().name


def _text_ids(folder: Path | None, models: EngineModels) -> Sequence[int]:
    """Return Python source in the tokens of a folder; other models take bytes."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    vocab_size = models.target.config.vocab_size
    if folder is None:
        return source.encode()
    return load_tokenizer(folder, vocab_size).encode(source)


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
