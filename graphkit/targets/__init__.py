"""Models that the command line can be pointed at, and the check that their replays are right."""

from graphkit.targets.check import capture_target
from graphkit.targets.locate import locate
from graphkit.targets.target import RUNNERS, CaptureTarget

__all__ = ["RUNNERS", "CaptureTarget", "capture_target", "locate"]
