"""A scheduler that changes a frozen temperature.

graphkit audit tools.examples.broken.changed_temperature:target

Error: the scheduler sets an undeclared attribute for each batch, and the graph keeps the value
of its capture. Sample batches stand for the scheduler.
Effect: every request is sampled at the temperature of the capture. Eager runs are correct.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import graphkit as gk
from tools.examples.broken.python_temperature import Broken
from tools.examples.broken.sound import sample_batch, target_of


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    torch.manual_seed(0)
    model = Broken()

    def scheduled(mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
        model.set_temperature(1.0 if batch_size < 3 else 0.5)
        return sample_batch(mode, batch_size, seed)

    plain = target_of(model, "changed temperature", device)
    return replace(plain, host_values={}, sample_batch=scheduled)
