"""The requests of a step, and the report of the step on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from graphkit.engine.request import Request
from graphkit.engine.step import StepVariant
from graphkit.engine.step.acceptance import Links
from graphkit.engine.step.device_copies import to_device
from graphkit.engine.token_matcher import fill_tree
from graphkit.ops.logits import bitmask_words


class RunningBatch:
    """The running requests.

    Args:
        requests: The requests.
        device: The device.

    Attributes:
        is_greedy: Whether every temperature is 0.
        is_constrained: Whether a request has a matcher.
        row_list: Request rows, on the host.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests, self._device = list(requests), device
        self.row_list = [request.row for request in requests]
        self.is_greedy = not any(request.sampling.temperature for request in requests)
        self.is_constrained = any(request.matcher is not None for request in requests)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Request rows on the device, [B] int64; copied at the first use, without waiting."""
        return to_device(self.row_list, self._device)

    def tree_bitmask(self, tokens: torch.Tensor, links: Links, vocab_size: int) -> torch.Tensor:
        """Return the tokens that may follow each node. Waits for the trees to arrive on the host.

        Nodes behind a refused draft, or behind the end of the output, allow every token. No
        accepted path reaches the former, and the request ends before the latter. A request whose
        matcher raises an exception fails, and allows every token.

        The matchers have accepted the tokens of the roots, and are in the same state afterwards.

        Args:
            tokens: Token of each node, [B, W] int64.
            links: Links of the trees.
            vocab_size: Tokens of the target's vocabulary (V).

        Returns:
            [B * W, ceil(V / 32)] int32 on the CPU.
        """
        width = tokens.shape[1]
        bitmask = torch.full((tokens.numel(), bitmask_words(vocab_size)), -1, dtype=torch.int32)
        trees = torch.stack([tokens, *links], 1).tolist()  # one copy
        for request, rows, tree in zip(self.requests, bitmask.split(width), trees, strict=True):
            if (matcher := request.open_matcher) is not None:
                with request.matching():
                    fill_tree(matcher, rows, tree, vocab_size)
                if request.is_finished:
                    rows.fill_(-1)
        return bitmask


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report on its way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        report: [B, 4 + 2 * longest path] int32 on the host; valid once ``copied`` has completed.
        copied: Recorded behind the copy; ``None`` on the CPU, where copies complete at once.
        variant: What the step ran; ``None`` for a prefill.
    """

    requests: tuple[Request, ...]
    report: torch.Tensor
    copied: torch.cuda.Event | None
    variant: StepVariant | None

    @classmethod
    def send(
        cls, requests: Sequence[Request], report: torch.Tensor, variant: StepVariant | None
    ) -> PendingReport:
        """Start the copy to the host on the current stream."""
        copied = torch.cuda.Event() if report.is_cuda else None
        on_host = report.to("cpu", non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(report.device))
        return cls(tuple(requests), on_host, copied, variant)

    def deliver(self) -> None:
        """Wait for the copy, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        drafts = None if self.variant is None else self.variant.drafts
        for request, row in zip(self.requests, self.report.tolist(), strict=True):
            request.receive(row, drafts)
