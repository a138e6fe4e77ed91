"""The forwards of a target, as roots of a walk over the objects that they can reach."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from graphkit.runners import Runner
from graphkit.runners.reachable_objects import Container, ReachableObjects, roots_of
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget

__all__ = ["Container", "ReachableObjects", "forward_roots", "runner_roots"]


def forward_roots(target: CaptureTarget, mode: ForwardMode) -> dict[str, Any]:
    """Return the forward of a mode by name; see ``ReachableObjects``."""
    return roots_of(target.forwards[mode])


def runner_roots(runner: Runner[Any, Any]) -> dict[str, Any]:
    """Return the forward of a runner by name; see ``ReachableObjects``."""
    forward = runner.step.forward
    return roots_of(tuple(map(unwrap, forward)) if isinstance(forward, tuple) else unwrap(forward))
