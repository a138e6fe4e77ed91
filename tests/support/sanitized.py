"""Marks the tests that ``make sanitize`` runs under compute-sanitizer."""

from __future__ import annotations

import pytest


def sanitized(*values):
    """Return values of a parameter with which a test also runs under compute-sanitizer.

    Choose few and small values for each kernel, since racecheck is slow.
    """
    return [pytest.param(value, marks=pytest.mark.sanitized) for value in values]
