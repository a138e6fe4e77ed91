"""Draft lengths of a step: their times, their running acceptance, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.step.spec_step import SpecStep, StepVariant
from graphkit.ops.draft_length import choose_body


class DraftLengths:
    """Chooses the variant of each step. See ``graphkit.ops.draft_length``.

    Device loops choose on the device, v1 and v2 on the host. Acceptance and times are kept between
    launches. Until times were set, all are equal, so that the longest length runs.

    Args:
        step: The step, with several lengths.
        batch_sizes: Captured sizes in ascending order.
        behind: Tokens that the drafter has yet to process, by request row, on the device that
            chooses; ``None`` if it processes the tokens of every step.
        device: That device.

    Attributes:
        count: Number of lengths.
        drafts: Drafts per request of each variant, see ``SpecStep.variants``.
        acceptance: [tables, positions, 2] float32, running counts of each position of a draft. All
            chains share a table. The trees of each length have their own, since their widths
            differ.
        times: [sizes, lengths] float32, time of a step.
    """

    def __init__(
        self,
        step: SpecStep,
        batch_sizes: Sequence[int],
        behind: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self._behind = behind
        self._depth = 1 if step.pending_catch_up is None else step.pending_catch_up.depth
        paths = [variant.max_path for variant in step.by_length]
        self.count, self.drafts = len(paths), [variant.drafts for variant in step.variants]
        tables = 1 if step.context.spec.topk == 1 else len(paths)
        self._sizes = torch.tensor(batch_sizes, dtype=torch.int32, device=device)
        self._num_steps = torch.tensor([p - 1 for p in paths], dtype=torch.int32, device=device)
        self.acceptance = torch.zeros(tables, max(paths) - 1, 2, device=device)
        self.times = torch.ones(len(batch_sizes), len(paths), device=device)

    def choose(
        self,
        rows: torch.Tensor,
        variant: torch.Tensor,
        report: torch.Tensor | None = None,
        length: int = 0,
    ) -> None:
        """Count a step and choose the next one's variant; see ``choose_body``. Enqueues only."""
        choose_body(
            rows, self._sizes, self._num_steps, self.times, self.acceptance, variant, self._behind,
            self._depth, report, length,
        )  # fmt: skip

    def set_times(self, times: Sequence[Sequence[float]]) -> None:
        """Set the times of the variants of each size, see ``SpecStep.variants``.

        The time of a plain step includes its share of the catch-up that follows several of them.
        """
        variants = torch.tensor(times)
        if self._behind is not None:
            variants[:, 0] += (variants[:, -1] - variants[:, 0]) / self._depth
        self.times.copy_(variants[:, : self.count])


class HostLengths(DraftLengths):
    """Chooses on the host, for steps that the host launches.

    Args:
        step: The step, with several lengths.
        batch_sizes: Captured sizes in ascending order.
    """

    def __init__(self, step: SpecStep, batch_sizes: Sequence[int]) -> None:
        pending = step.pending_catch_up
        behind = None if pending is None else torch.zeros_like(pending.count, device="cpu")
        super().__init__(step, batch_sizes, behind, torch.device("cpu"))
        self._variants = step.variants
        self._variant, self._no_rows = torch.zeros(2, 1, dtype=torch.int64)

    def next_variant(self, req_pool_indices: Sequence[int]) -> StepVariant:
        """Return the variant of the next step of some rows, and count the tokens that it stores."""
        rows = torch.tensor(req_pool_indices)
        self.choose(rows, self._variant)
        # The op counts on over the variants of all sizes, as device loops number their bodies.
        variant = self._variants[int(self._variant) % len(self._variants)]
        if self._behind is not None:
            self._behind[rows] = self._behind[rows] + 1 if variant.defers_catch_up else 0
        return variant

    def observe(self, report: torch.Tensor, variant: StepVariant) -> None:
        """Count the report of a step, [B, 4 + longest path] int32 on the CPU."""
        self.choose(self._no_rows, self._variant, report, variant.length)

    def begin(self, req_pool_indices: Sequence[int]) -> None:
        """Forget the requests that had some rows before."""
        if self._behind is not None:
            self._behind[list(req_pool_indices)] = 0
