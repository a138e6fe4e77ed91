"""The requests of a step, and the report of the step on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from graphkit.engine.request import Request
from graphkit.engine.step import StepBody
from graphkit.engine.step.device_copies import to_device


class RunningBatch:
    """The running requests.

    Args:
        requests: The requests.
        device: The device.

    Attributes:
        is_greedy: Whether every temperature is 0.
        is_constrained: Whether a request has a matcher.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests, self._device = list(requests), device
        self.is_greedy = not any(request.sampling.temperature for request in requests)
        self.is_constrained = any(request.matcher is not None for request in requests)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Request rows on the device, [B] int64; copied at the first use, without waiting."""
        return to_device([request.row for request in self.requests], self._device)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report on its way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        report: [B, 4 + 2 * longest path] int32 on the host; valid once ``copied`` has completed.
        copied: Recorded behind the copy; ``None`` on the CPU, where copies complete at once.
        body: What the step ran; ``None`` for a prefill.
    """

    requests: tuple[Request, ...]
    report: torch.Tensor
    copied: torch.cuda.Event | None
    body: StepBody | None

    @classmethod
    def send(
        cls, requests: Sequence[Request], report: torch.Tensor, body: StepBody | None
    ) -> PendingReport:
        """Start the copy to the host on the current stream."""
        copied = torch.cuda.Event() if report.is_cuda else None
        on_host = report.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(report.device))
        return cls(tuple(requests), on_host, copied, body)

    def deliver(self) -> None:
        """Wait for the copy, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        drafts = None if self.body is None else self.body.drafts
        for request, row in zip(self.requests, self.report.tolist(), strict=True):
            request.receive(row, drafts)
