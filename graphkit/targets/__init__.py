"""Targets: what commands, audits and tests capture."""

from graphkit.targets.locate import locate
from graphkit.targets.target import CaptureTarget, selected_modes

__all__ = ["CaptureTarget", "locate", "selected_modes"]
