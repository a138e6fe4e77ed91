"""Device and versions with which a record was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Device and versions with which a record was made; empty where one is missing."""

    device: str
    torch: str
    triton: str
    cuda: str
    driver: str
    graphkit: str
