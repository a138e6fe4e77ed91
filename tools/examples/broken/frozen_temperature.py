"""An undeclared temperature, as an attribute of the model.

graphkit audit tools.examples.broken.frozen_temperature:target

Error: the target does not declare the number, which capture stores as an argument of the division.
Effect: if a scheduler changes it, replays use the value of the capture. Eager runs are correct.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import graphkit as gk
from tools.examples.broken.python_temperature import Broken
from tools.examples.broken.sound import target_of


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    return replace(target_of(Broken(), "frozen temperature", device), host_values={})
