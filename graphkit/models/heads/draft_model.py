"""Draft models: their forwards, and what engines and targets of a model make of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.buffers import (
    DraftContextInputs,
    DraftExtendInputs,
    DraftInputs,
    Inputs,
    MultiLayerDraftExtendInputs,
    TargetVerifyInputs,
)
from graphkit.engine import (
    DFlashDrafter,
    Drafter,
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
)
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.forward import TransformersForward, batch_forward
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.heads.layers import DraftHead
from graphkit.models.heads.mtp import MtpHead
from graphkit.models.layout import ModelLayout
from graphkit.models.pools import LayerGroupAttention, TargetKeys
from graphkit.models.residual import DeferredSums
from graphkit.models.running import SelectedKeys
from graphkit.ops.rows import gather_rows
from graphkit.runners import DraftContextOutput, ForwardOutput
from graphkit.runners.outputs import Output
from graphkit.spec import ForwardMode, SpecConfig

_CHAIN = "MULTI_LAYER_EAGLE"
"""EAGLE with one draft layer per step."""


class HeadForward:
    """A draft head over pools, as runners call it. It can be captured.

    Args:
        compute: Computes the output of a batch from this object and the inputs.
        attention: The backend that stores the keys and values of the layers.
        numbers: Index among these layers of each module that attends.
        norm_sizes: Widths of sums that norms add up; see ``DeferredSums``.
        first_indexer: Index of the first indexer that the forward reaches.
    """

    def __init__(
        self,
        compute: Callable[[HeadForward, Any], Output],
        attention: LayerGroupAttention,
        numbers: Mapping[nn.Module, Sequence[int]],
        norm_sizes: Collection[int],
        first_indexer: int = 0,
    ) -> None:
        self.attention, self._compute = attention, compute
        self._numbers, self._norm_sizes, self._first = numbers, norm_sizes, first_indexer

    def __call__(self, inputs: Any) -> Output:
        """Return the output of a batch."""
        return self._compute(self, inputs)

    @contextmanager
    def running(
        self, inputs: Inputs, selected: Mapping[int, SelectedKeys] = MappingProxyType({})
    ) -> Iterator[None]:
        """Let the head attend to the KV pools of a batch in a block.

        Args:
            inputs: The batch.
            selected: The keys that its rows see in some layers, by index.
        """
        batch = batch_forward(
            self.attention, self._numbers, inputs, first_indexer=self._first, selected=selected
        )
        with batch.running(), DeferredSums(self._norm_sizes):
            yield


class DraftModel(ABC):
    """A draft model that fits a target. Engines and targets run it over pools of their own.

    Attributes:
        module: The weights that are not the target's.
        layout: Its layers with state.
        dtype: Data type of its keys and values.
        algorithm: The algorithm that it drafts for.
        modes: Modes that it runs.
        num_steps: Draft steps if none are given, the longest of an engine.
        aux_layers: Layers of the target whose inputs it reads side by side; see ``AuxStates``.
            Empty if it reads the rows that the target's head receives, or none.
        token_map: Target token of each token of a reduced vocabulary, int64; ``None`` without one.
        reads_target: Whether it reads the target's keys and values and has none of its own.
        row_invariant: Whether its attention is row-invariant. Drafts do not change the text.
    """

    module: nn.Module
    layout: ModelLayout
    dtype: torch.dtype
    algorithm: str
    modes: tuple[ForwardMode, ...] = (
        ForwardMode.DRAFT, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    )  # fmt: skip
    num_steps: int = 3
    aux_layers: tuple[int, ...] = ()
    token_map: torch.Tensor | None = None
    reads_target: bool = False
    row_invariant: bool = False

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


def _over_pools(
    head: DraftHead,
    layout: ModelLayout,
    attention: LayerGroupAttention,
    compute: Callable[[HeadForward, Any], Output],
) -> HeadForward:
    numbers = {head.get_submodule(layer.name): (i,) for i, layer in enumerate(layout.attention)}
    return HeadForward(compute, attention, numbers, layout.norm_sizes)


class HeadDraft(DraftModel):
    """An EAGLE or EAGLE-3 head, which then runs through graphkit alone.

    Args:
        head: The head, on the device and in the dtype of its target.
        fuse: As for ``graphkit.models.load``.
    """

    def __init__(self, head: EagleHead | Eagle3Head, *, fuse: bool = True) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.prepare(fuse=fuse), head.dtype
        self.algorithm = "EAGLE"
        if isinstance(head, Eagle3Head):
            self.algorithm, self.aux_layers = "EAGLE3", head.aux_layers
            self.token_map = head.token_map()

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:  # noqa: ARG002
        return _over_pools(self._head, self.layout, attention, self._run)

    def _run(self, pooled: HeadForward, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Return logits of every row, or of each request's last row in DRAFT_EXTEND."""
        head, rows = self._head, (inputs.input_ids, inputs.hidden_states, inputs.positions)
        with pooled.running(inputs):
            if isinstance(head, Eagle3Head) and not _is_packed(inputs):
                logits, hidden = head(*rows, with_logits=True)
            else:
                hidden = _last_rows(inputs, head(*rows))
                logits = head.logits(hidden)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)


class DFlashDraft(DraftModel):
    """A DFLASH head. Its blocks run in engines and in STEP alone.

    Args:
        head: The head, on the device and in the dtype of its target.
        fuse: As for ``graphkit.models.load``.
    """

    algorithm = "DFLASH"
    modes = ()  # in a target, TARGET_VERIFY is the mode of the target's own forward

    def __init__(self, head: DFlashHead, *, fuse: bool = True) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.prepare(fuse=fuse), head.dtype
        self.aux_layers = head.aux_layers

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        head = self._head
        return DFlashDrafter(
            model,
            block_size=head.block_size,
            mask_token_id=head.mask_token_id,
            sample_from_anchor=head.options.sample_from_anchor,
        )

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:
        run = partial(self._run, spec.longest.num_draft_tokens - 1)
        return _over_pools(self._head, self.layout, attention, run)

    def _run(
        self, drafts: int, pooled: HeadForward, inputs: TargetVerifyInputs | DraftContextInputs
    ) -> ForwardOutput | DraftContextOutput:
        """Return logits of every row of a block, or store the keys and values of a context."""
        head = self._head
        if isinstance(inputs, DraftContextInputs):
            context = head.encoder(inputs.hidden_states)
            for layer, (key, value) in enumerate(head.context_heads(context, inputs.positions)):
                pooled.attention.store(layer, key, value, inputs.out_cache_loc)
            return DraftContextOutput(hidden_states=context)
        width = inputs.tokens_per_request
        with pooled.running(inputs, self._windows(inputs, width)):
            hidden = head(inputs.input_ids, inputs.positions, width)
        logits = head.drafted_logits(hidden, inputs.input_ids, width, drafts)
        return ForwardOutput(next_token_logits=logits)

    def _windows(self, inputs: TargetVerifyInputs, width: int) -> Mapping[int, SelectedKeys]:
        """Return the keys that rows of a block see in layers with a window, by layer.

        Those of its request from the window of the row on: up to the end of the block, or up to the
        row itself in causal layers.
        """
        options, metadata = self._head.options, inputs.attention
        assert metadata is not None, "a runner sets it"
        most = options.window + (0 if options.is_causal else width - 1)
        if not options.windowed_layers or (
            not options.is_causal and metadata.max_seqlen_k <= options.window
        ):
            return {}
        rows = inputs.positions
        ends = rows + 1 if options.is_causal else (inputs.seq_lens + width).repeat_interleave(width)
        keys = torch.arange(min(most, metadata.max_seqlen_k), device=rows.device)
        keys = (rows - options.window + 1).clamp(min=0)[:, None] + keys
        selected = SelectedKeys(keys.masked_fill(keys >= ends[:, None], -1))
        return dict.fromkeys(options.windowed_layers, selected)


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
        self.module, self._model = model, model
        self.layout, self.dtype = layout, model.dtype

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:  # noqa: ARG002
        run = TransformersForward(self._model, self.layout, attention)

        def forward(inputs: Any) -> ForwardOutput:
            return ForwardOutput(next_token_logits=run(inputs).next_token_logits)

        return forward


class MtpDraft(DraftModel):
    """MTP layers: one that drafts every step, or a chain with one layer per step.

    Args:
        head: The layers.
        algorithm: ``"EAGLE"`` drafts with the first layer, ``"MULTI_LAYER_EAGLE"`` with the chain;
            ``None`` selects the chain if there are several layers.
    """

    def __init__(self, head: MtpHead, algorithm: str | None = None) -> None:
        self.module = self._head = head
        self.layout, self.dtype = head.layout, head.dtype
        name = (_CHAIN if len(head.chain) > 1 else "EAGLE") if algorithm is None else algorithm
        self.algorithm = "EAGLE"
        if name.upper() == _CHAIN:
            self.algorithm, self.modes = _CHAIN, (ForwardMode.MULTI_LAYER_EAGLE,)
            self.num_steps = min(self.num_steps, len(head.chain))

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        return MultiLayerDrafter(model) if self.algorithm == _CHAIN else EagleDrafter(model)

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:
        layers, num_steps = len(self._head.chain), spec.longest.num_steps
        if self.algorithm != _CHAIN:
            return self.layer_forward(0, attention)
        if num_steps > layers:
            raise ConfigError(
                f"num_steps is {num_steps}, but the folder has {layers} MTP layers, one per step. "
                f"Set num_steps to a value from 1 to {layers}, or load the model with the "
                "algorithm EAGLE, which drafts with the first layer alone.",
                field="num_steps",
            )
        return [self.layer_forward(layer, attention) for layer in range(num_steps)]

    def layer_forward(self, layer: int, attention: LayerGroupAttention) -> HeadForward:
        """Return the forward of one layer over pools of all layers."""
        chain = self._head.chain
        return HeadForward(
            partial(self._run, layer),
            attention,
            {each.attention_module: (i,) for i, each in enumerate(chain)},
            chain[layer].layout.norm_sizes,
            sum(len(each.layout.indexers) for each in chain[:layer]),
        )

    def _run(self, layer: int, pooled: HeadForward, inputs: Any) -> ForwardOutput:
        """Return logits and hidden states of the rows that the mode needs."""
        with pooled.running(inputs):
            hidden = self._head(layer, inputs.input_ids, inputs.hidden_states, inputs.positions)
        is_chain = isinstance(inputs, MultiLayerDraftExtendInputs)
        rows = gather_rows(hidden, inputs.last_rows()) if is_chain else _last_rows(inputs, hidden)
        logits = self._head.logits(rows)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden if is_chain else rows)


def _is_packed(inputs: Inputs) -> TypeGuard[DraftExtendInputs]:
    """Return whether the mode needs the logits of each request's last row alone."""
    return isinstance(inputs, DraftExtendInputs) and inputs.width is not None


def _last_rows(inputs: Inputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return the rows whose logits the mode needs, so that the output head runs on no others."""
    return gather_rows(hidden, inputs.last_rows()) if _is_packed(inputs) else hidden
