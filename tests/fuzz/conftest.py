"""Limits for fuzzing: the same examples in every run, and an end in sight."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings


@pytest.fixture(scope="session")
def many():
    """``many(examples)``: settings for so many examples, drawn alike in every run."""
    return lambda examples, **more: settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
