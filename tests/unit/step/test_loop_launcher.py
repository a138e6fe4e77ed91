"""A launch carries its whole batch to the device, also after a launch that failed."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from graphkit.config import BufferSizes
from graphkit.engine.step.loop_state import LaunchInputs, LaunchOutput, LoopLauncher
from graphkit.runners import StepRunner


class Launches:
    """A launcher, and the batches that its graph has read."""

    def __init__(self, most):
        sizes = BufferSizes(most, 8, 4, 9, torch.float32)
        self.most = most
        self.buffers = StepRunner(
            lambda inputs: LaunchOutput(req_pool_indices=inputs.req_pool_indices),
            inputs=LaunchInputs,
            output=LaunchOutput,
            sizes=sizes,
            device="cpu",
            batch_sizes=[most],
            check=False,
        ).buffers
        self.buffers.prepare(most)
        self.launcher = LoopLauncher(self.buffers)
        self.found = []

    def read(self):
        self.buffers.refresh(self.most)
        view = self.buffers.view(self.most)
        names = ("req_pool_indices", "is_watched", "max_steps", "launch")
        self.found.append(tuple(getattr(view, name).tolist() for name in names))

    def launch(self, rows, watched, max_steps, number, replay=None):
        graph = SimpleNamespace(replay=replay or self.read)
        self.launcher.launch(graph, rows, watched, max_steps, number)


@pytest.mark.parametrize("most", [1, 3, 200])
def test_a_batch_arrives_and_is_padded(most):
    launches, random = Launches(most), Random(most)
    for number in range(1, 12):
        rows = random.sample(range(1, 2**40), random.randint(1, most))
        watched = set(random.sample(rows, random.randint(0, len(rows))))
        launches.launch(rows, watched, 2**31 - number, number)
        pads = most - len(rows)
        assert launches.found[-1] == (
            rows + [0] * pads,
            [row in watched for row in rows] + [False] * pads,
            [2**31 - number],
            [number],
        )


@pytest.mark.parametrize("is_consumed", [False, True])
def test_a_launch_follows_one_that_failed(is_consumed):
    launches = Launches(2)

    def fail():
        if is_consumed:
            launches.read()
        raise KeyboardInterrupt

    for number in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            launches.launch([9], {9}, 1, 100 + number, fail)
        launches.launch([number], set(), 2, number)
        assert launches.found[-1] == ([number, 0], [False, False], [2], [number])


def test_no_memory_is_read_beside_the_rows():
    """Rows of larger batches that an entry held before are pads now."""
    launches = Launches(4)
    for number in range(9):
        launches.launch([5, 6, 7, 8], {5, 6, 7, 8}, 1, number)
    launches.launch([1], set(), 1, 10)
    assert launches.found[-1][:2] == ([1, 0, 0, 0], [False] * 4)
    assert torch.equal(launches.buffers.view(4).launch, torch.tensor([10]))
