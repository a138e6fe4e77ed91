"""Draft models, and what engines and targets of a model make of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.buffers import DraftExtendInputs, Inputs
from graphkit.engine import Drafter, EagleDrafter, EngineModel
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.forward import TransformersForward, batch_forward
from graphkit.models.layout import DRAFT_STEPS, ModelLayout
from graphkit.models.pools import LayerGroupAttention, TargetKeys
from graphkit.models.residual import DeferredSums
from graphkit.models.running import SelectedKeys
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput
from graphkit.spec import ForwardMode, SpecConfig


class DraftModel(ABC):
    """A draft model that fits a target. Engines and targets run it over pools of their own.

    Attributes:
        layout: Its layers with state.
        algorithm: The algorithm that it drafts for.
        modes: Modes that it runs.
        num_steps: Draft steps if none are given, the longest of an engine.
        aux_layers: Layers of the target whose inputs it reads side by side; see
            ``TransformersForward``. Empty if it reads the rows that the target's head receives, or
            none.
        reads_target: Whether it reads the target's keys and values and has none of its own.
        row_invariant: Whether its attention is row-invariant. Drafts do not change the text.
    """

    layout: ModelLayout
    algorithm: str
    modes: tuple[ForwardMode, ...] = (
        ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    )  # fmt: skip
    num_steps: int = DRAFT_STEPS
    aux_layers: tuple[int, ...] = ()
    reads_target: bool = False
    row_invariant: bool = False

    @property
    def module(self) -> nn.Module:
        """The weights that are not the target's: a head itself, or a model of transformers."""
        assert isinstance(self, nn.Module), "others override it"
        return self

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of its keys and values."""

    @property
    def token_map(self) -> torch.Tensor | None:
        """Target token of each token of a reduced vocabulary, int64 [V]; ``None`` without one."""
        return None

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        *,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
        target: EngineModel | None = None,
    ) -> EngineModel:
        """Return the model over new KV pools.

        Args:
            requests: Slots of each request.
            spec: The drafting and verification settings.
            slots: KV slots; ``None`` selects those of every request at its longest.
            attention: Attention backend; ``None`` selects Triton on CUDA and torch elsewhere.
            target: The target's model, whose pools a model with ``reads_target`` has.

        Raises:
            ConfigError: ``spec`` has more steps than a chain of MTP layers, or there is no
                ``target``.
        """
        backend: Any
        if self.reads_target:
            backend = TargetKeys(None if target is None else target.attention)
        else:
            backend = LayerGroupAttention(
                requests, self.layout.attention, spec.page_size, self.dtype, self.layout.indexers,
                slots, attention, self.row_invariant,
            )  # fmt: skip
        forward = self._forward(backend, spec.longest)
        return EngineModel(forward, backend, draft_token_map=self.token_map)

    def drafter(self, model: EngineModel) -> Drafter:
        """Return the drafter of an engine; ``model`` is what ``engine_model`` returned."""
        return EagleDrafter(model)

    @abstractmethod
    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:
        """Return the forward over pools, or those of a chain, for the longest drafts."""

    @contextmanager
    def _over_pools(
        self,
        attention: LayerGroupAttention,
        inputs: Inputs,
        selected: Mapping[int, SelectedKeys] = MappingProxyType({}),
        first_indexer: int = 0,
    ) -> Iterator[None]:
        """Let the model attend to the KV pools of a batch in a block."""
        numbers = {
            self.module.get_submodule(layer.name): (number,)
            for number, layer in enumerate(self.layout.attention)
        }
        batch = batch_forward(
            attention, numbers, inputs, first_indexer=first_indexer, selected=selected
        )
        with batch.running(), DeferredSums(self.layout.norm_sizes):
            yield


class WholeModelDraft(DraftModel):
    """Base of draft models that are models of transformers."""

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        self._model, self.layout = model, layout

    @property
    def module(self) -> PreTrainedModel:
        """See ``DraftModel.module``."""
        return self._model

    @property
    def dtype(self) -> torch.dtype:
        """See ``DraftModel.dtype``."""
        return self._model.dtype


class StandaloneDraft(WholeModelDraft):
    """A causal language model with the vocabulary of the target.

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
        super().__init__(model, layout)

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:  # noqa: ARG002
        run = TransformersForward(self._model, self.layout, attention)

        def forward(inputs: Any) -> ForwardOutput:
            return ForwardOutput(next_token_logits=run(inputs).next_token_logits)

        return forward


def is_packed(inputs: Inputs) -> bool:
    """Return whether the mode needs the logits of each request's last row alone."""
    return isinstance(inputs, DraftExtendInputs) and inputs.width is not None


def last_rows(inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows whose logits the mode needs, so that the output head runs on no others."""
    return gather_rows(hidden, inputs.last_rows()) if is_packed(inputs) else hidden
