"""Lock file: the contents of a target's graphs at a point in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.graph import GraphRecord
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord(Record):
    """Contents of a target's graphs, to detect changes.

    Attributes:
        target: Name of the target.
        environment: Where it was captured.
        fingerprints: Fingerprint of each graph, by its name.
        graphs: The graphs without addresses and times.
    """

    KIND: ClassVar[str] = "lock"
    target: str
    environment: Environment
    fingerprints: Mapping[str, str]
    graphs: tuple[GraphRecord, ...]
