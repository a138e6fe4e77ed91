"""Targets: what commands, audits and tests capture."""

from graphkit.targets.locate import locate
from graphkit.targets.mode_selection import selected_modes
from graphkit.targets.target import CaptureTarget

__all__ = ["CaptureTarget", "locate", "selected_modes"]
