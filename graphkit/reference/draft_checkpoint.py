"""Load and save draft heads, in the layouts in which the field publishes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from graphkit.errors import CheckpointError, ConfigError
from graphkit.reference import hf_config as hf
from graphkit.reference.config import LlamaConfig
from graphkit.reference.eagle import EagleHead
from graphkit.reference.eagle3 import Eagle3Head
from graphkit.reference.folder import (
    StoredWeights,
    default_folder,
    read_config,
    write_folder,
)
from graphkit.reference.model import LlamaModel
from graphkit.reference.mtp import MTPHead

Head = TypeVar("Head", bound=nn.Module)

_FC_BIAS, _EMBEDDING = "fc.bias", "embed_tokens.weight"
_ARCHITECTURES = {EagleHead: "LlamaForCausalLMEagle", MTPHead: "LlamaForCausalLMNextN"}


def default_eagle_checkpoint() -> Path:
    """Return the folder of the Eagle head trained for the reference model."""
    return default_folder("eagle")


def default_mtp_checkpoint() -> Path:
    """Return the folder of the MTP layers trained for the reference model."""
    return default_folder("mtp")


def load_eagle_head(
    folder: str | Path,
    target: LlamaModel,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> EagleHead:
    """Build the EAGLE or EAGLE-2 head that a local folder holds.

    Args:
        folder: ``config.json`` of one Llama, Qwen2 or Qwen3 layer beside ``model.safetensors`` or
            ``pytorch_model.bin``.
        target: The model that the head was trained for; lends its head, and its embedding unless
            the folder holds one.
        device: Where the weights go; ``None`` is where the target is.
        dtype: What they are converted to; ``None`` is the target's.

    Returns:
        The head, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or not supported, or the
            head does not fit the target.
    """
    folder = Path(folder)
    config = LlamaConfig.from_dict(read_config(folder))
    stored = StoredWeights(folder)
    if any(name.startswith("midlayer.") for name in stored.forms):
        raise CheckpointError(f"{str(folder)!r} holds an EAGLE3 head. Use load_eagle3_head.")
    with _building():
        head = EagleHead(
            config,
            target,
            fc_bias=_FC_BIAS in stored.forms,
            has_embedding=_EMBEDDING in stored.forms,
        )
    return _filled(head, stored, target, device, dtype)


def load_eagle3_head(
    folder: str | Path,
    target: LlamaModel,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Eagle3Head:
    """Build the EAGLE-3 head that a local folder holds; arguments as of ``load_eagle_head``.

    ``draft_vocab_size`` in ``config.json`` is the head's own vocabulary.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or not supported, or the
            head does not fit the target.
    """
    folder = Path(folder)
    data = read_config(folder)
    config = LlamaConfig.from_dict(data)
    stored = StoredWeights(folder)
    with _building():
        head = Eagle3Head(
            config,
            target,
            draft_vocab_size=hf.integer(data, "draft_vocab_size", config.vocab_size),
            fc_bias=_FC_BIAS in stored.forms,
            has_embedding=_EMBEDDING in stored.forms,
        )
    # t2d tells which tokens the vocabulary has, which d2t does too.
    return _filled(head, stored, target, device, dtype, unread=frozenset({"t2d"}))


def load_mtp_head(
    folder: str | Path,
    target: LlamaModel,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MTPHead:
    """Build the MTP layers that a folder of ``save_draft_head`` holds.

    Args:
        folder: ``config.json``, whose num_hidden_layers counts the layers, beside the weights.
        target: The model that the layers were trained for; lends its embedding and head.
        device: Where the weights go; ``None`` is where the target is.
        dtype: What they are converted to; ``None`` is the target's.

    Returns:
        The head, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or not supported, or the
            layers do not fit the target.
    """
    folder = Path(folder)
    config = LlamaConfig.from_dict(read_config(folder))
    stored = StoredWeights(folder)
    with _building():
        head = MTPHead(config, target)
    return _filled(head, stored, target, device, dtype)


def save_draft_head(head: EagleHead | MTPHead, folder: str | Path) -> None:
    """Write a head in its own dtype, without what it borrows from its target.

    Makes the folder; overwrites ``config.json`` and ``model.safetensors`` in it.
    """
    config = head.config.to_dict() | {"architectures": [_ARCHITECTURES[type(head)]]}
    write_folder(Path(folder), config, head.state_dict())


@contextmanager
def _building() -> Iterator[None]:
    """Build without memory; what a config says wrong is the checkpoint's fault here."""
    try:
        with torch.device("meta"):
            yield
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _filled(
    head: Head,
    stored: StoredWeights,
    target: LlamaModel,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    unread: frozenset[str] = frozenset(),
) -> Head:
    like = target.lm_head.weight
    head.to(dtype or like.dtype)
    stored.fill(head, device or like.device, unread=unread)
    return head.eval().requires_grad_(False)
