"""Targets: what commands, audits and tests capture."""

from graphkit.runners.targets.target import CaptureTarget, selected_modes

__all__ = ["CaptureTarget", "selected_modes"]
