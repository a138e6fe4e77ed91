"""The captured whole step alone: its time on the device, and its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphkit.cli.benchmarks.clocks import device_ms, synchronise
from graphkit.engine.step import SpecStepInputs, SpecStepRunner
from graphkit.graphs import Attribution
from graphkit.graphs.streams import restore_fast_replays


class BareStep:
    """The greedy step of running requests, captured on its own and replayed without an engine.

    It is the step that the loops of an engine run for requests with temperature 0; ``replay`` of
    the engine's own runner can also sample. The step shares the state of that runner, and advances
    its requests. The caller closes it before the engine.

    Args:
        runner: A captured runner.
        rows: Rows of running requests with temperature 0, as many as a captured size.
    """

    def __init__(self, runner: SpecStepRunner, rows: Sequence[int]) -> None:
        step = runner.spec_step
        self._runner = SpecStepRunner.from_step(step, replace(step.context.options, is_greedy=True))
        self._runner.capture(attribution=Attribution())
        restore_fast_replays(runner.device)  # at the speed of the engines
        self._batch = SpecStepInputs(req_pool_indices=np.array(rows))

    def ms(self, steps: int) -> float:
        """Return the device's milliseconds per replay, back to back."""
        synchronise(self._runner.device)
        with device_ms(self._runner.device) as ms:
            for _ in range(steps):
                self._runner.replay(self._batch)
        return ms[0] / steps

    def nodes(self) -> dict[str, int]:
        """Return the number of nodes: all, and graphkit's own.

        Own nodes are outside of the models' modules. They are also counted by phase.
        """
        graph = self._runner.graphs[len(self._batch.req_pool_indices)]
        own = [o for o in graph.origins if not o.module or o.module.startswith("(")]
        phases = [origin.scope.partition("/")[0] or "rest" for origin in own]
        by_phase = {f"own nodes, {name}": phases.count(name) for name in dict.fromkeys(phases)}
        return {"nodes": graph.num_nodes, "own nodes": len(own), **by_phase}

    def close(self) -> None:
        """Close the graphs."""
        self._runner.close()
