"""Reports of steps on their way to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphkit.engine.request import Request
from graphkit.ops.loop_layout import Report


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report on its way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        report: [B, 4 + longest path] int32 on the host; valid once ``copied`` has completed.
        is_verify: Whether a verify step produced it, rather than a prefill.
        copied: Recorded behind the copy; ``None`` on the CPU, where copies complete at once.
    """

    requests: tuple[Request, ...]
    report: torch.Tensor
    is_verify: bool
    copied: torch.cuda.Event | None

    @classmethod
    def send(
        cls, requests: Sequence[Request], report: torch.Tensor, *, is_verify: bool
    ) -> PendingReport:
        """Start the copy to the host on the current stream."""
        copied = torch.cuda.Event() if report.is_cuda else None
        on_host = report.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(report.device))
        return cls(tuple(requests), on_host, is_verify, copied)

    def deliver(self) -> None:
        """Wait for the copy, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        deliver(zip(self.requests, self.report.tolist(), strict=True), is_verify=self.is_verify)


def deliver(rows: Iterable[tuple[Request, Sequence[int]]], *, is_verify: bool) -> None:
    """Append the tokens of report rows to their requests, except for finished requests.

    Args:
        rows: Requests and their rows of a report.
        is_verify: Whether a verify step produced the report, rather than a prefill.
    """
    for request, row in rows:
        if request.is_finished:  # an earlier step, delivered after this one was launched
            continue
        if is_verify:
            request.accepted_lengths[row[Report.ACCEPTED]] += 1
        request.append(row[Report.TOKENS : Report.TOKENS + row[Report.NEW]])
