"""The same requests run step by step, and in launches of loops, with the state of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import nan

import torch

from graphkit.ops.loop_layout import LoopEnd
from graphkit.records import Mismatch
from graphkit.step import SamplingParams, SpecStepInputs, SpecStepOutput, SpecStepRunner
from graphkit.verify.differences import Tensors, even_owner, first_difference
from graphkit.verify.request_state import request_state
from graphkit.verify.rounding import Rounding

Requests = Mapping[int, tuple[Sequence[int], SamplingParams]]
"""Prompt and sampling parameters by request row."""
Lines = list[list[int]]
"""Report of one step: a row per request that took part, see ``Report``."""


@dataclass(frozen=True, slots=True)
class Run:
    """What some steps did.

    Attributes:
        reports: Of each step.
        state: State of each request after the last step, by row and name.
    """

    reports: list[Lines]
    state: Mapping[int, Tensors]

    def differences(self, got: Run, rounding: Rounding) -> dict[str, Mismatch]:
        """Return the first difference of everything that differs in another run, by name.

        Args:
            got: The other run, of as many steps.
            rounding: Numbers may differ like those of two runs of one step.
        """
        found: dict[str, Mismatch] = {}
        for request, (row, state) in enumerate(self.state.items()):
            for name, one in state.items():
                other, title = got.state[row][name], f"{name} of row {row}"
                if one.shape != other.shape:  # such as the KV of more tokens
                    one, other = torch.tensor([[len(one)]]), torch.tensor([[len(other)]])
                mismatch = first_difference(
                    {title: one}, {title: other}, even_owner(1), rounding, rounding.beside(0.0)
                )
                if mismatch is not None:
                    found[title] = replace(mismatch, request=request)
        if self.reports != got.reports:
            found["reports"] = _first_report(self.reports, got.reports)
        return found


class RequestRuns:
    """Runs the same requests in several ways. Each run begins with their prompts.

    Args:
        runner: Captured; the rows are free and have their KV slots.
        requests: The requests.
    """

    def __init__(self, runner: SpecStepRunner, requests: Requests) -> None:
        self._runner, self._requests = runner, requests

    def admit(self) -> None:
        """Prefill the prompts. Every run does so first."""
        for row, (prompt, sampling) in self._requests.items():
            self._runner.admit(row, prompt, sampling)

    def eager(self, steps: int) -> list[Run]:
        """Run steps without a graph, padded as in a loop; return the run up to each of them.

        Entry n has n steps; the list ends when all requests have ended.
        """
        self.admit()
        runs = [Run([], self._state())]
        while len(runs) <= steps and (rows := self._live()):
            lines = _lines(self._runner.run_padded(_batch(rows)))
            runs.append(Run([*runs[-1].reports, lines], self._state()))
        return runs

    def replayed(self, steps: int) -> Run:
        """Run steps one by one, each as one replay."""
        self.admit()
        reports: list[Lines] = []
        while len(reports) < steps and (rows := self._live()):
            reports.append(_lines(self._runner.replay(_batch(rows))))
        return Run(reports, self._state())

    def launched(self, steps: int, steps_per_launch: int) -> Run:
        """Run steps in launches."""
        self.admit()
        reports: list[Lines] = []
        while len(reports) < steps and (rows := self._live()):
            left = min(steps - len(reports), steps_per_launch)
            stream = self._runner.launch(rows, max_steps=left)
            reports += (step.rows for step in stream)
            if stream.end is LoopEnd.IDLE:
                break
        return Run(reports, self._state())

    def release(self) -> None:
        """Release the rows."""
        self._runner.release(list(self._requests))

    def _live(self) -> list[int]:
        """Return the rows of the requests that continue, in the order of the requests."""
        self._runner.backend.wait_for_replays()
        left = self._runner.state.remaining.tolist()
        return [row for row in self._requests if left[row]]

    def _state(self) -> Mapping[int, Tensors]:
        """Return copies of what the next step reads of the requests, by row and name."""
        self._runner.backend.wait_for_replays()
        step, lengths = self._runner.device_step, self._runner.state.seq_lens.tolist()
        return {row: request_state(step, [row], lengths[row]) for row in self._requests}


def _batch(rows: Sequence[int]) -> SpecStepInputs:
    return SpecStepInputs(req_pool_indices=torch.tensor(rows))


def _lines(output: SpecStepOutput) -> Lines:
    assert output.report is not None, "the batch is not empty"
    lines: Lines = output.report.tolist()
    return lines


def _first_report(expected: Sequence[Lines], got: Sequence[Lines]) -> Mismatch:
    """Return the first number of two lists of reports that differs; NaN where one has none."""
    none: Lines = []
    for step, (lines, others) in enumerate(zip_longest(expected, got, fillvalue=none), 1):
        for row in range(max(len(lines), len(others))):
            for one, other in zip_longest(_at(lines, row), _at(others, row), fillvalue=nan):
                if one != other:
                    field = f"report of step {step}"
                    return Mismatch(field=field, row=row, request=row, expected=one, got=other)
    raise AssertionError("the reports differ")


def _at(lines: Lines, row: int) -> list[int]:
    return lines[row] if row < len(lines) else []
