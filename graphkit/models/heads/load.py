"""Kinds of draft models, and how those that are no language models are loaded for a target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from graphkit.config import is_int
from graphkit.distributed import RankGroup
from graphkit.errors import CheckpointError, ConfigError, short_repr
from graphkit.models.folder import StoredWeights, read_config
from graphkit.models.fusion.observation import deciding_by
from graphkit.models.heads import layouts
from graphkit.models.heads.assistant import AssistantDraft as AssistantDraft
from graphkit.models.heads.config import ASSISTANTS, head_config, setting
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.draft_model import DraftModel, StandaloneDraft
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layers import DraftHead, HeadSources, check_fit
from graphkit.models.heads.mtp import load_mtp
from graphkit.models.layout import ModelLayout, decoder_layers, output_head
from graphkit.models.model import TransformersModel
from graphkit.models.plain_tensors import plain_tensors
from graphkit.models.quantization.linear import quantize_linears, set_row_invariant
from graphkit.models.refusals import check_type
from graphkit.models.stored_tensors import is_of_rounding
from graphkit.models.tensor_parallel import RankSplit

logger = logging.getLogger(__name__)
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
    """Return a draft head for a target.

    ``kind`` is what ``draft_kind`` returned. The other arguments are those of ``load``. Whether
    products are row-invariant does not change the text.

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
            # An EAGLE head is quantised with its output head, which changes no text.
            part = head.get_submodule("layers") if kind == "DFLASH" else head
            quantize_linears(part, quantize)
        set_row_invariant(head, row_invariant)
        head.prepare(fuse=fuse)
    return head


def head_sources(
    model: PreTrainedModel, layout: ModelLayout, group: RankGroup | None = None
) -> HeadSources:
    """Return what draft heads use of a target.

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


def head_algorithm(folder: str | Path) -> str:
    """Return the kind of draft model of a folder, by its settings and tensors.

    DFLASH, EAGLE3, EAGLE, MTP, STANDALONE, or ASSISTANT, whose type is in ``ASSISTANTS``.

    A head has ``fc``, which merges embedding and feature, and MTP layers have ``eh_proj``. A folder
    with layer 0, or without any of these, has a whole model.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    folder = Path(folder)
    data = read_config(folder)
    if data.get("model_type") in ASSISTANTS:
        return "ASSISTANT"
    if layouts.is_dflash(data):
        return "DFLASH"
    try:
        names = plain_tensors(folder).forms
    except CheckpointError:  # a language model in a layout that transformers reads
        names = StoredWeights(folder).forms
    if any(n.endswith(".eh_proj.weight") for n in names) and not any(
        ".layers.0." in n for n in names
    ):
        return "MTP"
    if "fc.weight" not in map(layouts.eagle_name, names):
        return "STANDALONE"
    return "EAGLE3" if layouts.is_eagle3(names) else "EAGLE"


def load_head(kind: str, folder: str | Path, target: HeadSources) -> DraftHead:
    """Build the draft head of a local folder.

    Args:
        kind: What ``head_algorithm`` returns of the folder: ``EAGLE`` (also EAGLE-2), ``EAGLE3`` or
            ``DFLASH`` (also DFLASH 2 and DSPARK).
        folder: ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``, in one of the
            layouts of ``layouts``. The layers are those of Llama, Mistral, Qwen2 or Qwen3.
        target: The model that the head was trained for. The head uses its output head and its
            embedding unless the folder contains them. Ranks that split it split the head too.

    Returns:
        The head on the target's device and in its dtype, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or unsupported, or the
            head does not match the target, or the ranks cannot split it evenly.
    """
    folder = Path(folder)
    data, stored = read_config(folder), plain_tensors(folder)
    head_class, rename, read_options = _HEADS[kind]
    names: dict[str, str] = {}
    for name in stored.forms:
        if (twin := names.setdefault(rename(name), name)) != name:
            raise CheckpointError(
                f"the checkpoint has {twin} and {name}, which are one tensor of the model. Delete "
                "one of them."
            )
    config, options, ignored = read_options(data, names.keys(), target)
    if confidence := sorted(name for name in ignored if name.startswith(_CONFIDENCE)):
        logger.warning(
            "%s has %s, which is not used: it says how many drafts are worth verifying, and a step "
            "verifies num_draft_tokens of them.", folder, ", ".join(confidence),
        )  # fmt: skip
    own = {"has_embedding": "embed_tokens.weight" in names, "has_head": "lm_head.weight" in names}
    try:
        with torch.device("meta"):
            head: DraftHead = head_class(config, target, **own | options)
            expected = head.state_dict()
            split = None if target.group is None else RankSplit(head, target.group)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if split is not None:
        split.cut(head)
    used = {
        new: name
        for new, name in names.items()
        if new not in ignored and not (stored.layout is not None and is_of_rounding(name))
    }
    weight = target.lm_head.get_parameter("weight")
    head.to(weight.dtype).to_empty(device=weight.device)
    parts = {} if split is None else split.parts
    stored.renamed(used).fill(head, expected, weight.device, parts)
    if split is not None:
        split.install(head)
    return head.eval().requires_grad_(False)


Options = tuple[PreTrainedConfig, dict[str, Any], frozenset[str]]
"""Settings of the layers, arguments of the class of a head, and tensors that it need not have."""


def _eagle(data: Mapping[str, object], names: Collection[str], _target: HeadSources) -> Options:
    config = head_config(layouts.eagle_layer_config(data))
    has_bias = _FC_BIAS in names or setting(data, "fusion_bias", bool, False)
    return config, {"fc_bias": has_bias}, frozenset()


def _eagle3(file: Mapping[str, object], names: Collection[str], _target: HeadSources) -> Options:
    data = layouts.eagle3_settings(file)
    config = head_config(layouts.nested_layer(data))
    vocab_size = data.get("draft_vocab_size")
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    if not is_int(vocab_size) or vocab_size < 1:
        raise CheckpointError(
            f"config.json: draft_vocab_size must be an int >= 1, got {short_repr(vocab_size)}. "
            "Correct it."
        )
    options: dict[str, Any] = {
        "aux_layers": layouts.aux_layers(file),
        "fc_bias": _FC_BIAS in names,
        "norm_before_residual": setting(data, "norm_before_residual", bool, False),
    }
    if vocab_size != config.vocab_size or "d2t" in names:
        options |= {"draft_vocab_size": vocab_size, "has_head": True}
    # t2d marks the tokens of the draft vocabulary, which d2t lists too.
    return config, options, frozenset({"t2d"})


def _dflash(data: Mapping[str, object], names: Collection[str], target: HeadSources) -> Options:
    config = head_config(layouts.dflash_layer_config(data, target))
    confidence = frozenset(name for name in names if name.startswith(_CONFIDENCE))
    return config, layouts.dflash_settings(data), confidence


_FC_BIAS, _CONFIDENCE = "fc.bias", "confidence_head."
_HEADS: Mapping[str, tuple[type[Any], Callable[[str], str], Callable[..., Options]]] = {
    "EAGLE": (EagleHead, layouts.eagle_name, _eagle),
    "EAGLE3": (Eagle3Head, layouts.eagle3_name, _eagle3),
    "DFLASH": (DFlashHead, layouts.dflash_name, _dflash),
}
"""By kind: the class, what renames a stored tensor, and what reads the settings."""
