"""Engines whose steps ``step.py`` measures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from host_steps import HostMeasuredEngine

from graphkit.cli.benchmarks import Variant, make_variants, pieces
from graphkit.models.reference import reference_engine

VARIANTS = {variant.name: variant for variant in make_variants(("v1", "v2", "v3"), (1, 4, 16, 64))}
"""Variants by name."""
WARM_UP_STEPS = max(each.steps_in_flight for each in VARIANTS.values())
CONTEXT = 4096
_PROMPT = 64


@dataclass(frozen=True)
class Setting:
    """Batch size and shape of the draft."""

    batch_size: int
    topk: int

    def __str__(self) -> str:
        return f"{'chain' if self.topk == 1 else f'tree of topk {self.topk}'}, {self.batch_size}"


@contextmanager
def measured_engine(
    setting: Setting, variant: Variant, device: torch.device
) -> Iterator[HostMeasuredEngine]:
    """Open an engine over the reference models for a block."""
    size = setting.batch_size
    with reference_engine(
        num_steps=3, topk=setting.topk, max_batch_size=size, batch_sizes=[size],
        max_context_len=CONTEXT,
        device=device, generation=variant.generation, steps_per_launch=variant.steps_per_launch,
    ) as engine:  # fmt: skip
        yield HostMeasuredEngine(engine, variant, prompts(size), WARM_UP_STEPS)


def prompts(count: int) -> list[list[int]]:
    """Return different pieces of Python source, as bytes."""
    return pieces(Path(argparse.__file__).read_bytes(), count, _PROMPT)
