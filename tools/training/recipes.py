"""How each reference model is made, trained, kept and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from graphkit import reference
from graphkit.reference import EagleHead, LlamaConfig, LlamaModel, MTPHead
from graphkit.reference.tokenizer import VOCAB_SIZE
from training.losses import (
    Unroll,
    accept_length,
    accept_rates,
    draft_loss,
    held_out_bits,
    next_token_loss,
)
from training.unroll import STEPS, eagle_drafts, mtp_drafts, standalone_drafts

Facts = dict[str, object]

TARGET = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
EAGLE = replace(TARGET, num_hidden_layers=1)
MTP = replace(TARGET, num_hidden_layers=STEPS, intermediate_size=512)
STANDALONE = replace(
    TARGET, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4
)


class Recipe(Protocol):
    """What the command needs of a model; ``target`` is ``None`` only for the target itself."""

    config: LlamaConfig
    steps: int

    def build(self, target: LlamaModel | None) -> nn.Module:
        """Make it, untrained."""

    def loss(self, model: nn.Module, target: LlamaModel | None, windows: Tensor) -> Tensor:
        """Return what one step minimises."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write it."""

    def measure(
        self, folder: Path, target: LlamaModel | None, windows: tuple[Tensor, ...]
    ) -> Facts:
        """Tell how the saved weights do on held-out windows, in bfloat16."""


@dataclass(frozen=True)
class WholeModel:
    """A language model, which learns from text alone."""

    config: LlamaConfig
    steps: int

    def build(self, target: LlamaModel | None) -> LlamaModel:
        """Make it, untrained."""
        del target
        return LlamaModel(self.config)

    def loss(self, model: LlamaModel, target: LlamaModel | None, windows: Tensor) -> Tensor:
        """Return the loss of the next token."""
        del target
        return next_token_loss(model, windows)

    def save(self, model: LlamaModel, folder: Path) -> None:
        """Write it."""
        reference.save_checkpoint(model, folder)

    def measure(
        self, folder: Path, target: LlamaModel | None, windows: tuple[Tensor, ...]
    ) -> Facts:
        """Tell bits per byte, and for a draft model how much of it the target accepts."""
        device = windows[0].device
        model = reference.load_checkpoint(folder, device=device, dtype=torch.bfloat16)
        facts: Facts = {"held_out_bits_per_byte": round(held_out_bits(model, windows), 4)}
        if target is not None:
            facts |= acceptance(standalone_drafts, model, target, windows)
        return facts


@dataclass(frozen=True)
class DraftHead:
    """A head that borrows from a target and learns from its features and distributions."""

    config: LlamaConfig
    steps: int
    kind: type[EagleHead | MTPHead]
    loader: Callable[[Path, LlamaModel], nn.Module]
    unroll: Unroll

    def build(self, target: LlamaModel) -> nn.Module:
        """Make it, untrained."""
        return self.kind(self.config, target)

    def loss(self, model: nn.Module, target: LlamaModel, windows: Tensor) -> Tensor:
        """Return the loss of the draft steps."""
        return draft_loss(self.unroll, model, target, windows)

    def save(self, model: EagleHead | MTPHead, folder: Path) -> None:
        """Write it without what it borrows."""
        reference.save_draft_head(model, folder)

    def measure(self, folder: Path, target: LlamaModel, windows: tuple[Tensor, ...]) -> Facts:
        """Tell how much of it the target accepts."""
        return acceptance(self.unroll, self.loader(folder, target), target, windows)


def acceptance(
    unroll: Unroll, head: nn.Module, target: LlamaModel, windows: tuple[Tensor, ...]
) -> Facts:
    """Return the facts of a draft model: the accept rate of each step, and the accept length."""
    rates = accept_rates(unroll, head, target, windows)
    return {"accept_rates": rates, "accept_length": round(accept_length(rates), 2)}


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "target": WholeModel(TARGET, 1500),
        "eagle": DraftHead(EAGLE, 2000, EagleHead, reference.load_eagle_head, eagle_drafts),
        "mtp": DraftHead(MTP, 2000, MTPHead, reference.load_mtp_head, mtp_drafts),
        "standalone": WholeModel(STANDALONE, 3000),
    }
)
"""In the order of training: the others draft for the target."""
