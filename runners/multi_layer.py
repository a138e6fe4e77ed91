"""MULTI_LAYER_EAGLE: a chain of draft layers, each over a window shifted by one token.

At the row of position p, layer i reads the token of position p + 1 + i and the hidden states of
layer i - 1, and predicts the token of position p + 2 + i. From layer to layer the window of token
ids of each request shifts by one: its first token is dropped, and the token that the layer has
predicted is inserted at the request's ``select_index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from graphkit.buffers import AttentionBackend, MultiLayerDraftExtendInputs
from graphkit.config import BufferSizes, require_int
from graphkit.errors import ConfigError, OutputError
from graphkit.ops.logits import top_candidates
from graphkit.ops.step_rows import rotate_input_ids
from graphkit.runners.outputs import LastRowOutput, LayersOutput
from graphkit.runners.runner import Runner
from graphkit.runners.settings import RunnerOptions, check_types, show_options
from graphkit.runners.step import Step, rows_at
from graphkit.spec import ForwardMode, SpecConfig


class MultiLayerStep(Step[LayersOutput]):
    """Runs the layers in order."""

    def whole(self, inputs: MultiLayerDraftExtendInputs) -> LayersOutput:
        """Compute metadata and layers, and return the outputs of all, [B, S, ...] each."""
        self.attend(inputs)
        chain = _Chain(self, inputs)
        layers = [chain.layer(i).tensors() for i in range(len(self.forward))]
        common = [name for name in layers[0] if all(name in layer for layer in layers)]
        return LayersOutput(
            **{name: torch.stack([layer[name] for layer in layers], 1) for name in common}
        )


class _Chain:
    """Runs the layers once over the inputs, which it does not change."""

    def __init__(self, step: MultiLayerStep, inputs: MultiLayerDraftExtendInputs) -> None:
        self._step, self._inputs = step, inputs
        width, tokens, lengths = inputs.tokens_per_request, inputs.num_tokens, inputs.lengths
        if lengths is None:
            self._starts = torch.arange(0, tokens, width, device=inputs.input_ids.device)
            # The index of a pad request is 0, the row of a live one. Keep it inside its own rows.
            self._select = inputs.select_index.clamp(self._starts, self._starts + (width - 1))
        else:
            self._starts = lengths.cumsum(0) - lengths
            self._select = inputs.select_index
        self._window = replace(inputs, select_index=self._select)

    def layer(self, index: int) -> LastRowOutput:
        """Run one layer, and make the window of the next one."""
        window, is_last = self._window, index == len(self._step.forward) - 1
        allowed = {"token": window.num_tokens, "request": window.batch_size}
        logits, hidden_states = self._step.draft_rows(self._step.forward[index](window), allowed)
        made = self._selected(logits, hidden_states)
        if is_last:
            return made
        if hidden_states is None or hidden_states.shape[0] != window.num_tokens:
            raise OutputError(
                f"layer {index} returned no hidden state for each of its {window.num_tokens} rows. "
                "The next layer reads them: return hidden_states [T, D]."
            )
        assert made.topk_index is not None, "a layer always selects"
        self._window = self._moved_on(made.topk_index, hidden_states)
        return made

    def _selected(self, logits: torch.Tensor, hidden_states: torch.Tensor | None) -> LastRowOutput:
        """Return the rows at ``select_index``, with their top-k."""
        tokens = self._inputs.num_tokens
        logits = rows_at(self._select, tokens, logits)
        if hidden_states is not None:
            hidden_states = rows_at(self._select, tokens, hidden_states)
        topk_p, topk_index = top_candidates(
            logits,
            self._step.spec.topk,
            self._inputs.temperatures,
            token_map=self._step.draft_token_map,
        )
        return LastRowOutput(
            next_token_logits=logits,
            hidden_states=hidden_states,
            topk_p=topk_p,
            topk_index=topk_index,
        )

    def _moved_on(
        self, topk_index: torch.Tensor, hidden_states: torch.Tensor
    ) -> MultiLayerDraftExtendInputs:
        """Return the window of the next layer."""
        input_ids = self._window.input_ids.clone()
        lengths = self._inputs.extend_seq_lens
        rotate_input_ids(input_ids, self._starts, lengths, topk_index, self._select)
        return replace(self._window, input_ids=input_ids, hidden_states=hidden_states)


class MultiLayerEagleRunner(Runner[MultiLayerDraftExtendInputs, LayersOutput]):
    """Catches up and drafts with a chain of S layers: S tokens deep, K candidates each.

    The output has the rows at ``select_index``, with a layer dimension after the requests:
    ``topk_index`` [B, S, K] and so on. See ``Runner`` for further arguments.

    Args:
        forward: One forward per layer. Each takes ``MultiLayerDraftExtendInputs`` whose
            ``input_ids`` and ``hidden_states`` are its window. It returns a ``ForwardOutput`` or
            ``DraftExtendOutput`` with hidden states of every row, which the next layer reads, and
            logits of every row or only of the rows at ``select_index``.
        num_front_tokens: Rows before the W of each request that run again, so that the layers
            overwrite the KV of rejected drafts there.

    Raises:
        ConfigError: ``forward`` does not have one forward per step.
    """

    mode = ForwardMode.MULTI_LAYER_EAGLE
    attention_mode = ForwardMode.DRAFT_EXTEND_V2
    inputs_type = MultiLayerDraftExtendInputs
    output_type = LayersOutput
    step_type = MultiLayerStep
    appends_rows = False
    takes_layers = True
    may_stay_eager = True

    @show_options(Runner.__init__)
    def __init__(
        self,
        forward: Sequence[Any] | nn.ModuleList,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        attention: AttentionBackend | None = None,
        inputs_type: type[MultiLayerDraftExtendInputs] | None = None,
        num_front_tokens: int = 0,
        **options: Unpack[RunnerOptions],
    ) -> None:
        check_types(type(self), spec, sizes, attention)
        require_int("MultiLayerEagleRunner", "num_front_tokens", num_front_tokens, least=0)
        self.num_front_tokens = num_front_tokens
        is_chain = isinstance(forward, Sequence | nn.ModuleList)
        layers = tuple(forward) if is_chain else (forward,)
        if not is_chain or len(layers) != spec.num_steps or not layers:
            passed = f"{len(layers)} forwards" if is_chain else f"a {type(forward).__name__}"
            raise ConfigError(
                f"MultiLayerEagleRunner got {passed} for num_steps {spec.num_steps}. Pass a list "
                "with one forward per step, or an nn.ModuleList.",
                field="forward",
            )
        super().__init__(
            layers, spec=spec, sizes=sizes, attention=attention, inputs_type=inputs_type, **options
        )
