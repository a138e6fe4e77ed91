"""The models and settings that ``graphkit bench`` measures, and the measurement."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from graphkit.benchmarks import (
    Generation,
    StepBench,
    WeightBytes,
    longest_path,
    make_variants,
)
from graphkit.cli.exits import UsageError
from graphkit.cli.models import OpenModels, load_tokenizer, open_models
from graphkit.cli.output import print_message, progress_on_stderr
from graphkit.distributed import OneShotCollectives, RankGroup
from graphkit.errors import GraphkitError
from graphkit.graphs import backend_for, resolve_device
from graphkit.records import BenchReport
from graphkit.reference import EngineModels

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
    generations, notes = _generations(arguments.generations, device, group)
    models = open_models(arguments, group)
    longest = models.longest_context
    if longest is not None and arguments.context > longest:
        raise UsageError(
            f"--context is {arguments.context}, but the target has contexts of at most {longest} "
            "tokens. Choose a smaller number."
        )
    counts = _steps_per_launch(arguments.steps_per_launch, device, group)
    bench = StepBench(
        engine=models.engine,
        spec=models.spec,
        algorithm=models.algorithm,
        device=device,
        dtype=models.models.dtype,
        weights=_weights(models),
        variants=tuple(make_variants(generations, counts)),
        text_ids=_text_ids(models),
        context=arguments.context,
        steps=arguments.steps or _STEPS[device.type],
        rounds=arguments.rounds,
        accept_lengths=_accept_lengths(arguments, longest_path(models.spec)),
    )
    folder = "the reference model" if models.folder is None else models.folder.resolve().name
    return bench, arguments.shape or folder, notes


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


def _weights(models: OpenModels) -> WeightBytes | None:
    """Return the weights that a step reads; ``None`` if its tokens choose the experts."""
    loaded = models.models
    if not isinstance(loaded, EngineModels) and loaded.has_experts:
        return None
    return WeightBytes.of(loaded, models.spec.longest.num_steps)


def _text_ids(models: OpenModels) -> Sequence[int]:
    """Return Python source in the tokens of the target."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    return load_tokenizer(models).encode(source)


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
