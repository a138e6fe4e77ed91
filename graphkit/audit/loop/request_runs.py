"""The same requests run step by step without a graph, and in launches, with the state of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.ops.loop_layout import LoopEnd
from graphkit.step import DeviceStep, SamplingParams, SpecStepInputs, SpecStepRunner

Requests = Mapping[int, tuple[Sequence[int], SamplingParams]]
"""Prompt and sampling parameters by request row."""
Lines = list[list[int]]
"""Report of one step: a row per request that took part, see ``Report``."""


@dataclass(frozen=True, slots=True)
class Run:
    """What some steps did.

    Attributes:
        reports: Of each step.
        state: State of the requests after the last step, by name.
    """

    reports: list[Lines]
    state: dict[str, torch.Tensor]


class RequestRuns:
    """Runs the same requests in several ways. Each run begins with their prompts.

    Args:
        runner: Captured; the rows are free and have their KV slots.
        requests: The requests.
    """

    def __init__(self, runner: SpecStepRunner, requests: Requests) -> None:
        self._runner, self._requests = runner, requests

    def eager(self, steps: int) -> list[Run]:
        """Run steps without a graph, padded as in a loop; return the run up to each of them.

        Entry n has n steps; the list ends when all requests have ended.
        """
        self._admit()
        runs, reports = [Run([], self._state())], list[Lines]()
        while len(reports) < steps and (rows := self._live()):
            report = self._runner.run_padded(SpecStepInputs(req_pool_indices=torch.tensor(rows)))
            assert report.report is not None, "the batch is not empty"
            reports.append(report.report.tolist())
            runs.append(Run(list(reports), self._state()))
        return runs

    def launched(self, steps: int, steps_per_launch: int) -> Run:
        """Run steps in launches."""
        self._admit()
        reports: list[Lines] = []
        while len(reports) < steps and (rows := self._live()):
            left = min(steps - len(reports), steps_per_launch)
            stream = self._runner.launch(rows, max_steps=left)
            reports += (step.lines for step in stream)
            if stream.end is LoopEnd.IDLE:
                break
        return Run(reports, self._state())

    def release(self) -> None:
        """Release the rows."""
        self._runner.release(list(self._requests))

    def _admit(self) -> None:
        for row, (prompt, sampling) in self._requests.items():
            self._runner.admit(row, prompt, sampling)

    def _live(self) -> list[int]:
        """Return the rows of the requests that continue, in the order of the requests."""
        self._runner.backend.wait_for_replays()
        left = self._runner.state.remaining.tolist()
        return [row for row in self._requests if left[row]]

    def _state(self) -> dict[str, torch.Tensor]:
        """Return copies of what the next step reads of the requests, by name and row.

        Slots behind the committed tokens are left out: what rejected drafts left there is written
        again before it is read.
        """
        step = self._runner.device_step
        self._runner.backend.wait_for_replays()
        by_row = self._runner.state.tensors()
        stashed = step.context.future_map.tensors()
        by_row |= {f"future map {name}": each for name, each in stashed.items()}
        recurrent = step.verifier.recurrent_state
        if recurrent is not None:  # the first slot of each row is the committed state
            committed = {k: each[:: recurrent.width + 1] for k, each in recurrent.tensors().items()}
            by_row |= {f"recurrent {name}": each for name, each in committed.items()}
        state: dict[str, torch.Tensor] = {}
        lengths = self._runner.state.seq_lens.tolist()
        for row in self._requests:
            slots = step.context.req_to_token[row, : lengths[row]].long()
            at_row = {name: each[row : row + 1].clone() for name, each in by_row.items()}
            at_row |= {name: each[slots] for name, each in _kv_buffers(step).items()}
            state |= {f"{name} of row {row}": each for name, each in at_row.items()}
        return state


def _kv_buffers(step: DeviceStep) -> dict[str, torch.Tensor]:
    """Return the KV buffers of target and drafter by name; runners may share a pool."""
    pools: dict[int, tuple[str, Any]] = {}
    for runner in step.runners:
        pool = getattr(runner.attention, "kv_pool", None)
        if pool is not None:
            pools.setdefault(id(pool), (runner.mode.name, pool))
    return {
        f"KV {mode} {name}": each
        for mode, pool in pools.values()
        for name, each in pool.tensors().items()
    }
