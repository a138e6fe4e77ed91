"""The two ways in which a step meets the host.

v1 keeps the host in the loop: it waits for what verify accepted, ends requests in the middle of a
step, and catches up on accepted tokens alone. v2 overlaps: while the device works on one step, the
host books the one before, so it learns one step late that a request has ended.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphkit.engine.drafter import Drafter
from graphkit.engine.memory import RequestMemory
from graphkit.engine.parts import EngineContext, EngineModel, Verified
from graphkit.engine.request import Request
from graphkit.engine.results import Events, Results
from graphkit.engine.verifier import Batch, Verifier
from graphkit.errors import ConfigError
from graphkit.runners import Runner
from graphkit.spec import SpecConfig, SpecFallbackWarning


class Core:
    """What both generations do on the device.

    Args:
        target: The model whose output it is.
        drafter: Prepared here.
        context: The engine's.
        generator: Draws for requests with a temperature.

    Attributes:
        runners: The runner of each mode.
        slots_ahead: Slots behind the committed tokens that one step writes.
    """

    def __init__(
        self,
        target: EngineModel,
        drafter: Drafter,
        context: EngineContext,
        generator: torch.Generator,
    ) -> None:
        drafter.prepare(context)
        self.drafter, self.context = drafter, context
        self.verifier = verifier = Verifier(target, context, drafter.max_path, generator)
        self.runners: tuple[Runner[Any], ...] = (verifier.runner, *drafter.runners)
        self.slots_ahead = max(context.verify_width, drafter.slots_needed)

    def start(self, req_pool_indices: torch.Tensor, length: int, first_token: torch.Tensor) -> None:
        """Leave a read prompt where ``draft_and_verify`` finds it."""
        lengths = torch.full_like(req_pool_indices, length, dtype=torch.int32)
        self._stash(req_pool_indices, lengths, first_token)

    def draft_and_verify(self, batch: Batch) -> Verified:
        """One step up to the point where the generations part."""
        rows, resolve = batch.req_pool_indices, self.context.future_map.resolve
        seq_lens, bonus = resolve("seq_lens", rows), resolve("bonus_tokens", rows)
        verified = self.verifier.verify(batch, seq_lens, self.drafter.draft(rows, seq_lens, bonus))
        self._stash(rows, verified.new_seq_lens, verified.bonus_tokens)
        return verified

    def accepted(self, verified: Verified) -> torch.Tensor:
        """The tokens of each request's accepted path, [B, most]."""
        predict = verified.predict.view(len(verified.seq_lens), -1)
        return predict[:, : self.drafter.max_path]

    def _stash(self, rows: torch.Tensor, seq_lens: torch.Tensor, bonus: torch.Tensor) -> None:
        self.context.future_map.stash(rows, {"seq_lens": seq_lens, "bonus_tokens": bonus})


class Generation(ABC):
    """How steps meet the host.

    Args:
        core: The device's side.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._events: Events = []

    @abstractmethod
    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """Take over a request whose prompt was read; first_token is [1] int64."""

    @abstractmethod
    def advance(self, requests: Sequence[Request], batch: Batch) -> None:
        """Make one step for the running requests."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for whatever is on its way."""

    def take_events(self) -> Events:
        """New tokens since the last call, also of a step that failed after they were booked."""
        events, self._events = self._events, []
        return events


class HostInLoop(Generation):
    """v1. Slots are held for the step at hand alone.

    Args:
        core: The device's side.
        memory: Where slots come from.
    """

    def __init__(self, core: Core, memory: RequestMemory) -> None:
        super().__init__(core)
        self._memory = memory

    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """See ``Generation.begin``."""
        sent = Results.send([request], first_token[:, None], _ones(first_token), False)
        self._events += sent.book()

    def advance(self, requests: Sequence[Request], batch: Batch) -> None:
        """See ``Generation.advance``."""
        # A request's newest token is its bonus token, which no KV slot holds yet.
        ahead = self._core.slots_ahead - 1
        self._memory.reserve((r.row, r.num_tokens + ahead) for r in requests)
        verified = self._core.draft_and_verify(batch)
        counts = verified.counts.num_accepted_tokens
        results = Results.send(requests, self._core.accepted(verified), counts, True)
        self._events += results.book()
        accepted = results.counts.tolist()
        live = [n * (r.finish_reason is None) for r, n in zip(requests, accepted, strict=True)]
        self._core.drafter.extend_accepted(verified, live)
        for request in requests:
            if request.finish_reason is None:
                self._memory.shrink(request.row, request.num_tokens - 1)

    def drain(self) -> None:
        """Nothing is ever on its way."""


class Overlapped(Generation):
    """v2. Slots of all steps are held from the beginning.

    Args:
        core: The device's side.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._on_their_way: deque[Results] = deque()

    def begin(self, request: Request, first_token: torch.Tensor) -> None:
        """See ``Generation.begin``."""
        sent = Results.send([request], first_token[:, None], _ones(first_token), False)
        self._on_their_way.append(sent)

    def advance(self, requests: Sequence[Request], batch: Batch) -> None:
        """See ``Generation.advance``. Books what was launched before; never waits for this step."""
        earlier = len(self._on_their_way)
        self._launch(requests, batch)
        self._book(earlier)

    def drain(self) -> None:
        """See ``Generation.drain``."""
        self._book(len(self._on_their_way))

    def _launch(self, requests: Sequence[Request], batch: Batch) -> None:
        """Everything of a step that the device does. No line of it waits for the device."""
        verified = self._core.draft_and_verify(batch)
        counts = verified.counts.num_accepted_tokens
        sent = Results.send(requests, self._core.accepted(verified), counts, True)
        self._on_their_way.append(sent)  # before anything else can fail: the step is committed
        self._core.drafter.extend(verified)

    def _book(self, count: int) -> None:
        for _ in range(count):
            self._events += self._on_their_way.popleft().book()


def _ones(tokens: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tokens, dtype=torch.int32)


def generation_of(spec: SpecConfig, wanted: Literal["v1", "v2"] | None) -> str:
    """The generation to run.

    Raises:
        ConfigError: v2 was asked for, and the plan does not allow it.
    """
    if wanted == "v1":
        return wanted
    if wanted not in ("v2", None):
        raise ConfigError(f"generation is 'v1', 'v2' or None, got {wanted!r}.", field="generation")
    with warnings.catch_warnings():
        if wanted == "v2":  # refused below, so nothing falls back
            warnings.simplefilter("ignore", SpecFallbackWarning)
        plan = spec.plan()
    if wanted == "v2" and plan.generation != "v2":
        raise ConfigError(
            f"generation 'v2' cannot run: {plan.reason}. Use None or 'v1'.", field="generation"
        )
    return plan.generation
