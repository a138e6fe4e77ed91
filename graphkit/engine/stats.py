"""Counters of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphkit.engine.request import Request
from graphkit.runners import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts over all requests since the engine was created.

    Attributes:
        new_tokens: Tokens generated.
        num_verifies: Verify steps, counted once per request that took part.
        accept_length: Mean tokens accepted per request and verify step, bonus included; 0 before
            the first step. Counts tokens behind the end of a request too.
        replays: Graph replays by forward mode.
        fallbacks: Eager runs by forward mode and reason.
    """

    new_tokens: int
    num_verifies: int
    accept_length: float
    replays: Mapping[str, int]
    fallbacks: Mapping[str, Mapping[str, int]]


class Tally:
    """Sums the counters of finished requests."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """Add a finished request."""
        self._counts["tokens"] += len(request.output_ids)
        self._counts["verifies"] += request.num_verifies
        self._counts["accepted"] += request.num_accepted_tokens

    def stats(self, running: Iterable[Request], runners: Iterable[Runner[Any, Any]]) -> EngineStats:
        """Return the counts, those of the running requests included."""
        total = Tally()
        total._counts.update(self._counts)
        for request in running:
            total.add(request)
        counts, by_mode = total._counts, [(runner.mode.name, runner.stats) for runner in runners]
        verifies = counts["verifies"]
        return EngineStats(
            new_tokens=counts["tokens"],
            num_verifies=verifies,
            accept_length=counts["accepted"] / verifies if verifies else 0.0,
            replays={mode: stats.replays for mode, stats in by_mode},
            fallbacks={mode: stats.fallbacks for mode, stats in by_mode if stats.fallbacks},
        )
