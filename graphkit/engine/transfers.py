"""Copies between host and device that do not block the host when they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.engine.request import Request

NewTokens = list[tuple[Request, list[int]]]
"""New tokens of each request, in the order in which the host received them."""


def to_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy host numbers to the device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTokens:
    """Tokens of one step on their way to the host.

    Attributes:
        requests: The requests of the step, in batch order.
        tokens: [B, longest path] on the host; valid once ``copied`` has completed.
        counts: [B] on the host, number of valid tokens per row; valid at the same time.
        is_verify: Whether a verify step produced the tokens, rather than a prefill.
        copied: Recorded behind the copies; ``None`` on the CPU, where copies complete at once.
    """

    requests: tuple[Request, ...]
    tokens: torch.Tensor
    counts: torch.Tensor
    is_verify: bool
    copied: torch.cuda.Event | None

    @classmethod
    def send(
        cls,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        counts: torch.Tensor,
        is_verify: bool,
    ) -> PendingTokens:
        """Start the copies to the host on the current stream."""
        copied = torch.cuda.Event() if tokens.is_cuda else None
        on_host = [rows.to("cpu", non_blocking=True) for rows in (tokens, counts)]
        if copied is not None:
            copied.record(torch.cuda.current_stream(tokens.device))
        return cls(
            requests=tuple(requests),
            tokens=on_host[0],
            counts=on_host[1],
            is_verify=is_verify,
            copied=copied,
        )

    def deliver(self) -> NewTokens:
        """Wait for the copies, then append the tokens to every request that has not finished."""
        if self.copied is not None:
            self.copied.synchronize()
        new_tokens: NewTokens = []
        rows = zip(self.requests, self.tokens.tolist(), self.counts.tolist(), strict=True)
        for request, tokens, count in rows:
            if request.is_finished:  # an earlier step, delivered after this one was launched
                continue
            if self.is_verify:
                request.num_verifies += 1
                request.num_accepted_tokens += count
            new_tokens.append((request, request.append(tokens[:count])))
        return new_tokens
