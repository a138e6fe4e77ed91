"""Kinds of draft models, and how those that are no language models are loaded for a target."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError
from graphkit.models.fusion.observation import deciding_by
from graphkit.models.heads.config import ASSISTANTS
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.draft_model import DraftModel, StandaloneDraft
from graphkit.models.heads.folders import head_algorithm, load_head
from graphkit.models.heads.layers import DraftHead
from graphkit.models.heads.mtp import load_mtp
from graphkit.models.heads.sources import HeadSources, check_fit
from graphkit.models.layout import ModelLayout, decoder_layers, output_head
from graphkit.models.model import TransformersModel
from graphkit.models.quantization.linear import quantize_linears, set_row_invariant
from graphkit.models.refusals import check_type

ALGORITHMS_BY_KIND: Mapping[str | None, tuple[str, ...]] = {
    "EAGLE": ("EAGLE",),
    "EAGLE3": ("EAGLE3",),
    "DFLASH": ("DFLASH",),
    "MTP": ("EAGLE", "MULTI_LAYER_EAGLE"),
    "STANDALONE": ("STANDALONE",),
    "ASSISTANT": ("EAGLE",),
}
"""Algorithms that each kind of draft model can draft for."""


def draft_kind(draft: object, target: object) -> str:
    """Return the kind of a draft model, a key of ``ALGORITHMS_BY_KIND``; reads no weights.

    Args:
        draft: As for ``load``.
        target: The target's folder, or the target.

    Raises:
        ConfigError: It is no draft model for targets of transformers.
        CheckpointError: Its folder is damaged.
    """
    if draft == "mtp":
        if isinstance(target, str | Path):
            return "MTP"
        raise ConfigError(
            "draft='mtp' reads MTP layers from the folder of the model, but the model was passed "
            "as an object. Load the folder.",
            field="draft",
        )
    check_type(draft, "draft", (DraftHead,))
    if isinstance(draft, str | Path):
        return head_algorithm(draft)
    if isinstance(draft, DraftHead):
        return draft.algorithm
    assert isinstance(draft, PreTrainedModel), "checked"
    return "ASSISTANT" if draft.config.model_type in ASSISTANTS else "STANDALONE"


def load_draft(
    kind: str,
    draft: Any,
    target: TransformersModel,
    algorithm: str | None,
    quantize: str | None = None,
    *,
    fuse: bool = True,
    row_invariant: bool = False,
) -> DraftModel:
    """Return a draft head or MTP layers for a target.

    Args:
        kind: The kind.
        draft: As for ``load``.
        target: The target.
        algorithm: As for ``load``.
        quantize: As for ``load``.
        fuse: As for ``load``.
        row_invariant: Whether its products are row-invariant. Drafts do not change the text.

    Raises:
        CheckpointError: The weights cannot be loaded, or do not fit the target.
        ConfigError: A head that was passed as a module does not fit the target.
    """
    with nullcontext() if target.split is None else deciding_by(target.split.all):
        if kind == "MTP":
            folder = target.folder if draft == "mtp" else str(draft)
            assert folder is not None, "draft_kind checks it"
            return load_mtp(
                target.original, target.layout, folder, target.split, algorithm=algorithm,
                quantize=quantize, fuse=fuse, row_invariant=row_invariant,
            )  # fmt: skip
        sources = head_sources(target.model, target.layout, target.group)
        head: DraftHead = draft if isinstance(draft, DraftHead) else load_head(kind, draft, sources)
        check_fit(head.config, sources)
        if quantize is not None:
            quantize_draft(head, quantize)
        set_row_invariant(head, row_invariant)
        head.prepare(fuse=fuse)
    return head


def head_sources(
    model: PreTrainedModel, layout: ModelLayout, group: RankGroup | None = None
) -> HeadSources:
    """Return what draft heads use of a target.

    Args:
        model: The target.
        layout: Its layers with state.
        group: Ranks that split it.

    Raises:
        ConfigError: The model has no list of layers.
    """
    embedding: nn.Module = model.get_input_embeddings()
    return HeadSources(embedding, output_head(model), len(decoder_layers(model, layout)), group)


def standalone_draft(draft: TransformersModel, target: TransformersModel) -> StandaloneDraft:
    """Return a language model as the draft model of another one.

    Raises:
        ConfigError: Their vocabularies differ, or the draft model has recurrent layers.
    """
    vocab_size, expected = (each.head.out_features for each in (draft, target))
    if vocab_size != expected:
        raise ConfigError(
            f"the draft model {type(draft.model).__name__} has a vocabulary of {vocab_size} "
            f"tokens, but {type(target.model).__name__} has {expected}. Use a draft model with "
            "the vocabulary of the target.",
            field="draft",
        )
    return StandaloneDraft(draft.model, draft.layout)


def quantize_draft(draft: nn.Module, quantize: str) -> None:
    """Quantise a draft model in place: an EAGLE head as a whole, the decoder layers of others.

    The text does not depend on a draft model, only the number of accepted tokens does.

    Args:
        draft: The draft model.
        quantize: See ``load_models``.
    """
    quantize_linears(draft.layers if isinstance(draft, DFlashHead) else draft, quantize)
