"""What all loops of a runner share: launches through a mailbox, rows, control words and ring."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from struct import Struct

import torch

from graphkit.buffers import Axis, FieldLayout, InputBuffers, Rows, StepInputs, declare
from graphkit.distributed import RankGroup
from graphkit.engine.step.draft_lengths import DraftLengths
from graphkit.engine.step.output_ring import OutputRing
from graphkit.engine.step.spec_step import SpecStep
from graphkit.graphs import LoopGraph
from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.loop_layout import Control
from graphkit.runners import Output, declare_output
from graphkit.runners.known_memory import attribute_tensors

_CODES = {torch.int64: "q", torch.bool: "?"}
"""Format of each dtype in ``struct``."""


@dataclass(kw_only=True, eq=False)
class LaunchInputs(StepInputs):
    """Batch of a launch."""

    req_pool_indices: Rows = declare(Axis.REQUEST, torch.int64, "row of the request")
    is_watched: Rows = declare(
        Axis.REQUEST, torch.bool, "whether the loop ends when the request ends"
    )
    max_steps: Rows = declare(Axis.NONE, torch.int64, "most steps of the loop")
    launch: Rows = declare(Axis.NONE, torch.int64, "number of the launch")


@dataclass(kw_only=True, eq=False)
class LaunchOutput(Output):
    """Rows of the first step, [B] int64."""

    req_pool_indices: torch.Tensor = declare_output(Axis.REQUEST, torch.int64)


class LoopLauncher:
    """Writes the batches of launches into a mailbox, and launches loops.

    A launch usually follows a wait, in which other code has filled the CPU's caches, so the less
    code a launch runs, the faster it is. One call of ``struct`` therefore writes the whole batch,
    which the caller has validated, instead of a ``Replayer``.

    Args:
        buffers: Buffers of the prologue, for ``LaunchInputs``.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers, self._mailbox = buffers, buffers.mailbox
        self._payload = buffers.layouts[0].payload
        self._packers: dict[int, Struct] = {}

    def launch(
        self,
        graph: LoopGraph,
        rows: Sequence[int],
        watched: Collection[int],
        max_steps: int,
        number: int,
    ) -> None:
        """Launch a loop. After an exception, the next launch waits for the device.

        Args:
            graph: The loop.
            rows: Rows of the requests, valid and at most as many as the largest size.
            watched: Rows of ``rows`` at whose end the loop ends.
            max_steps: Most steps.
            number: Number of the launch.

        Raises:
            ReplayError: CUDA refused the launch, or the device has failed.
        """
        mailbox, requests = self._mailbox, len(rows)
        packer = self._packers.get(requests)
        if packer is None:
            packer = self._packers[requests] = _packer(self._buffers, requests)
        entry = mailbox.claim()
        packer.pack_into(
            mailbox.words(entry), self._payload,
            *rows, *map(watched.__contains__, rows), max_steps, number,
        )  # fmt: skip
        mailbox.post(entry, requests, requests)
        graph.replay()
        mailbox.commit()


def _packer(buffers: InputBuffers, requests: int) -> Struct:
    """Return the format of a batch from the first field's payload to the last one's."""
    layouts: Sequence[FieldLayout] = buffers.layouts
    parts, end = ["="], layouts[0].payload
    for layout in layouts:
        rows = buffers.capacity.rows(layout.field.axis, requests)
        parts.append(f"{layout.payload - end}x{rows}{_CODES[layout.dtype]}")
        end = layout.payload + rows * layout.row_bytes
    return Struct("".join(parts))


class LoopState:
    """Rows, control words and ring, and what a loop does with them around its steps.

    Args:
        rows: Rows of the batch, int64, which the steps read in place; as many as the largest size.
        batch_sizes: Captured sizes in ascending order.
        step: The step, which gives the longest path and the draft lengths.
        ring_entries: Most steps that wait for the host to read them.
        group: Ranks that run the same loops, if any.

    Attributes:
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
            state = step.state
            self.lengths = DraftLengths(step, batch_sizes, state.behind, state.acceptance, device)
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

    def advance(self, report: torch.Tensor, variant: int) -> None:
        """Write the report of a step to the ring, and decide what the loop runs next.

        Args:
            report: Report of the step, see ``SpecStepOutput``.
            variant: Index of its variant, 0 with one draft length.
        """
        # A plain step that catches up follows the lengths.
        lengths = self.lengths
        length = 0 if lengths is None or variant == lengths.count else variant
        signals = None
        if self._group is not None:  # what the host of one rank asks for, all ranks do
            own = end_signals(self.control, self.ring.words, self.ring.entries)
            signals = self._group.collectives.all_reduce(own)
        advance_loop(
            report, self.rows, self._watched, self.control, self._sizes, self.ring.words,
            self.ring.entries, signals, length, None if lengths is None else lengths.ledger,
        )  # fmt: skip
        self._choose_length(report, variant)

    def condition(self, word: Control) -> torch.Tensor:
        """Return the low half of a control word, int32 [1], as conditional nodes read it."""
        return self.control[word:][:1].view(torch.int32)[:1]

    def clear(self) -> None:
        """Forget all steps, such as those of captures, which run on pads."""
        self.control.zero_()
        self.ring.clear()
        if self.lengths is not None:
            self.lengths.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, without those of the ring."""
        owners = [self] if self.lengths is None else [self, self.lengths]
        return [tensor for owner in owners for _, tensor in attribute_tensors(owner, 1)]

    def _choose_length(self, report: torch.Tensor | None = None, variant: int = 0) -> None:
        """Count the step that ran, if any, and choose among the variants of the next size."""
        if self.lengths is not None:
            self.lengths.choose(self.rows, self.control[Control.BODY :][:1], report, variant)
