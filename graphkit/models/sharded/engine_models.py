"""The models of an engine: a target and its draft model. Several engines can share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import torch

from graphkit.config import BufferSizes, require_type
from graphkit.distributed import RankGroup
from graphkit.engine import (
    DFlashDrafter,
    Drafter,
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
    NgramDrafter,
)
from graphkit.errors import ConfigError, short_repr
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.folders import (
    load_dflash_head,
    load_eagle3_head,
    load_eagle_head,
    load_mtp_head,
)
from graphkit.models.heads.forwards import DFlashForward, EagleForward
from graphkit.models.heads.layers import quantize_layers
from graphkit.models.heads.load import quantize_draft
from graphkit.models.heads.mtp_chain import MTPHead
from graphkit.models.quantization import check_quantization
from graphkit.models.sharded.checkpoint import (
    default_checkpoint,
    load_checkpoint,
)
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.sharded.pools import PoolFactory
from graphkit.models.sharded.runner_forwards import MTPForward, StandaloneForward
from graphkit.models.sharded.tensor_parallel import group_of

ALGORITHMS = ("NONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM", "DFLASH")
"""Algorithms of ``reference_engine``. MULTI_LAYER_EAGLE is EAGLE with a chain of draft layers."""
DraftModel = EagleHead | Eagle3Head | MTPHead | DFlashHead | LlamaModel
"""What drafts for a target."""
_HEADS: Mapping[str, tuple[Callable[..., DraftModel], str]] = {
    "EAGLE": (load_eagle_head, "eagle"),
    "EAGLE3": (load_eagle3_head, "eagle3"),
    "DFLASH": (load_dflash_head, "dflash"),
    "MULTI_LAYER_EAGLE": (load_mtp_head, "mtp"),
}
"""Loader of the head of each algorithm, and the weights that ship with the package."""


@dataclass(frozen=True, slots=True)
class EngineModels:
    """A target and the draft model of an algorithm.

    Attributes:
        algorithm: One of ``ALGORITHMS``.
        target: The target, on the device of the engines.
        draft: The head or model that drafts; ``None`` for NONE and NGRAM.
    """

    algorithm: str
    target: LlamaModel
    draft: DraftModel | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.target.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the target's weights."""
        return self.target.lm_head.weight.dtype

    @property
    def group(self) -> RankGroup | None:
        """The ranks that split the target, if any."""
        return group_of(self.target)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers whose inputs an EAGLE-3 or DFLASH head reads; empty without one."""
        return self.draft.aux_layers if isinstance(self.draft, Eagle3Head | DFlashHead) else ()

    @property
    def draft_token_map(self) -> torch.Tensor | None:
        """Target token of each token of a reduced draft vocabulary; a new tensor each time."""
        return self.draft.token_map() if isinstance(self.draft, Eagle3Head) else None

    def sizes(self, max_batch_size: int, max_context_len: int, page_size: int) -> BufferSizes:
        """Return the sizes of the buffers of an engine over these models."""
        config, token_map = self.target.config, self.draft_token_map
        return BufferSizes(
            max_batch_size=max_batch_size,
            max_context_len=max_context_len,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            dtype=self.dtype,
            page_size=page_size,
            spec_hidden_size=len(self.aux_layers) * config.hidden_size or None,
            draft_vocab_size=None if token_map is None else len(token_map),
        )

    def drafter(self, pools: PoolFactory, num_steps: int) -> Drafter | None:
        """Create the drafter of one engine, over KV pools of its own.

        Raises:
            ConfigError: ``num_steps`` is larger than the number of draft layers.
        """
        draft = self.draft
        if draft is None:
            return NgramDrafter() if self.algorithm == "NGRAM" else None
        attention = pools.attention(draft.config)
        if isinstance(draft, MTPHead):
            return MultiLayerDrafter(
                EngineModel(
                    [MTPForward(draft, layer, attention) for layer in _layers(draft, num_steps)],
                    attention,
                )
            )
        if isinstance(draft, EagleHead | Eagle3Head):
            token_map, forward = self.draft_token_map, EagleForward(draft, attention)
            return EagleDrafter(EngineModel(forward, attention, draft_token_map=token_map))
        if isinstance(draft, DFlashHead):
            return DFlashDrafter(
                EngineModel(DFlashForward(draft, attention), attention),
                block_size=draft.block_size,
                mask_token_id=draft.mask_token_id,
            )
        return EagleDrafter(EngineModel(StandaloneForward(draft, attention), attention))


def load_models(
    algorithm: str,
    *,
    checkpoint: str | Path | None = None,
    draft: str | Path | None = None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    quantize: str | None = None,
    group: RankGroup | None = None,
) -> EngineModels:
    """Load the models that ship with graphkit, or those of folders.

    Args:
        algorithm: One of ``ALGORITHMS``.
        checkpoint: Folder of a different target in Llama layout, for NONE and NGRAM, and for EAGLE,
            EAGLE3 and DFLASH with ``draft``.
        draft: Folder of an EAGLE, EAGLE-3 or DFLASH head that was trained for the target.
        device: Device of the weights.
        dtype: Data type of the weights.
        quantize: ``"fp8"`` or ``"int4"`` stores the weights of decoder layers, and those of EAGLE
            heads, in eight or four bits; ``None`` keeps them.
        group: Ranks that split the target and its draft head; see ``load_checkpoint``. The model of
            STANDALONE is on each rank.

    Raises:
        ConfigError: An argument has a wrong type, ``checkpoint`` and ``draft`` do not fit the
            algorithm, or ``quantize`` is unknown or comes with ranks.
        CheckpointError: A folder cannot be loaded, or the head does not match the target.
    """
    algorithm = check_algorithm(algorithm)
    _check_folders(algorithm, checkpoint, draft)
    folder = checkpoint or default_checkpoint()
    target = load_checkpoint(folder, device=device, dtype=dtype, group=group)
    models = EngineModels(algorithm, target, _draft_model(algorithm, draft, target))
    return models if quantize is None else quantized_models(models, quantize)


def quantized_models(models: EngineModels, quantize: str) -> EngineModels:
    """Quantise the layers of models, in place, and return them.

    Args:
        models: The models.
        quantize: See ``load_models``.

    Raises:
        ConfigError: The format is unknown, or ranks split the models.
    """
    check_quantization(quantize)
    if models.group is not None:
        raise ConfigError(
            f"quantize is {short_repr(quantize)}, but ranks that split a model have their own "
            "layers, which "
            "are not quantised. Run on one device, or without quantize.",
            field="quantize",
        )
    quantize_layers(models.target, quantize)
    if models.draft is not None:
        quantize_draft(models.draft, quantize)
    return models


def _draft_model(algorithm: str, draft: str | Path | None, target: LlamaModel) -> DraftModel | None:
    """Load the draft model of an algorithm for a target."""
    if algorithm in _HEADS:
        load, kind = _HEADS[algorithm]
        return load(draft or default_checkpoint(kind), target)
    if algorithm == "STANDALONE":
        weight = target.lm_head.weight
        folder = default_checkpoint("standalone")
        return load_checkpoint(folder, device=weight.device, dtype=weight.dtype)
    return None


def check_algorithm(algorithm: object) -> str:
    """Return the name of an algorithm in capitals.

    Raises:
        ConfigError: The name is not in ``ALGORITHMS``.
    """
    name = algorithm.upper() if isinstance(algorithm, str) else ""
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r} has no reference drafter. Use one of "
            f"{', '.join(ALGORITHMS)}.",
            field="algorithm",
        )
    return name


def _check_folders(algorithm: str, checkpoint: str | Path | None, draft: str | Path | None) -> None:
    """Check that an algorithm can run with the folders of a target and of a draft head.

    Raises:
        ConfigError: One is no path, or the algorithm takes no draft head, or needs one.
    """
    for field, folder in {"checkpoint": checkpoint, "draft": draft}.items():
        types = (str, Path, NoneType)
        require_type("load_models", field, folder, types, "the path of a folder, or None")
    if draft is not None and algorithm not in ("EAGLE", "EAGLE3", "DFLASH"):
        raise ConfigError(
            f"{algorithm} takes no draft head, but got {str(draft)!r}. Use EAGLE, "
            "EAGLE3 or DFLASH, or omit the draft head.",
            field="draft",
        )
    if checkpoint is not None and draft is None and algorithm not in ("NONE", "NGRAM"):
        raise ConfigError(
            f"{algorithm} needs a draft model trained for its target, and graphkit has none for "
            f"{str(checkpoint)!r}. Use NONE or NGRAM, or EAGLE, EAGLE3 or DFLASH with a draft head "
            "for it.",
            field="checkpoint",
        )


def _layers(head: MTPHead, num_steps: int) -> range:
    layers = head.config.num_hidden_layers
    if not 1 <= num_steps <= layers:
        raise ConfigError(
            f"num_steps is {num_steps}, but the reference MTP chain has {layers} layers, one per "
            f"step. Set num_steps to a value from 1 to {layers}.",
            field="num_steps",
        )
    return range(num_steps)
