"""What all loops of a runner share on the device: rows of the batch, control words and the ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.distributed import RankGroup
from graphkit.engine.step.draft_lengths import DraftLengths
from graphkit.engine.step.loop_launcher import LaunchInputs, LaunchOutput
from graphkit.engine.step.output_ring import OutputRing
from graphkit.engine.step.spec_step import SpecStep
from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.loop_layout import Control
from graphkit.runners.known_memory import attribute_tensors


class LoopState:
    """Rows, control words and ring, and what a loop does with them around its steps.

    Args:
        rows: Rows of the batch, int64, which the steps read in place; as many as the largest size.
        batch_sizes: Captured sizes in ascending order.
        step: The step, which gives the longest path and the draft lengths.
        ring_entries: Most steps that wait for the host to read them.
        group: Ranks that run the same loops, if any.

    Attributes:
        rows: As passed.
        control: Control words, int64; see ``Control``.
        ring: Reports of steps on their way to the host.
        lengths: Chooses among several draft lengths; ``None`` with one.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        batch_sizes: Sequence[int],
        step: SpecStep,
        ring_entries: int,
        group: RankGroup | None,
    ) -> None:
        device, largest = rows.device, batch_sizes[-1]
        self.rows, self._group = rows, group
        self.control = torch.zeros(len(Control), dtype=torch.int64, device=device)
        self.ring = OutputRing(ring_entries, largest, step.max_path, device)
        self.lengths: DraftLengths | None = None
        if step.context.spec.is_adaptive:
            self.lengths = DraftLengths(step, batch_sizes, step.state.behind, device)
        self._watched = torch.zeros(largest, dtype=torch.bool, device=device)
        self._sizes = torch.tensor(batch_sizes, dtype=torch.int32, device=device)

    def begin(self, inputs: LaunchInputs) -> LaunchOutput:
        """Begin a loop, in its prologue."""
        begin_loop(
            inputs.req_pool_indices, inputs.is_watched, inputs.max_steps, inputs.launch,
            self.rows, self._watched, self.control, self._sizes,
        )  # fmt: skip
        self._choose_length()
        return LaunchOutput(req_pool_indices=inputs.req_pool_indices)

    def advance(self, report: torch.Tensor, length: int) -> None:
        """Write the report of a step to the ring, and decide what the loop runs next.

        Args:
            report: Report of the step, see ``SpecStepOutput``.
            length: Index of its draft length.
        """
        signals = None
        if self._group is not None:  # what the host of one rank asks for, all ranks do
            own = end_signals(self.control, self.ring.words, self.ring.entries)
            signals = self._group.collectives.all_reduce(own)
        advance_loop(
            report, self.rows, self._watched, self.control, self._sizes, self.ring.words,
            self.ring.entries, signals, length,
        )  # fmt: skip
        self._choose_length(report, length)

    def condition(self, word: Control) -> torch.Tensor:
        """Return the low half of a control word, int32 [1], as conditional nodes read it."""
        return self.control[word:][:1].view(torch.int32)[:1]

    def clear(self) -> None:
        """Forget all steps, such as those of captures, which run on pads."""
        self.control.zero_()
        self.ring.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, without those of the ring."""
        owners = [self] if self.lengths is None else [self, self.lengths]
        return [tensor for owner in owners for _, tensor in attribute_tensors(owner, 1)]

    def _choose_length(self, report: torch.Tensor | None = None, length: int = 0) -> None:
        """Count the step that ran, if any, and choose among the variants of the next size."""
        if self.lengths is not None:
            self.lengths.choose(self.rows, self.control[Control.BODY :][:1], report, length)
