"""Multi-layer Eagle: a chain of draft layers, each over the window of the one before.

Layer i reads, at the row of position p, the token of position p + 1 + i and the hidden states that
layer i - 1 made there, and predicts the token of position p + 2 + i. So from layer to layer every
request's window of token ids moves on by one: out goes its first token, in comes, at the request's
``select_index``, the token that the layer has just predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.buffers import Inputs, MultiLayerDraftExtendInputBuffers, MultiLayerDraftExtendInputs
from graphkit.config import require_int
from graphkit.errors import ConfigError, OutputError
from graphkit.ops import rotate_input_ids
from graphkit.runners.outputs import LastRowOutput, LayersOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step, rows_of
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.spec.tree import top_candidates


class MultiLayerStep(Step[LayersOutput]):
    """Layers one after the other, as one stage or as one stage each.

    Attributes:
        one_graph: Whether the chain is one stage.
    """

    one_graph = True

    def stages(self, inputs: Inputs) -> tuple[Callable[[], Any], ...]:
        """The chain as one piece, or its layers."""
        assert isinstance(inputs, MultiLayerDraftExtendInputs), "the runner's buffers are these"
        chain = _Chain(self, inputs)
        layers = tuple(partial(chain.layer, i) for i in range(len(self.forward)))
        return (lambda: [layer() for layer in layers][-1],) if self.one_graph else layers


class _Chain:
    """The layers over one view, which is left as it was found.

    What a layer hands on it makes anew. Between two graphs of one size that is memory of the first
    one's pool: it holds until the second has run, since nothing else runs between them.
    """

    def __init__(self, step: MultiLayerStep, inputs: MultiLayerDraftExtendInputs) -> None:
        self._step, self._window = step, inputs
        self._inputs = inputs
        self._made: list[LastRowOutput] = []

    def layer(self, index: int) -> LastRowOutput:
        """Run one layer; the last one returns what all of them made."""
        if index == 0:
            self._begin()
        window, is_last = self._window, index == len(self._step.forward) - 1
        allowed = {"token": window.num_tokens, "request": window.batch_size}
        logits, hidden_states = rows_of(self._step.forward[index](window), allowed)
        made = self._selected(logits, hidden_states)
        self._made.append(made)
        if is_last:
            return self._all()
        if hidden_states is None or hidden_states.shape[0] != window.num_tokens:
            raise OutputError(
                f"layer {index} returned no hidden state for each of its {window.num_tokens} rows, "
                "but the next layer reads them. Return hidden_states [T, D]."
            )
        assert made.topk_index is not None, "a layer always selects"
        self._window = self._moved_on(made.topk_index, hidden_states)
        return made

    def _begin(self) -> None:
        inputs = self._inputs
        self._step.attend(inputs)
        self._made = []
        width = inputs.tokens_per_request
        self._starts = torch.arange(inputs.batch_size, device=inputs.input_ids.device) * width
        # A pad request's index is 0, a live request's row: it may only touch a row of its own.
        self._select = inputs.select_index.clamp(self._starts, self._starts + width - 1)
        self._window = replace(inputs, select_index=self._select)

    def _selected(self, logits: torch.Tensor, hidden_states: torch.Tensor | None) -> LastRowOutput:
        """The rows at ``select_index``, unless the forward has selected them already."""
        tokens = self._inputs.num_tokens
        if logits.shape[0] == tokens:
            logits = logits.index_select(0, self._select)
        if hidden_states is not None and hidden_states.shape[0] == tokens:
            hidden_states = hidden_states.index_select(0, self._select)
        topk_p, topk_index = top_candidates(logits, self._step.spec.topk, self._inputs.temperatures)
        return LastRowOutput(
            next_token_logits=logits,
            hidden_states=hidden_states,
            topk_p=topk_p,
            topk_index=topk_index,
        )

    def _moved_on(
        self, topk_index: torch.Tensor, hidden_states: torch.Tensor
    ) -> MultiLayerDraftExtendInputs:
        """The window of the next layer."""
        input_ids = self._window.input_ids.clone()
        lengths = self._inputs.extend_seq_lens
        rotate_input_ids(input_ids, self._starts.int(), lengths, topk_index, self._select)
        return replace(self._window, input_ids=input_ids, hidden_states=hidden_states)

    def _all(self) -> LayersOutput:
        """What the layers made, [B, S, ...] each."""
        layers = [made.tensors() for made in self._made]
        common = [name for name in layers[0] if all(name in layer for layer in layers)]
        return LayersOutput(
            **{name: torch.stack([layer[name] for layer in layers], 1) for name in common}
        )


class MultiLayerEagleRunner(Runner[LayersOutput]):
    """Catches up and drafts with S layers in one go: S tokens deep, K candidates each.

    Args:
        forward: One forward per layer. Each gets ``MultiLayerDraftExtendInputs`` whose
            ``input_ids`` and ``hidden_states`` are its own window, and returns a ``ForwardOutput``
            or ``DraftExtendOutput``: hidden states of every row (the next layer reads them), logits
            of every row or, pruned by ``select_index``, of every request.
        one_graph: Whether the chain is one graph per size; otherwise each layer has its own. The
            results are the same.
        num_front_tokens: Rows before the W of each request that are run again, so that the layers
            overwrite what they made of guesses there.
        spec, options: As in ``Runner``.

    The output has the rows at ``select_index``, a layer dimension after the requests:
    ``topk_index`` [B, S, K] and so on.

    Raises:
        ConfigError: There is not one forward per step.
    """

    mode = ForwardMode.MULTI_LAYER_EAGLE
    attention_mode = ForwardMode.DRAFT_EXTEND_V2
    buffers_type = MultiLayerDraftExtendInputBuffers
    output_type = LayersOutput
    step_type = MultiLayerStep
    may_stay_eager = True

    def __init__(
        self,
        forward: Any,
        *,
        spec: SpecConfig,
        one_graph: bool = True,
        num_front_tokens: int = 0,
        **options: Any,
    ) -> None:
        require_int("MultiLayerEagleRunner", "num_front_tokens", num_front_tokens, least=0)
        self.num_front_tokens = num_front_tokens
        is_chain = isinstance(forward, Sequence | nn.ModuleList)
        layers = tuple(forward) if is_chain else (forward,)
        if not is_chain or len(layers) != spec.num_steps or not layers:
            raise ConfigError(
                f"MultiLayerEagleRunner got {len(layers)} forwards for num_steps "
                f"{spec.num_steps}. Give a list with one forward per step.",
                field="forward",
            )
        self.one_graph = one_graph
        super().__init__(layers, spec=spec, **options)

    def _make_step(self, forward: Any) -> Step[LayersOutput]:
        step = MultiLayerStep(
            forward, self._attention_mode, self.spec, self.output_type, self.buffers, self.attention
        )
        step.one_graph = self.one_graph
        return step

    def width(self) -> int:
        """See ``Runner.width``."""
        return super().width() + self.num_front_tokens
