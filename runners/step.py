"""One forward with everything that stands around it, padded or not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from graphkit.attention import AttentionBackend
from graphkit.buffers import InputBuffers, Inputs, admit, fields_of, resolve
from graphkit.errors import OutputError
from graphkit.graphs import Stage, scope
from graphkit.runners.outputs import Output, check_rows
from graphkit.spec import ForwardMode, SpecConfig

OutputT = TypeVar("OutputT", bound=Output)


class Step(Generic[OutputT]):
    """Inputs, metadata, the user's forward, and a look at what it returned.

    A mode whose step is more than one forward overrides ``stages``.

    Args:
        forward: The user's.
        mode: As the attention backend knows it.
        spec: How the algorithm drafts and verifies.
        output_type: What a step makes.
        buffers: The runner's.
        attention: Makes the metadata, if any.

    Attributes:
        name: The forward's name, for records.
    """

    def __init__(
        self,
        forward: Any,
        mode: ForwardMode,
        spec: SpecConfig,
        output_type: type[OutputT],
        buffers: InputBuffers,
        attention: AttentionBackend | None,
    ) -> None:
        self.forward = _scoped(forward)
        self.name = name_of(forward)
        self.spec, self.output_type = spec, output_type
        self._mode, self._buffers, self._attention = mode, buffers, attention

    def stages(self, inputs: Inputs) -> tuple[Callable[[], OutputT], ...]:
        """What is done for a batch, one captured graph each; the last one makes the output."""
        return (lambda: self.whole(inputs),)

    def whole(self, inputs: Inputs) -> OutputT:
        """The step as one piece: metadata and forward."""
        self.attend(inputs)
        output = self.forward(inputs)
        return self.output_type.checked(output, inputs.batch_size, inputs.num_tokens)

    def padded(self, size: int) -> tuple[Callable[[], OutputT], ...]:
        """The stages on the buffers as they stand, at a captured size."""
        inputs = self._buffers.view(size)
        if self._buffers.capacity.ragged:
            inputs.width = self._buffers.capacity.tokens_per_request
        return self._without_gradients(self.stages(inputs))

    def unpadded(self, batch: Any, without: Collection[str] = ()) -> OutputT:
        """The step on the live rows alone; ``without`` names optional fields that it leaves out.

        Raises:
            InputError: A field cannot be taken; its name is in the text.
        """
        stages = self._without_gradients(self.stages(self._on_device(batch, without)))
        return [stage() for stage in stages][-1]

    def attend(self, inputs: Inputs, attention_inputs: Any = None) -> None:
        """Set the metadata of a batch, made from ``attention_inputs`` if they differ from it."""
        if self._attention is not None:
            with scope(Stage.METADATA):
                inputs.attention = self._attention.metadata(self._mode, attention_inputs or inputs)

    def _without_gradients(
        self, stages: tuple[Callable[[], OutputT], ...]
    ) -> tuple[Callable[[], OutputT], ...]:
        return tuple(torch.no_grad()(stage) for stage in stages)

    def _most_rows(self, batch: Any, requests: int, tokens: int) -> int:
        """Most rows of one request where they vary; a bound, if the host cannot see them."""
        counts = self._buffers.inputs.row_counts(batch)
        if counts is None or not counts.size:
            return tokens - requests + 1
        return max(int(counts.max()), 1)

    def _on_device(self, batch: Any, without: Collection[str]) -> Inputs:
        buffers, capacity = self._buffers, self._buffers.capacity
        requests, tokens = batch.batch_size, buffers.tokens_of(batch)
        buffers.check_bound(batch)
        width = max(tokens // requests, 1)
        if buffers.inputs.width_is_fixed:
            width = capacity.tokens_per_request
        if not capacity.ragged:  # then a batch whose rows are no multiple is refused by its shape
            tokens = requests * width
        letters = {**capacity.letters, "W": width}
        live = replace(capacity, requests=requests, letters=letters)
        values = {}
        for field in fields_of(buffers.inputs):
            value = getattr(batch, field.name, None)
            if field.name in buffers.bound_fields:
                value = buffers.live_rows(field.name, requests, tokens)
            if value is not None or field.name not in (*buffers.absent, *without):
                values[field] = value
        rows: dict[str, Any] = {}
        for layout in resolve(tuple(values), live):
            count = capacity.rows(layout.field.axis, requests, tokens)
            value = admit(layout, values[layout.field], count, buffers.device)
            rows[layout.name] = value.to(buffers.device)
        most = self._most_rows(batch, requests, tokens) if capacity.ragged else width
        buffers.check(batch, tokens, width=most)
        inputs = buffers.inputs(**rows)
        if capacity.ragged:
            inputs.width = most
        return inputs


def _scoped(forward: Any) -> Any:
    """A forward, or each of several, that says when the user's code runs."""
    if isinstance(forward, tuple):
        return tuple(_scoped(each) for each in forward)

    def users(inputs: Any) -> Any:
        with scope(Stage.FORWARD):
            return forward(inputs)

    return users


def name_of(forward: Any) -> str:
    """What records call a forward, or a sequence of them."""
    if isinstance(forward, tuple):
        return ", ".join(dict.fromkeys(name_of(each) for each in forward))
    return str(getattr(forward, "__qualname__", type(forward).__name__))


def rows_of(output: Any, allowed: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits and hidden states that a draft model's forward returned.

    Args:
        output: A ``ForwardOutput`` or a ``DraftExtendOutput``.
        allowed: See ``check_rows``.

    Raises:
        OutputError: It is neither, or has another number of rows.
    """
    logits = getattr(output, "next_token_logits", None)
    if not isinstance(output, Output) or logits is None:
        raise OutputError(
            f"the forward returned a {type(output).__name__}. Return graphkit.ForwardOutput or "
            "graphkit.DraftExtendOutput."
        )
    check_rows("next_token_logits", logits, allowed)
    hidden_states: torch.Tensor | None = getattr(output, "hidden_states", None)
    if hidden_states is not None:
        check_rows("hidden_states", hidden_states, allowed)
    return logits, hidden_states
