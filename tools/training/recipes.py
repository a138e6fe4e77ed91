"""How each reference model is built, trained, saved and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen3Config

from graphkit.models import TransformersModel
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import HeadSources
from graphkit.models.heads.load import head_sources, load_head
from graphkit.models.heads.mtp import MtpHead, MtpLayer, load_mtp
from graphkit.models.layout import decoder_layers
from graphkit.models.tokenizer import VOCAB_SIZE
from training.folders import config_entries, save_draft_head, write_folder
from training.losses import (
    Unroll,
    accept_length,
    accept_rates,
    draft_loss,
    held_out_bits,
    next_token_loss,
)
from training.unroll import (
    STEPS,
    dflash_drafts,
    eagle3_drafts,
    eagle_drafts,
    mtp_drafts,
    standalone_drafts,
)

Model = TypeVar("Model", bound=nn.Module)
Results = dict[str, object]

SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip
TARGET = LlamaConfig(**SIZES, tie_word_embeddings=True)
EAGLE = replace(TARGET, num_hidden_layers=1)
EAGLE3 = replace(EAGLE, tie_word_embeddings=False)
MTP = replace(TARGET, num_hidden_layers=STEPS)
MERGED = ("enorm", "hnorm", "eh_proj")
"""Modules of an MTP layer that merge token and feature."""
DFLASH = Qwen3Config(**SIZES | {"num_hidden_layers": 2})
MASK_TOKEN = 255
"""A byte that no UTF-8 text contains."""
STANDALONE = replace(
    TARGET, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4
)


class Recipe(Protocol):
    """Interface of a model to the command; ``target`` is ``None`` for the target itself."""

    config: PreTrainedConfig
    steps: int

    def build(self, target: TransformersModel | None, corpus: Tensor) -> nn.Module:
        """Build and initialise the model; ``corpus`` is the training text, uint8 [bytes]."""

    def loss(self, model: nn.Module, target: TransformersModel | None, windows: Tensor) -> Tensor:
        """Return the training loss of a batch of windows."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save the model to a folder."""

    def measure(
        self, folder: Path, target: TransformersModel | None, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure the saved weights on held-out windows, in bfloat16."""


@dataclass(frozen=True)
class WholeModel:
    """Recipe of a language model, trained on text alone."""

    config: PreTrainedConfig
    steps: int

    def build(self, target: TransformersModel | None, corpus: Tensor) -> LlamaForCausalLM:
        """Build and initialise the model."""
        del target, corpus
        model = LlamaForCausalLM(deepcopy(self.config))
        return initialised(model, self.config)

    def loss(self, model: nn.Module, target: TransformersModel | None, windows: Tensor) -> Tensor:
        """Return the loss of next-token prediction."""
        del target
        return next_token_loss(model, windows)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save the model to a folder."""
        state = model.state_dict()
        if self.config.tie_word_embeddings:
            del state["lm_head.weight"]
        write_folder(folder, _entries(self.config), state)

    def measure(
        self, folder: Path, target: TransformersModel | None, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure bits per byte and, for a draft model, its acceptance by the target."""
        device = windows[0].device
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        results: Results = {"held_out_bits_per_byte": round(held_out_bits(model, windows), 4)}
        if target is not None:
            results |= acceptance(standalone_drafts, model, target, windows)
        return results


class HeadRecipe:
    """Base of the recipes of draft heads."""

    def save(self, model: EagleHead | Eagle3Head | DFlashHead, folder: Path) -> None:
        """Save the head to a folder, without the weights of its target."""
        save_draft_head(model, folder)


@dataclass(frozen=True)
class Eagle(HeadRecipe):
    """Recipe of an EAGLE head, trained on the features and distributions of its target."""

    config: PreTrainedConfig
    steps: int

    def build(self, target: TransformersModel, corpus: Tensor) -> nn.Module:
        """Build and initialise the model."""
        del corpus
        return initialised(EagleHead(self.config, sources_of(target)), self.config)

    def loss(self, model: nn.Module, target: TransformersModel, windows: Tensor) -> Tensor:
        """Return the loss of the draft steps."""
        return draft_loss(eagle_drafts, model, target, windows)

    def measure(
        self, folder: Path, target: TransformersModel, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure the acceptance by the target."""
        head = load_head("EAGLE", folder, sources_of(target))
        return acceptance(eagle_drafts, head, target, windows)


@dataclass(frozen=True)
class Mtp:
    """Recipe of MTP layers, which are layers of the target with two norms and a projection."""

    config: PreTrainedConfig
    steps: int

    def build(self, target: TransformersModel, corpus: Tensor) -> MtpHead:
        """Build and initialise the layers."""
        del corpus
        model, layers = target.original, decoder_layers(target.original, target.layout)
        chain = [MtpLayer(model, layers, len(layers) - 1) for _ in range(STEPS)]
        for layer in chain:
            for part in (layer.block, layer.eh_proj):
                initialised(part.requires_grad_(True), self.config)
            for norm in (layer.enorm, layer.hnorm, layer.norm, *norms_of(layer.block)):
                nn.init.ones_(norm.requires_grad_(True).weight)
            layer.prepare(fuse=False)
        return MtpHead(model, chain)

    def loss(self, model: MtpHead, target: TransformersModel, windows: Tensor) -> Tensor:
        """Return the loss of the draft steps."""
        return draft_loss(mtp_drafts, model, target, windows)

    def save(self, model: MtpHead, folder: Path) -> None:
        """Save the layers to a folder, under the names of DeepSeek-V3."""
        state = {}
        for number, layer in enumerate(model.chain, TARGET.num_hidden_layers):
            prefix = f"model.layers.{number}."
            tensors = {f"{name}.weight": getattr(layer, name).weight for name in MERGED}
            tensors["shared_head.norm.weight"] = layer.norm.weight
            tensors |= layer.block.state_dict()
            state |= {f"{prefix}{name}": tensor.detach() for name, tensor in tensors.items()}
        entries = {"num_nextn_predict_layers": len(model.chain)}
        write_folder(folder, _entries(TARGET) | entries, state)

    def measure(
        self, folder: Path, target: TransformersModel, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure the acceptance by the target."""
        head = load_mtp(target.original, target.layout, str(folder))
        return acceptance(mtp_drafts, head, target, windows)


@dataclass(frozen=True)
class Eagle3(HeadRecipe):
    """Recipe of an EAGLE-3 head whose vocabulary is the most frequent bytes of the corpus.

    Its output head and norm start as the target's.
    """

    config: PreTrainedConfig
    steps: int
    layers: tuple[int, int, int]
    draft_vocab_size: int

    def build(self, target: TransformersModel, corpus: Tensor) -> Eagle3Head:
        """Build and initialise the model."""
        size = self.draft_vocab_size
        head = Eagle3Head(
            self.config, sources_of(target), aux_layers=self.layers, draft_vocab_size=size
        )
        counts = torch.bincount(corpus.cpu(), minlength=self.config.vocab_size)
        tokens = counts.topk(size).indices.sort().values
        head.d2t.copy_(tokens - torch.arange(size))
        initialised(head, self.config)
        with torch.no_grad():
            head.lm_head.weight.copy_(target.head.weight[tokens])
            head.norm.weight.copy_(target.original.get_decoder().norm.weight)
        return head

    def loss(self, model: Eagle3Head, target: TransformersModel, windows: Tensor) -> Tensor:
        """Return the loss of the draft steps."""
        return draft_loss(eagle3_drafts, model, target, windows, self.layers)

    def measure(
        self, folder: Path, target: TransformersModel, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure the acceptance by the target."""
        head = load_head("EAGLE3", folder, sources_of(target))
        return acceptance(eagle3_drafts, head, target, windows, self.layers)


@dataclass(frozen=True)
class DFlash(HeadRecipe):
    """Recipe of a DFLASH head, whose layers and norm start as the last ones of the target.

    The context starts as what the last layer of the target reads. Queries and keys have norms that
    the target lacks: their weights start as the usual size of the target's queries and keys.
    """

    config: PreTrainedConfig
    steps: int
    target_layer_ids: tuple[int, ...]
    block_size: int

    def build(self, target: TransformersModel, corpus: Tensor) -> DFlashHead:
        """Build and initialise the model."""
        del corpus
        head = DFlashHead(
            self.config,
            sources_of(target),
            target_layer_ids=self.target_layer_ids,
            block_size=self.block_size,
            mask_token_id=MASK_TOKEN,
        )
        sources = target.original.get_decoder().layers[-len(head.layers) :]
        with torch.no_grad():
            for layer, source in zip(head.layers, sources, strict=True):
                attention, norm = layer.self_attn, source.input_layernorm.weight
                layer.load_state_dict(source.state_dict(), strict=False)
                for name in ("q", "k"):
                    heads = attention.get_submodule(f"{name}_proj").weight * norm
                    size = heads.square().sum(1).mean().sqrt()
                    attention.get_submodule(f"{name}_norm").weight.fill_(size)
            nearest = head.encoder.fc.weight[:, -self.config.hidden_size :]
            nearest.add_(torch.eye(self.config.hidden_size))
            head.encoder.output_norm_enc.weight.copy_(sources[-1].input_layernorm.weight)
            head.norm.weight.copy_(target.original.get_decoder().norm.weight)
        return head

    def loss(self, model: DFlashHead, target: TransformersModel, windows: Tensor) -> Tensor:
        """Return the loss of the drafts of blocks."""
        return draft_loss(dflash_drafts, model, target, windows, model.aux_layers)

    def measure(
        self, folder: Path, target: TransformersModel, windows: tuple[Tensor, ...]
    ) -> Results:
        """Measure the acceptance of as many drafts as other heads make, and of whole blocks."""
        head = load_head("DFLASH", folder, sources_of(target))
        rates = accept_rates(dflash_drafts, head, target, windows, head.aux_layers)
        return {
            "accept_rates": rates,
            "accept_length": round(accept_length(rates[:STEPS]), 2),
            "block_accept_length": round(accept_length(rates), 2),
        }


def initialised(model: Model, config: PreTrainedConfig) -> Model:
    """Initialise the weights of a model for training as GPT-2 does, and return it.

    Weights are normal with standard deviation 0.02. Projections that add to the residual stream of
    L layers have 0.02 / sqrt(2 L). Biases are 0.
    """
    for name, child in model.named_modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            is_residual = name.endswith(("o_proj", "down_proj"))
            std = 0.02 / math.sqrt(2 * config.num_hidden_layers) if is_residual else 0.02
            nn.init.normal_(child.weight, std=std)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)
    return model


def norms_of(block: nn.Module) -> list[nn.Module]:
    """Return the norms of a decoder layer of Llama."""
    return [block.get_submodule(name) for name in ("input_layernorm", "post_attention_layernorm")]


def sources_of(target: TransformersModel) -> HeadSources:
    """Return what draft heads use of a target."""
    return head_sources(target.original, target.layout)


def acceptance(
    unroll: Unroll,
    head: nn.Module,
    target: TransformersModel,
    windows: tuple[Tensor, ...],
    layers: Sequence[int] = (),
) -> Results:
    """Return the accept rate of each draft step and the accept length."""
    rates = accept_rates(unroll, head, target, windows, layers)
    return {"accept_rates": rates, "accept_length": round(accept_length(rates), 2)}


def _entries(config: PreTrainedConfig) -> dict[str, object]:
    return config_entries(config) | {"architectures": [LlamaForCausalLM.__name__]}


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "target": WholeModel(TARGET, 1500),
        "eagle": Eagle(EAGLE, 2000),
        "eagle3": Eagle3(EAGLE3, 5000, layers=(1, 2, 4), draft_vocab_size=128),
        "dflash": DFlash(DFLASH, 3000, target_layer_ids=(0, 1, 2), block_size=8),
        "mtp": Mtp(MTP, 2000),
        "standalone": WholeModel(STANDALONE, 3000),
    }
)
"""Recipes in the order of training: the target first, then its draft models."""
