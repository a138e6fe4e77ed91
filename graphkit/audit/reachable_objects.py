"""The forwards of a target, as roots of a walk over the objects that they can reach."""

from __future__ import annotations

from typing import Any

from graphkit.runners.reachable_objects import ReachableObjects, roots_of
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget

__all__ = ["ReachableObjects", "forward_roots"]


def forward_roots(target: CaptureTarget, mode: ForwardMode) -> dict[str, Any]:
    """Return the forward of a mode by name; see ``ReachableObjects``."""
    return roots_of(target.forwards[mode])
