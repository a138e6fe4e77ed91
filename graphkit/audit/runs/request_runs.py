"""The same requests run step by step, and in launches of loops, with the state of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import nan
from typing import Any

import torch

from graphkit.buffers.attention import kv_pools
from graphkit.engine.step import (
    SamplingParams,
    SpecStep,
    SpecStepInputs,
    SpecStepOutput,
    SpecStepRunner,
)
from graphkit.ops.loop_layout import LoopEnd
from graphkit.records import Mismatch
from graphkit.runners.comparison.differences import Rounding, Tensors, even_owner, first_difference

RequestPrompts = Mapping[int, tuple[Sequence[int], SamplingParams]]
"""Prompt and sampling parameters by request row."""
ReportRows = list[list[int]]
"""Report of one step: a row per request that took part, see ``Report``."""


def step_batch(rows: Sequence[int]) -> SpecStepInputs:
    """Return the inputs of a step for the requests of some rows."""
    return SpecStepInputs(req_pool_indices=torch.tensor(rows))


@dataclass(frozen=True, slots=True)
class RequestRun:
    """What some steps did.

    Attributes:
        reports: Report of each step.
        state: State of each request after the last step, by row and name.
    """

    reports: list[ReportRows]
    state: Mapping[int, Tensors]

    def differences(self, got: RequestRun, rounding: Rounding) -> dict[str, Mismatch]:
        """Return the first difference of everything that differs in another run, by name."""
        mismatches: dict[str, Mismatch] = {}
        for request, (row, state) in enumerate(self.state.items()):
            for name, one in state.items():
                other, title = got.state[row][name], f"{name} of row {row}"
                if one.shape != other.shape:  # such as the KV of more tokens
                    one, other = torch.tensor([[len(one)]]), torch.tensor([[len(other)]])
                mismatch = first_difference(
                    {title: one}, {title: other}, even_owner(1), rounding, rounding.beside(0.0)
                )
                if mismatch is not None:
                    mismatches[title] = replace(mismatch, request=request)
        if self.reports != got.reports:
            mismatches["reports"] = _first_report(self.reports, got.reports)
        return mismatches


class RequestRuns:
    """Runs the same requests in several ways. Each run begins with their prompts."""

    def __init__(self, runner: SpecStepRunner, requests: RequestPrompts) -> None:
        self.runner, self.requests = runner, requests

    def admit(self) -> None:
        """Prefill the prompts. Every run does so first."""
        for row, (prompt, sampling) in self.requests.items():
            self.runner.admit(row, prompt, sampling)

    def eager(self, steps: int) -> list[RequestRun]:
        """Run steps without a graph, padded as in a loop; return the run up to each of them.

        Entry n has n steps; the list ends when all requests have ended.
        """
        self.admit()
        runs = [RequestRun([], self._state())]
        while len(runs) <= steps and (rows := self._live()):
            report = _report_rows(self.runner.run_padded(step_batch(rows)))
            runs.append(RequestRun([*runs[-1].reports, report], self._state()))
        return runs

    def replayed(self, steps: int) -> RequestRun:
        """Run steps one by one, each as one replay."""
        self.admit()
        reports: list[ReportRows] = []
        while len(reports) < steps and (rows := self._live()):
            reports.append(_report_rows(self.runner.replay(step_batch(rows))))
        return RequestRun(reports, self._state())

    def launched(self, steps: int, steps_per_launch: int) -> RequestRun:
        """Run steps in launches."""
        self.admit()
        reports: list[ReportRows] = []
        while len(reports) < steps and (rows := self._live()):
            left = min(steps - len(reports), steps_per_launch)
            stream = self.runner.launch(rows, max_steps=left)
            reports += (step.rows for step in stream)
            if stream.end is LoopEnd.IDLE:
                break
        return RequestRun(reports, self._state())

    def release(self) -> None:
        """Release the rows."""
        self.runner.release(list(self.requests))

    def _live(self) -> list[int]:
        """Return the rows of the requests that continue, in the order of the requests."""
        self.runner.backend.wait_for_replays()
        left = self.runner.state.remaining.tolist()
        return [row for row in self.requests if left[row]]

    def _state(self) -> Mapping[int, Tensors]:
        """Return copies of what the next step reads of the requests, by row and name."""
        self.runner.backend.wait_for_replays()
        step, lengths = self.runner.spec_step, self.runner.state.seq_lens.tolist()
        return {row: request_state(step, [row], lengths[row]) for row in self.requests}


def request_state(step: SpecStep, rows: Sequence[int], positions: int) -> dict[str, torch.Tensor]:
    """Return copies of what the next step reads of some requests, by name.

    ``SpecStep.request_tensors``, and the KV of committed tokens. Behind them the KV is zero: what
    rejected drafts left there is written again before it is read.

    Args:
        step: The step; its work is done.
        rows: Rows of the requests (B).
        positions: Number of positions whose KV is returned (P).

    Shapes:
        KV: [B * P, ...]. All others: [B, ...].
    """
    index = torch.tensor(rows, device=step.context.device)
    state = {name: tensor[index] for name, tensor in step.request_tensors().items()}
    slots = step.context.req_to_token[index, :positions].long().flatten()
    column = torch.arange(positions, device=step.context.device)
    is_rejected = (column >= step.state.seq_lens[index, None]).flatten()
    for name, buffer in _kv_buffers(step).items():
        state[name] = buffer[slots]
        state[name][is_rejected] = 0
    return state


def _kv_buffers(step: SpecStep) -> dict[str, torch.Tensor]:
    """Return the KV buffers of target and drafter by name; runners may share a pool."""
    pools: dict[int, tuple[str, Any]] = {}
    for runner in step.runners:
        for pool in kv_pools(runner.attention):
            pools.setdefault(id(pool), (runner.label, pool))
    return {
        f"KV {label} {name}": buffer
        for label, pool in pools.values()
        for name, buffer in pool.tensors().items()
    }


def _report_rows(output: SpecStepOutput) -> ReportRows:
    assert output.report is not None, "the batch is not empty"
    rows: ReportRows = output.report.tolist()
    return rows


def _first_report(expected: Sequence[ReportRows], got: Sequence[ReportRows]) -> Mismatch:
    """Return the first number of two lists of reports that differs; NaN where one has none."""
    no_rows: ReportRows = []
    no_numbers: list[int] = []
    for step, reports in enumerate(zip_longest(expected, got, fillvalue=no_rows), 1):
        for row, numbers in enumerate(zip_longest(*reports, fillvalue=no_numbers)):
            for one, other in zip_longest(*numbers, fillvalue=nan):
                if one != other:
                    field = f"report of step {step}"
                    return Mismatch(field=field, row=row, request=row, expected=one, got=other)
    raise AssertionError("the reports differ")
