"""``tools/bench/layer_timeline.py`` on the CPU: what it computes from recorded kernels."""

from __future__ import annotations

import pytest
import torch


def replays(bench, times, *, count=2, layers=3, wait=10.0):
    """Return kernels whose first replay, and first layers, take ten times as long."""
    kernels, end = [], 0.0
    for replay in range(count):
        end += wait
        kernels.append(bench.Kernel("norm_kernel", end))
        for layer in range(layers):
            for name, us in times:
                end += us * (1 if replay and layer else 10)
                kernels.append(bench.Kernel(name, end))
    return kernels


TIMES = [("linear_kernel", 4.0), ("norm_kernel", 1.5), ("linear_kernel", 6.0)]


def test_the_times_between_ends_add_up_to_a_layer(bench):
    found = bench.ends_of_a_layer(replays(bench, TIMES), 2, 3)
    assert [(name, pytest.approx(us)) for name, us in TIMES] == [tuple(each) for each in found]


def test_kernels_that_do_not_repeat_are_refused(bench):
    kernels = replays(bench, TIMES)
    with pytest.raises(ValueError, match="19 kernels are not those of 2 x 3 layers"):
        bench.ends_of_a_layer(kernels[:-1], 2, 3)
    kernels[-1] = kernels[-1]._replace(name="other_kernel")
    with pytest.raises(ValueError, match=r"Kernel 2 of a layer is one of \['linear_kernel', 'oth"):
        bench.ends_of_a_layer(kernels, 2, 3)


def test_kernels_are_recorded_on_a_gpu_alone(bench):
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench.report(1, torch.device("cpu"))
