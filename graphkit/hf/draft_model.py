"""Draft models of a transformers model: what engines and targets of it make of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine import Drafter, EagleDrafter, EngineModel
from graphkit.errors import ConfigError
from graphkit.hf.forward import TransformersForward
from graphkit.hf.layout import ModelLayout
from graphkit.hf.pools import LayerGroupAttention
from graphkit.kv import ReqToTokenPool
from graphkit.runners import ForwardOutput
from graphkit.spec import ForwardMode, SpecConfig


class DraftModel(ABC):
    """A draft model that fits a target. Engines and targets run it over pools of their own.

    Attributes:
        module: The weights that are not the target's.
        algorithm: The algorithm that it drafts for.
        modes: Modes that it runs.
        aux_layers: Layers of the target whose inputs it reads side by side; see ``AuxStates``.
            Empty if it reads the rows that the target's head receives, or none.
        token_map: Target token of each token of a reduced vocabulary, int64; ``None`` without one.
    """

    module: nn.Module
    algorithm: str
    modes: ClassVar[tuple[ForwardMode, ...]] = (
        ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    )  # fmt: skip
    aux_layers: tuple[int, ...] = ()
    token_map: torch.Tensor | None = None

    @abstractmethod
    def engine_model(self, requests: ReqToTokenPool, spec: SpecConfig) -> EngineModel:
        """Return the model over new KV pools, with slots for every request at its longest."""

    def drafter(self, model: EngineModel) -> Drafter:
        """Return the drafter of an engine; ``model`` is what ``engine_model`` returned."""
        return EagleDrafter(model)


class StandaloneDraft(DraftModel):
    """A causal language model with the vocabulary of the target.

    Args:
        model: The model, prepared by ``prepare_model``.
        layout: Its layers with state.

    Raises:
        ConfigError: The model has recurrent layers.
    """

    algorithm = "STANDALONE"

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        if layout.recurrent:
            raise ConfigError(
                f"{type(model).__name__} has recurrent states ({layout.recurrent[0].name}), which "
                "drafts would change: a drafter keeps no states to return to. Use a draft model "
                "with attention alone.",
                field="draft",
            )
        self.module, self._model, self._layout = model, model, layout

    def engine_model(self, requests: ReqToTokenPool, spec: SpecConfig) -> EngineModel:
        """See ``DraftModel.engine_model``."""
        attention = LayerGroupAttention(
            requests, self._layout.attention, spec.page_size, self._model.dtype
        )
        run = TransformersForward(self._model, self._layout, attention)

        def forward(inputs: Any) -> ForwardOutput:
            return ForwardOutput(next_token_logits=run(inputs).next_token_logits)

        return EngineModel(forward, attention)
