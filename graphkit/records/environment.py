"""Where a record was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a record was made. Empty text stands for what does not exist there."""

    device: str
    torch: str
    triton: str
    cuda: str
    driver: str
    graphkit: str
