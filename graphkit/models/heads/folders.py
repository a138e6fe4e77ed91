"""Loading and saving of draft heads, in the layouts of published checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedConfig

from graphkit.config import is_int, require_type
from graphkit.errors import CheckpointError, ConfigError, short_repr
from graphkit.models.folder import StoredWeights, as_folder, read_config, write_folder
from graphkit.models.heads import layouts
from graphkit.models.heads.config import ASSISTANTS, config_entries, head_config
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import DraftHead
from graphkit.models.heads.sources import HeadSources
from graphkit.models.plain_tensors import PlainTensors, plain_tensors
from graphkit.models.stored_tensors import is_of_rounding
from graphkit.models.tensor_parallel import RankSplit

Head = TypeVar("Head", bound=DraftHead)
logger = logging.getLogger(__name__)

_FC_BIAS, _EMBEDDING, _HEAD = "fc.bias", "embed_tokens.weight", "lm_head.weight"
_ARCHITECTURES = {
    EagleHead: "LlamaForCausalLMEagle",
    Eagle3Head: "LlamaForCausalLMEagle3",
    DFlashHead: layouts.ARCHITECTURE,
}


def head_algorithm(folder: str | Path) -> str:
    """Return the kind of draft model of a folder, by its settings and tensors.

    DFLASH, EAGLE3, EAGLE, MTP, STANDALONE, or ASSISTANT, whose type is in ``ASSISTANTS``.

    A head has ``fc``, which merges embedding and feature, and MTP layers have ``eh_proj``. A folder
    with layer 0, or without any of these, has a whole model.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError: The folder is neither a string nor a path.
    """
    folder = as_folder("head_algorithm", folder)
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


def load_eagle_head(folder: str | Path, target: HeadSources) -> EagleHead:
    """Build the EAGLE or EAGLE-2 head of a local folder.

    Args:
        folder: ``config.json`` of one Llama, Mistral, Qwen2 or Qwen3 layer beside
            ``model.safetensors`` or ``pytorch_model.bin``, in the layout of the authors or of
            Speculators; see ``layouts``.
        target: The model that the head was trained for. The head uses its output head and its
            embedding unless the folder contains them. Ranks that split it split the head too.

    Returns:
        The head on the target's device and in its dtype, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or unsupported, or the
            head does not match the target, or the ranks cannot split it evenly.
        ConfigError: The folder is neither a string nor a path.
    """
    folder = as_folder("load_eagle_head", folder)
    data, stored = read_config(folder), plain_tensors(folder)
    if layouts.is_eagle3(stored.forms):
        raise CheckpointError(
            f"{str(folder)!r} contains an EAGLE-3 head, not an EAGLE head. Use the algorithm "
            "EAGLE3, or load_eagle3_head."
        )
    config = head_config(layouts.eagle_layer_config(data))
    names = set(map(layouts.eagle_name, stored.forms))
    build = partial(
        EagleHead,
        target=target,
        fc_bias=_FC_BIAS in names or layouts.flag(data, "fusion_bias"),
        has_embedding=_EMBEDDING in names,
        has_head=_HEAD in names,
    )
    return _load(build, config, stored, target, rename=layouts.eagle_name)


def load_eagle3_head(folder: str | Path, target: HeadSources) -> Eagle3Head:
    """Build the EAGLE-3 head of a local folder; arguments as for ``load_eagle_head``.

    The folder has the layout of the authors and SpecForge, or that of Speculators; see
    ``layouts``. ``draft_vocab_size`` in ``config.json`` is the size of the head's own
    vocabulary.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or unsupported, or the
            head does not match the target.
    """
    folder = as_folder("load_eagle3_head", folder)
    file, stored = read_config(folder), plain_tensors(folder)
    if not layouts.is_eagle3(stored.forms):
        raise CheckpointError(
            f"{str(folder)!r} contains no EAGLE-3 head: it has no hidden_norm. Use the algorithm "
            "EAGLE for an EAGLE head."
        )
    data = layouts.eagle3_settings(file)
    config = head_config(layouts.nested_layer(data))
    names = {layouts.eagle3_name(name) for name in stored.forms}
    vocab_size = data.get("draft_vocab_size")
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    if not is_int(vocab_size) or vocab_size < 1:
        raise CheckpointError(
            f"config.json: draft_vocab_size must be an int >= 1, got {short_repr(vocab_size)}. "
            "Correct it."
        )
    is_mapped = vocab_size != config.vocab_size or "d2t" in names
    build = partial(
        Eagle3Head,
        target=target,
        aux_layers=layouts.aux_layers(file),
        draft_vocab_size=vocab_size if is_mapped else None,
        fc_bias=_FC_BIAS in names,
        has_embedding=_EMBEDDING in names,
        has_head=is_mapped or _HEAD in names,
        norm_before_residual=layouts.flag(data, "norm_before_residual"),
    )
    # t2d marks the tokens of the draft vocabulary, which d2t lists too.
    ignored = frozenset({"t2d"})
    return _load(build, config, stored, target, ignored=ignored, rename=layouts.eagle3_name)


def load_dflash_head(folder: str | Path, target: HeadSources) -> DFlashHead:
    """Build the DFLASH head of a local folder; arguments as for ``load_eagle_head``.

    The folder has the layout of transformers or that of the authors, also of DFLASH 2 and DSPARK;
    see ``layouts``. The confidence head of DSPARK is named in a warning.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or unsupported, or the
            head does not match the target.
    """
    folder = as_folder("load_dflash_head", folder)
    data = read_config(folder)
    if not layouts.is_dflash(data):
        raise CheckpointError(
            f"{str(folder)!r} contains no DFLASH head: its config.json has no block_size. Use the "
            "algorithm EAGLE or EAGLE3 for another head."
        )
    config, stored = head_config(layouts.dflash_layer_config(data, target)), plain_tensors(folder)
    names = {layouts.dflash_name(name) for name in stored.forms}
    build = partial(
        DFlashHead,
        target=target,
        has_embedding=_EMBEDDING in names,
        has_head=_HEAD in names,
        **layouts.dflash_settings(data),
    )
    confidence = frozenset(name for name in names if name.startswith("confidence_head."))
    if confidence:
        logger.warning(
            "%s has %s, which is not used: it says how many drafts are worth verifying, and a step "
            "verifies num_draft_tokens of them.", folder, ", ".join(sorted(confidence)),
        )  # fmt: skip
    return _load(build, config, stored, target, confidence, layouts.dflash_name)


def save_draft_head(head: EagleHead | Eagle3Head | DFlashHead, folder: str | Path) -> None:
    """Write a head in its current dtype, without the weights that it shares with its target.

    Creates the folder; overwrites ``config.json`` and ``model.safetensors`` in it.

    Raises:
        ConfigError: An argument has a wrong type.
    """
    folder = as_folder("save_draft_head", folder)
    require_type("save_draft_head", "head", head, tuple(_ARCHITECTURES), "a draft head")
    config = config_entries(head.config) | {"architectures": [_ARCHITECTURES[type(head)]]}
    if isinstance(head, Eagle3Head):
        config |= layouts.eagle3_entries(head)
    if isinstance(head, DFlashHead):
        config |= layouts.dflash_entries(head)
    write_folder(folder, config, head.state_dict())


@contextmanager
def _on_meta_device() -> Iterator[None]:
    """Create parameters without memory; report a ConfigError as an error of the checkpoint."""
    try:
        with torch.device("meta"):
            yield
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _load(
    build: Callable[[PreTrainedConfig], Head],
    config: PreTrainedConfig,
    stored: PlainTensors,
    target: HeadSources,
    ignored: frozenset[str] = frozenset(),
    rename: Callable[[str], str] = lambda name: name,
) -> Head:
    target_weight, group = target.lm_head.get_parameter("weight"), getattr(target, "group", None)
    with _on_meta_device():
        head = build(config)
        expected = head.state_dict()
        split = None if group is None else RankSplit(head, group)
    if split is not None:
        split.cut(head)
    head.to(target_weight.dtype)
    names = {rename(name): name for name in stored.forms}
    parts = {} if split is None else split.parts
    is_quantised = stored.layout is not None
    rounding = {new for new, name in names.items() if is_quantised and is_of_rounding(name)}
    stored.fill(
        head,
        target_weight.device,
        ignored=ignored | rounding,
        rename=rename,
        expected=expected,
        parts=parts,
        advice="Use a draft head without them, in the dtype of its training.",
    )
    dequantised = stored.keep_quantized(head, names, parts, target_weight.device)
    stored.warn_dequantised(dequantised, head.dtype)
    if split is not None:
        split.install(head)
    return head.eval().requires_grad_(False)
