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
        """What a captured graph of this size does: refresh, metadata, forward."""
        self._buffers.refresh(size)
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
        width = batch.num_tokens // batch.batch_size
        live = replace(
            capacity,
            requests=batch.batch_size,
            tokens_per_request=width,
            letters={**capacity.letters, "W": width},
        )
        declared = [
            field
            for field in fields_of(self._buffers.inputs)
            if not field.optional or getattr(batch, field.name) is not None
        ]
        device = self._buffers.device
        rows: dict[str, Any] = {
            layout.name: admit(layout, getattr(batch, layout.name), layout.capacity, device).to(
                device
            )
            for layout in resolve(declared, live)
        }
        return self._buffers.inputs(**rows)
