"""Generations: when the host waits for the device in a step.

v1 (host in the loop) waits for the accepted tokens of every step. The host knows which requests
have finished before the draft model catches up, and KV slots are reserved one step at a time.

v2 (overlapped) launches a step before it reads the tokens of the previous one, so host and device
work at the same time. The host learns one step late that a request has finished; the tokens of the
extra step are dropped, and KV slots are reserved when the request joins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch

from graphkit.engine.device_step import DeviceStep
from graphkit.engine.request import Request
from graphkit.engine.request_memory import RequestMemory
from graphkit.engine.transfers import NewTokens, PendingTokens
from graphkit.engine.verifier import RunningBatch
from graphkit.errors import ConfigError
from graphkit.spec import SpecConfig


class Generation(ABC):
    """Runs steps and delivers their tokens to the requests.

    Args:
        device_step: The device's part of a step.
    """

    def __init__(self, device_step: DeviceStep) -> None:
        self._device_step = device_step
        self._new_tokens: NewTokens = []

    @abstractmethod
    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """Add a prefilled request; ``first_token`` is [1] int64 on the device."""

    @abstractmethod
    def advance(self, requests: Sequence[Request], batch: RunningBatch) -> None:
        """Run one step for the running requests."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all tokens on their way to the host and deliver them."""

    def take_new_tokens(self) -> NewTokens:
        """Return the tokens delivered since the last call, those of a failed step included."""
        new_tokens, self._new_tokens = self._new_tokens, []
        return new_tokens


class HostInLoop(Generation):
    """Generation v1: waits for each step's tokens; reserves KV slots for one step at a time.

    Args:
        device_step: The device's part of a step.
        memory: Provides the slots.
    """

    def __init__(self, device_step: DeviceStep, memory: RequestMemory) -> None:
        super().__init__(device_step)
        self._memory = memory

    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """See ``Generation.begin``. Waits for the token."""
        self._new_tokens += _send_first_token(request, first_token).deliver()

    def advance(self, requests: Sequence[Request], batch: RunningBatch) -> None:
        """See ``Generation.advance``. Waits for verify, before the draft model catches up."""
        # The newest token of a request is its bonus token, which has no KV slot yet.
        ahead = self._device_step.slots_ahead - 1
        self._memory.reserve((r.row, r.num_tokens + ahead) for r in requests)
        verified = self._device_step.draft_and_verify(batch)
        counts = verified.counts.num_accepted_tokens
        tokens = self._device_step.accepted_tokens(verified)
        pending = PendingTokens.send(requests, tokens, counts, is_verify=True)
        self._new_tokens += pending.deliver()
        catch_up = [
            0 if request.is_finished else count
            for request, count in zip(requests, pending.counts.tolist(), strict=True)
        ]
        self._device_step.drafter.extend_accepted(verified, catch_up)
        for request in requests:
            if not request.is_finished:
                self._memory.shrink(request.row, request.num_tokens - 1)

    def drain(self) -> None:
        """Do nothing: every step delivers its own tokens."""


class Overlapped(Generation):
    """Generation v2: launches a step before it reads the previous one's tokens.

    Args:
        device_step: The device's part of a step.
    """

    def __init__(self, device_step: DeviceStep) -> None:
        super().__init__(device_step)
        self._pending: deque[PendingTokens] = deque()

    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """See ``Generation.begin``. Does not wait; the next step delivers the token."""
        self._pending.append(_send_first_token(request, first_token))

    def advance(self, requests: Sequence[Request], batch: RunningBatch) -> None:
        """See ``Generation.advance``. Waits for earlier steps only, after launching this one."""
        earlier = len(self._pending)
        self._launch(requests, batch)
        self._deliver(earlier)

    def drain(self) -> None:
        """See ``Generation.drain``."""
        self._deliver(len(self._pending))

    def _launch(self, requests: Sequence[Request], batch: RunningBatch) -> None:
        """Enqueue a whole step without waiting for the device."""
        verified = self._device_step.draft_and_verify(batch)
        counts = verified.counts.num_accepted_tokens
        tokens = self._device_step.accepted_tokens(verified)
        # Appended before the drafter can fail: the lengths of this step are stored already.
        self._pending.append(PendingTokens.send(requests, tokens, counts, is_verify=True))
        self._device_step.drafter.extend(verified)

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            self._new_tokens += self._pending.popleft().deliver()


def _send_first_token(request: Request, token: torch.Tensor) -> PendingTokens:
    count = torch.ones_like(token, dtype=torch.int32)
    return PendingTokens.send([request], token[:, None], count, is_verify=False)


def select_generation(spec: SpecConfig, requested: Literal["v1", "v2"] | None) -> str:
    """Return the generation to run: the requested one, or the one that ``spec.plan()`` selects.

    Raises:
        ConfigError: ``requested`` is no generation.
    """
    if requested not in ("v1", "v2", None):
        raise ConfigError(
            f"generation must be 'v1', 'v2' or None, got {requested!r}.", field="generation"
        )
    return requested or spec.plan().generation
