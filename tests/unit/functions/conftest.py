"""Captures of functions, closed after each test."""

import pytest

import graphkit as gk


@pytest.fixture
def capture():
    """Captures functions, and closes them."""
    captured = []

    def make(fn, example, batch_sizes=(1, 4), **options):
        captured.append(gk.capture(fn, example, batch_sizes=batch_sizes, **options))
        return captured[-1]

    yield make
    for each in captured:
        each.close()
