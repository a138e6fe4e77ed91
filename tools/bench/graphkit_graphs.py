"""Steps captured by graphkit itself, for ``decode_graphs.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import graphkit as gk


@dataclass(kw_only=True, eq=False)
class RowInputs(gk.StepInputs):
    """A field that makes the step refresh its inputs; the step does not need it."""

    rows: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "numbers of the rows")


@dataclass(kw_only=True, eq=False)
class RowOutput(gk.Output):
    """The numbers of the rows [B]."""

    rows: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, torch.int64)


class RunnerGraph:
    """A graph that a ``StepRunner`` warms up, captures and replays on a batch of one request.

    Args:
        step: What to capture.
        backend: Backend of the runner.
    """

    def __init__(self, step: Callable[[], object], backend: gk.graphs.Backend) -> None:
        def forward(inputs: RowInputs) -> RowOutput:
            step()
            return RowOutput(rows=inputs.rows.clone())

        self._runner = gk.StepRunner(
            forward,
            inputs=RowInputs,
            output=RowOutput,
            sizes=gk.BufferSizes(1, 1, 1, 1, torch.bfloat16),
            backend=backend,
            batch_sizes=[1],
        )
        self._runner.capture()
        self.num_nodes = self._runner.graphs[1].num_nodes
        self._batch = RowInputs(rows=np.arange(1))

    def launch(self) -> None:
        """Replay on the current stream."""
        self._runner.replay(self._batch)


class WarmUpsOnCaptureStream(gk.CudaBackend):
    """Warms up on the capture stream instead of the stream of eager steps."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function on the capture stream and wait for it."""

        def on_capture_stream() -> None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                function()
            self.stream.synchronize()

        super().warm_up(on_capture_stream)
