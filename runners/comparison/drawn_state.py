"""What every check of a runner starts from: a seed for its batches, and the state to restore."""

from __future__ import annotations

from typing import Any

from graphkit.graphs.snapshot import restore_problem
from graphkit.runners.runner import Runner

SEED = 40
"""Seed of the batches and requests that checks and audits draw. Any number serves."""


def restorable_state(runner: Runner[Any, Any]) -> dict[str, Any]:
    """Return the declared state and the attention backend's tensors that a snapshot can restore."""
    state = runner.memory_names()["state"]
    return {name: tensor for name, tensor in state.items() if not restore_problem(tensor)}
