"""The tests that ``make sanitize`` runs under compute-sanitizer."""

from __future__ import annotations

import pytest


def sanitized(*values):
    """Return values of a parameter with which a test runs under compute-sanitizer, too.

    Each kernel needs few and small ones: racecheck takes up to 100 times as long as the test.
    """
    return [pytest.param(value, marks=pytest.mark.sanitized) for value in values]
