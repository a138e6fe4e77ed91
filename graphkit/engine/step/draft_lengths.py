"""Drafts and rows of a step: their times, their running acceptance, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.engine.step.spec_step import SpecStep, StepVariant
from graphkit.ops.draft_length import choose_body, new_ledger
from graphkit.ops.loop_layout import Ledger


class DraftLengths:
    """Chooses the variant of each step. See ``graphkit.ops.draft_length``.

    Device loops choose on the device, v1 and v2 on the host. Acceptance and times are kept between
    launches. Until times were set, all are equal, so that the longest length runs.

    Args:
        step: The step, with several lengths.
        batch_sizes: Captured sizes in ascending order.
        behind: Tokens that the drafter has yet to process, by request row, on the device that
            chooses; ``None`` if it processes the tokens of every step.
        by_request: Counts of each request row, on the same device; ``None`` for trees.
        device: That device.

    Attributes:
        count: Number of variants without the one that catches up.
        drafts: Most drafts per request of each variant, see ``SpecStep.variants``.
        row_counts: [sizes, count] int32, rows of verify.
        num_drafts: [largest size] int32, drafts of each request of the next step.
        acceptance: [tables, positions, 2] float32, running counts of each position of a draft. All
            chains share a table. The trees of each length have their own, since their widths
            differ.
        times: [sizes, variants] float32, time of a step.
        ledger: [4] float64, what drafts have gained and cost; see ``Ledger``.
    """

    def __init__(
        self,
        step: SpecStep,
        batch_sizes: Sequence[int],
        behind: torch.Tensor | None,
        by_request: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self._behind, self.by_request = behind, by_request
        self._is_timed = step.context.times_steps
        self._depth = 1 if step.pending_catch_up is None else step.pending_catch_up.depth
        paths = [variant.max_path for variant in step.by_length]
        self.count, self.drafts = len(paths), [variant.drafts for variant in step.variants]
        tables = 1 if step.context.spec.topk == 1 else len(paths)
        self._sizes = torch.tensor(batch_sizes, dtype=torch.int32, device=device)
        self._num_steps = torch.tensor([p - 1 for p in paths], dtype=torch.int32, device=device)
        counts = [[v.num_rows(size) for v in step.by_length] for size in batch_sizes]
        self.row_counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self.num_drafts = torch.full((batch_sizes[-1],), -1, dtype=torch.int32, device=device)
        self.acceptance = torch.zeros(tables, max(paths) - 1, 2, device=device)
        self.times = torch.ones(len(batch_sizes), len(self.drafts), device=device)
        self.ledger = new_ledger(device)

    def choose(
        self,
        rows: torch.Tensor,
        body: torch.Tensor,
        report: torch.Tensor | None = None,
        variant: int = 0,
    ) -> None:
        """Count a step and choose the next one's variant; see ``choose_body``. Enqueues only."""
        is_divided = self.by_request is not None
        choose_body(
            rows, self._sizes, self._num_steps, self.row_counts, self.times, self.acceptance, body,
            self.ledger, self.num_drafts[: len(rows)] if is_divided else None, self.by_request,
            self._behind, self._depth, report, variant, self._is_timed,
        )  # fmt: skip

    def set_times(self, times: Sequence[Sequence[float]]) -> None:
        """Set the times of the variants of each size, see ``SpecStep.variants``."""
        self.times.copy_(torch.tensor(times))

    def clear(self) -> None:
        """Forget all steps, but not the times."""
        self.acceptance.zero_()
        self.num_drafts.fill_(-1)
        if self.by_request is not None:
            self.by_request.zero_()
        self.ledger.copy_(new_ledger(self.ledger.device))


class HostLengths(DraftLengths):
    """Chooses on the host, for steps that the host launches.

    Args:
        step: The step, with several lengths.
        batch_sizes: Captured sizes in ascending order.
    """

    def __init__(self, step: SpecStep, batch_sizes: Sequence[int]) -> None:
        pending = step.pending_catch_up
        behind = None if pending is None else torch.zeros_like(pending.count, device="cpu")
        of_state = step.state.acceptance
        by_request = None if of_state is None else torch.zeros_like(of_state, device="cpu")
        super().__init__(step, batch_sizes, behind, by_request, torch.device("cpu"))
        self._times_steps, self._variants = self._is_timed, step.variants
        self._is_timed = False
        self._body, self._no_rows = torch.zeros(2, 1, dtype=torch.int64)

    @property
    def seconds(self) -> tuple[float, float]:
        """Times of plain decoding and of the steps so far, see ``EngineStats``."""
        ledger = self.ledger.tolist()
        return ledger[Ledger.PLAIN_TIME] / 1e6, ledger[Ledger.STEP_TIME] / 1e6

    def set_times(self, times: Sequence[Sequence[float]]) -> None:
        """See ``DraftLengths.set_times``."""
        super().set_times(times)
        self.clear()

    def next_variant(
        self, req_pool_indices: Sequence[int]
    ) -> tuple[StepVariant, torch.Tensor | None]:
        """Choose the next step of some rows, and count the tokens that it stores.

        Returns:
            The variant, and the drafts of each row, [B] int32 on the CPU, if it divides its rows.
        """
        rows = torch.tensor(req_pool_indices)
        self.choose(rows, self._body)
        # The op counts on over the variants of all sizes, as device loops number their bodies.
        variant = self._variants[int(self._body) % len(self._variants)]
        if self._behind is not None:
            self._behind[rows] = self._behind[rows] + 1 if variant.defers_catch_up else 0
        return variant, self.num_drafts[: len(rows)].clone() if variant.divides_rows else None

    def observe(self, report: torch.Tensor, variant: StepVariant) -> None:
        """Count the report of a step, [B, 5 + longest path] int32 on the CPU.

        A timed step takes the time since the report before, unless ``pause`` was called since.
        """
        self._is_timed = self._times_steps
        self.choose(self._no_rows, self._body, report, self._variants.index(variant))
        self._is_timed = False

    def pause(self) -> None:
        """Do not count the time until the next report as that of a step."""
        self.ledger[Ledger.CLOCK] = 0

    def begin(self, req_pool_indices: Sequence[int]) -> None:
        """Forget the requests that had some rows before."""
        self.pause()
        for counts in (self._behind, self.by_request):
            if counts is not None:
                counts[list(req_pool_indices)] = 0
