"""A list of batch sizes that was chosen for a traffic, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.record import Count, Duration, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeListCost:
    """What a list of captured sizes costs in a traffic.

    Attributes:
        batch_sizes: The sizes, ascending.
        padding: Mean number of pad requests per step that is replayed.
        step_us: Mean time of a step; ``None`` without measured times.
        eager_share: Share of steps that run without a graph, 0 to 1.
        memory_bytes: Memory of the graphs; ``None`` without a record.
        capture_s: Time of the capture; ``None`` without a record.
    """

    batch_sizes: tuple[Count, ...]
    padding: Duration
    step_us: Duration | None = None
    eager_share: Duration = 0.0
    memory_bytes: Count | None = None
    capture_s: Duration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """The sizes to capture for a traffic, beside the default list.

    Runners and commands take the file of a plan as their ``batch_sizes``.

    Attributes:
        live_sizes: Steps by number of live requests.
        mode: Forward mode of the times; empty without a record.
        budget: What limited the list, by name: ``sizes``, ``memory_bytes`` or ``capture_s``.
        chosen: The list that takes the least time within the budget.
        default: The default list for the same largest size.
        eager_above: Batches of more requests are faster without a graph; 0 if none is.
    """

    KIND: ClassVar[str] = "plan"
    live_sizes: Mapping[Count, Count]
    mode: str
    budget: Mapping[str, Duration]
    chosen: SizeListCost
    default: SizeListCost
    eager_above: Count = 0
