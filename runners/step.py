"""One step: inputs, attention metadata, the forward, and its checked output; padded or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch

from graphkit.buffers import (
    AttentionBackend,
    DraftExtendInputs,
    InputBuffers,
)
from graphkit.buffers.attention import APPENDING
from graphkit.config import BufferSizes
from graphkit.errors import OutputError
from graphkit.graphs import Stage, is_capturing, scope
from graphkit.ops.rows import gather_rows
from graphkit.runners.known_memory import is_a, own_attributes, type_name
from graphkit.runners.output_fields import OutputCheck
from graphkit.runners.outputs import DraftExtendOutput, Output
from graphkit.spec import ForwardMode, SpecConfig

OutputT = TypeVar("OutputT", bound=Output)


class Step(Generic[OutputT]):
    """Runs the forward of a mode. A mode whose step is more than one forward overrides ``whole``.

    Args:
        forward: The user's forward, or a tuple with one forward per layer.
        mode: The forward mode.
        attention_mode: The mode under which the attention backend knows this step.
        spec: How the algorithm drafts and verifies.
        sizes: Sizes of the buffers.
        output_type: Class of the output.
        buffers: The runner's buffers.
        attention: Backend that makes the metadata, if any.
        draft_token_map: See ``Runner``.

    Attributes:
        name: Name of the forward, for records.
    """

    def __init__(
        self,
        forward: Any,
        mode: ForwardMode,
        attention_mode: ForwardMode,
        spec: SpecConfig,
        sizes: BufferSizes,
        output_type: type[OutputT],
        buffers: InputBuffers,
        attention: AttentionBackend | None,
        draft_token_map: torch.Tensor | None = None,
    ) -> None:
        self.forward = _scoped(forward)
        self.name = forward_name(forward)
        self.mode, self.spec, self.output_type, self.buffers = mode, spec, output_type, buffers
        self._attention_mode, self._attention = attention_mode, attention
        self.draft_token_map = draft_token_map
        named = f"the forward {self.name}"
        self._output_check = OutputCheck(named, output_type.rows(spec, sizes))
        self._draft_check = OutputCheck(named, DraftExtendOutput.rows(spec, sizes))

    def whole(self, inputs: Any) -> OutputT:
        """Compute metadata and forward, and return the checked output."""
        self.attend(inputs)
        output = self.forward(inputs)
        return self.output_type.checked(
            output, inputs.batch_size, inputs.num_tokens, self._output_check, inputs.logit_rows
        )

    def draft_rows(
        self, output: Any, allowed: dict[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits and hidden states of a draft model's forward.

        Args:
            output: A ``ForwardOutput`` or a ``DraftExtendOutput``.
            allowed: See ``OutputCheck.check_field``.

        Raises:
            OutputError: The output has another type, other rows, or rows of another shape or dtype.
        """
        check = self._draft_check
        logits = getattr(output, "next_token_logits", None)
        if not isinstance(output, Output) or logits is None:
            raise OutputError(
                f"{check.forward} returned a {type(output).__name__}. Return "
                "graphkit.ForwardOutput or graphkit.DraftExtendOutput."
            )
        check.check_field("next_token_logits", logits, allowed)
        hidden_states: torch.Tensor | None = getattr(output, "hidden_states", None)
        if hidden_states is not None:
            check.check_field("hidden_states", hidden_states, allowed)
        return logits, hidden_states

    def padded_function(self, size: int) -> Callable[[], OutputT]:
        """Return the step over the buffers at a captured size. It does not refresh the inputs."""
        inputs = self.buffers.view(size)
        if self.buffers.capacity.ragged:
            inputs.width = self.buffers.capacity.tokens_per_request

        @torch.no_grad()
        def padded() -> OutputT:
            return self.whole(inputs)

        return padded

    def graph_function(self, size: int) -> Callable[[], dict[str, torch.Tensor]]:
        """Return the function that the graph of a size captures: the refresh and the padded step.

        It returns the output's tensors by name.
        """
        padded = self.padded_function(size)

        def refreshed() -> OutputT:
            with scope(Stage.REFRESH):
                self.buffers.refresh(size)
            return padded()

        return partial(output_tensors, refreshed)

    def padded(self, batch: Any, size: int) -> OutputT:
        """Run the function that the graph of a size captures, without a graph.

        Args:
            batch: Live rows, checked; ``None`` runs pads alone.
            size: A captured size. Its graph must not be in flight.

        Returns:
            All rows, pads included.
        """
        self.buffers.prepare(size)
        self.plan_on_host(self.buffers.view(size) if batch is None else batch, size)
        function = self.graph_function(size)
        with self.buffers.posted(batch):
            made = function()
        return self.output_type(**made)

    def unpadded(self, batch: Any, without: Collection[str] = ()) -> OutputT:
        """Run the step on copies of the live rows, without padding.

        Args:
            batch: Live rows.
            without: Optional fields that the batch omits.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
        """
        inputs = self._on_device(batch, without)
        with torch.no_grad():
            return self.whole(inputs)

    def plan_on_host(self, batch: Any, size: int) -> None:
        """Announce a batch to an attention backend that plans on the host."""
        if self._attention is not None and self.plans_on_host:
            self._attention.before_replay(self._attention_mode, batch, size)  # type: ignore[attr-defined]

    @property
    def plans_on_host(self) -> bool:
        """Whether the attention backend plans each batch on the host."""
        return hasattr(self._attention, "before_replay")

    @property
    def packs_rows(self) -> bool:
        """Whether attention knows packed rows, so that a prefill may have several requests."""
        return self._attention is None or self._attention.supports(ForwardMode.DRAFT_EXTEND)

    def attend(self, inputs: Any, attention_inputs: Any = None) -> None:
        """Set the attention metadata of a batch.

        Attention knows one mode of packed rows, DRAFT_EXTEND: a prefill runs as that.

        Args:
            inputs: Receives the metadata.
            attention_inputs: Inputs to compute it from, if they differ from ``inputs``.
        """
        if self._attention is None:
            return
        mode = self._attention_mode
        if inputs.lengths is not None and self.packs_rows:
            mode, attention_inputs = ForwardMode.DRAFT_EXTEND, self._packed_rows(inputs)
        with scope(Stage.METADATA):
            inputs.attention = self._attention.metadata(mode, attention_inputs or inputs)

    def _packed_rows(self, inputs: Any) -> DraftExtendInputs:
        """Return what attention reads of a prefill."""
        appended = inputs.lengths if self._attention_mode in APPENDING else 0
        return DraftExtendInputs(
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens + appended,
            num_accepted_tokens=inputs.lengths,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_cache_loc=inputs.out_cache_loc,
            width=inputs.width,
        )

    @contextmanager
    def wrapped(self, wrapper: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the forward by ``wrapper(forward)`` in eager and padded runs.

        Captured graphs do not change. Blocks may be nested.
        """
        forward, self.forward = self.forward, wrapper(self.forward)
        try:
            yield
        finally:
            self.forward = forward

    def check_unpadded(self, batch: Any) -> None:
        """Refuse a batch that ``unpadded`` cannot run, in the checking mode also for its values.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
        """
        self._on_device(batch, ())

    def _on_device(self, batch: Any, without: Collection[str]) -> Any:
        """Return the live rows as inputs on the device, every field checked."""
        buffers = self.buffers
        checked = buffers.checks.checked_rows(batch, without)
        rows: dict[str, Any] = {}
        # Captures run on the runner's tensors, not on the caller's.
        may_copy = not is_capturing()
        for name, tensor in checked.rows.items():
            passed = buffers.bound_fields.get(name, getattr(batch, name, None))
            rows[name] = tensor.to(buffers.device)
            if may_copy and isinstance(passed, torch.Tensor) and _same_memory(rows[name], passed):
                # A forward that writes into it must not change the caller's.
                rows[name] = rows[name].clone()
        if buffers.value_checks is not None:
            # Part of a larger step that is being captured: its runner reports the violations.
            if is_capturing():
                buffers.value_checks.enqueue(rows, is_padded=False)
            else:
                buffers.value_checks.check_now(rows)
        inputs: Any = buffers.inputs(**rows)
        if buffers.capacity.ragged or checked.is_packed:
            inputs.width, inputs.lengths = checked.width, getattr(batch, "lengths", None)
            inputs.spans = getattr(batch, "spans", None) if checked.is_packed else None
            inputs.logit_rows = getattr(batch, "logit_rows", None) if checked.is_packed else None
            inputs.packs_nodes = getattr(batch, "packs_nodes", None)
        return inputs


def rows_at(index: torch.Tensor, tokens: int, rows: torch.Tensor) -> torch.Tensor:
    """Return rows at an index; as they are if the forward has selected them already.

    Args:
        index: The row of each request.
        tokens: Rows of the batch.
        rows: What the forward returned: a row per token, or per request.

    Shapes:
        index: [B] int32 or int64. rows: [T, ...] or [B, ...]; returns [B, ...].
    """
    return gather_rows(rows, index) if rows.shape[0] == tokens else rows


def forward_name(forward: Any) -> str:
    """Return the name of a forward, or the names of several, for records."""
    if isinstance(forward, tuple):
        return ", ".join(dict.fromkeys(forward_name(layer) for layer in forward))
    if is_a(forward, (FunctionType, MethodType, BuiltinFunctionType, type)):
        return str(forward.__qualname__)
    return str(own_attributes(forward).get("__qualname__", type_name(type(forward))))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _scoped(forward: Any) -> Any:
    """Return a forward, or each of several, with a scope around the user's code."""
    if isinstance(forward, tuple):
        return tuple(_scoped(layer) for layer in forward)

    def in_scope(inputs: Any) -> Any:
        with scope(Stage.FORWARD):
            return forward(inputs)

    in_scope.__wrapped__ = forward  # type: ignore[attr-defined]
    return in_scope


def output_tensors(step: Callable[[], Output]) -> dict[str, torch.Tensor]:
    """Run a step and return its output's tensors by name."""
    with scope(Stage.STEP):
        return step().tensors()
