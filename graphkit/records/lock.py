"""What a target's graphs consisted of when they were locked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphkit.records.environment import Environment
from graphkit.records.graph import GraphRecord
from graphkit.records.json_text import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord(Record):
    """A lock file.

    Attributes:
        target: Its name.
        environment: Where.
        fingerprints: Of each graph, by its name.
        graphs: What they consist of, without addresses and times.
    """

    KIND: ClassVar[str] = "lock"
    target: str
    environment: Environment
    fingerprints: Mapping[str, str]
    graphs: tuple[GraphRecord, ...]
