"""What a call runs on a GPU."""

from __future__ import annotations

import torch


def launches(call):
    """Return the names of the kernels, copies and fills of the second of two calls."""
    call()
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]
