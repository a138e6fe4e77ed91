"""Tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphkit.engine.request import Request

Events = list[tuple[Request, list[int]]]
"""New tokens by request, in the order in which they became known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Tokens of some requests on their way to the host.

    Attributes:
        requests: Whose.
        tokens: [B, most] on the host, once ``arrived`` says so.
        counts: [B] on the host, how many of them are meant.
        is_verify: Whether a verify step made them, not a prefill.
        arrived: Set on the device behind the copies; ``None`` on the CPU.
    """

    requests: tuple[Request, ...]
    tokens: torch.Tensor
    counts: torch.Tensor
    is_verify: bool
    arrived: torch.cuda.Event | None

    @classmethod
    def send(
        cls,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        counts: torch.Tensor,
        is_verify: bool,
    ) -> Results:
        """Start the copies to the host."""
        arrived = torch.cuda.Event() if tokens.is_cuda else None
        host = [rows.to("cpu", non_blocking=True) for rows in (tokens, counts)]
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(tokens.device))
        return cls(
            requests=tuple(requests),
            tokens=host[0],
            counts=host[1],
            is_verify=is_verify,
            arrived=arrived,
        )

    def book(self) -> Events:
        """Wait for the copies and give every request that still runs its tokens."""
        if self.arrived is not None:
            self.arrived.synchronize()
        events: Events = []
        rows = zip(self.requests, self.tokens.tolist(), self.counts.tolist(), strict=True)
        for request, tokens, count in rows:
            if request.finish_reason is not None:  # ended in a step that was booked meanwhile
                continue
            if self.is_verify:
                request.num_verifies += 1
                request.num_accepted_tokens += count
            events.append((request, request.take(tokens[:count])))
        return events
