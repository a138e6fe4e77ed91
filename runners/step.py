"""One forward with everything that stands around it, padded or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from graphkit.attention import AttentionBackend
from graphkit.buffers import InputBuffers, Inputs, admit, fields_of, resolve
from graphkit.runners.outputs import Output
from graphkit.spec import ForwardMode

OutputT = TypeVar("OutputT", bound=Output)


class Step(Generic[OutputT]):
    """Inputs, metadata, the user's forward, and a look at what it returned.

    Args:
        forward: The user's.
        mode: The mode that it serves.
        output_type: What it has to return.
        buffers: The runner's.
        attention: Makes the metadata, if any.
    """

    def __init__(
        self,
        forward: Callable[[Any], OutputT],
        mode: ForwardMode,
        output_type: type[OutputT],
        buffers: InputBuffers,
        attention: AttentionBackend | None,
    ) -> None:
        self._forward = forward
        self.name = getattr(forward, "__qualname__", type(forward).__name__)
        """The forward's name, for records."""
        self._mode, self._output_type = mode, output_type
        self._buffers, self._attention = buffers, attention

    def padded(self, size: int) -> OutputT:
        """Metadata and forward on the buffers as they stand, at a captured size."""
        return self._run(self._buffers.view(size))

    def unpadded(self, batch: Any) -> OutputT:
        """The forward on the live rows alone.

        Raises:
            InputError: A field cannot be taken; its name is in the text.
        """
        return self._run(self._on_device(batch))

    def _run(self, inputs: Inputs) -> OutputT:
        with torch.no_grad():
            if self._attention is not None:
                inputs.attention = self._attention.metadata(self._mode, inputs)
            output = self._forward(inputs)
        return self._output_type.checked(output, inputs.batch_size, inputs.num_tokens)

    def _on_device(self, batch: Any) -> Inputs:
        capacity = self._buffers.capacity
        width = self._buffers.tokens_of(batch) // batch.batch_size
        live = replace(
            capacity,
            requests=batch.batch_size,
            tokens_per_request=width,
            letters={**capacity.letters, "W": width},
        )
        buffers, values = self._buffers, {}
        for field in fields_of(buffers.inputs):
            value = getattr(batch, field.name, None)
            if field.name in buffers.bound:
                value = buffers.live_rows(field.name, batch.batch_size)
            if value is not None or field.name not in buffers.absent:
                values[field] = value
        rows: dict[str, Any] = {
            layout.name: admit(layout, values[layout.field], layout.capacity, buffers.device).to(
                buffers.device
            )
            for layout in resolve(tuple(values), live)
        }
        return buffers.inputs(**rows)
