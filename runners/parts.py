"""What a runner is made of before it captures; fixed from construction on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from graphkit.buffers import InputBuffers
from graphkit.graphs import Backend, SizeTable, Stage, scope
from graphkit.runners.dispatch import Dispatch
from graphkit.runners.outputs import Output
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode

OutputT = TypeVar("OutputT", bound=Output)


@dataclass(frozen=True, kw_only=True)
class Parts(Generic[OutputT]):
    """Shared by what captures and what replays.

    Attributes:
        mode: The forward mode.
        output_type: What the forward returns.
        table: The sizes.
        backend: What captures.
        buffers: Inputs and mailbox.
        step: The forward with everything around it.
        dispatch: Which batches have a graph.
        plan_on_host: What the attention backend does before a run, given batch and size; ``None``
            if it does all in the graph.
    """

    mode: ForwardMode
    output_type: type[OutputT]
    table: SizeTable
    backend: Backend
    buffers: InputBuffers
    step: Step[OutputT]
    dispatch: Dispatch
    plan_on_host: Callable[[Any, int], None] | None

    def stages(self, size: int) -> tuple[Callable[[], dict[str, torch.Tensor]], ...]:
        """What the captured graphs of this size do; the output's tensors by name."""
        first, *others = self.step.padded(size)

        def refreshed() -> OutputT:
            with scope(Stage.REFRESH):
                self.buffers.refresh(size)
            return first()

        return tuple(partial(_tensors_of, stage) for stage in (refreshed, *others))


def _tensors_of(stage: Callable[[], Output]) -> dict[str, torch.Tensor]:
    with scope(Stage.STEP):
        return stage().tensors()
