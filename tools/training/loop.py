"""Optimisation loop and learning rate schedule."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

PEAK_RATE, WARM_UP, LOG_EVERY = 3e-3, 0.03, 50


def learning_rate(progress: float, peak: float = PEAK_RATE) -> float:
    """Return the rate at ``progress`` in 0 to 1: linear warm-up, then a cosine to a twentieth."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    fall = (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
    return peak * (0.05 + 0.95 * fall)


def optimise(
    parameters: list[nn.Parameter],
    next_loss: Callable[[], Tensor],
    steps: int,
    limit: float,
    peak: float = PEAK_RATE,
) -> int:
    """Minimise ``next_loss`` for ``steps`` steps or ``limit`` seconds; return the steps taken.

    The learning rate, at most ``peak``, follows the larger of both fractions, so that it also
    reaches its end if the time limit ends the run.
    """
    fused = parameters[0].is_cuda
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    (group,) = optimiser.param_groups
    begin, step, seconds = time.perf_counter(), 0, 0.0
    while step < steps and seconds < limit:
        group["lr"] = learning_rate(max((step + 1) / steps, seconds / limit), peak)
        loss = next_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        seconds = time.perf_counter() - begin
        if step % LOG_EVERY == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss.item():.4f} {seconds:.0f} s", file=sys.stderr)
    return step
