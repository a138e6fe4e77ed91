"""Comparison of the rows of one batch with the model, and the module that differs first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphkit.errors import GraphkitError, TargetError
from graphkit.graphs.capture_failure import describe_exception
from graphkit.models.wrapper.choices import Choices, joined_choices, taking_choices
from graphkit.models.wrapper.model_logits import (
    MOST_ROWS,
    ModelLogits,
    RowDifferences,
    decoding_differences,
    rows_at_once,
)
from graphkit.models.wrapper.module_rows import (
    ModuleDifference,
    first_module_difference,
    module_paths,
    outer_modules,
    recorded_rows,
)
from graphkit.models.wrapper.text_batches import RowSource, TextBatch, TreeRequest, run_batch
from graphkit.records import WrapperDifference, WrapperRecord
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import Rounding
from graphkit.runners.targets import CaptureTarget

_FLUCTUATION = 4
"""How many times as large as that of the model's own decoding the rounding of a wrapper may be."""

_AGREEMENT = 0.75
"""Least share of the keys that a wrapper and its model both select in a dtype of two bytes."""


class BatchComparison:
    """Compares batches, and keeps the result.

    Args:
        target: The wrapper.
        logits: Those of the model.
        rounding: Measures differences.
        windows: Windows of the model by name, for the advice.

    Attributes:
        record: The result so far.
    """

    def __init__(
        self,
        target: CaptureTarget,
        logits: ModelLogits,
        rounding: Rounding,
        windows: Mapping[str, int],
    ) -> None:
        self._target, self._logits, self._rounding = target, logits, rounding
        self._windows, self._ulps = windows, rounding.most
        self._rows_at_once = rows_at_once(target.sizes)
        self._wrapper_paths: dict[nn.Module, str] = {}
        # Scores of keys in float32 hardly tie: a selection that differs there is an error.
        self._least_agreement = _AGREEMENT if rounding.dtype.itemsize <= 2 else 1.0
        self.record = WrapperRecord()

    def measure_rounding(self, request: TreeRequest) -> None:
        """Take as rounding what the model's own logits of a prompt differ by in a longer text.

        Raises:
            TargetError: They differ by more than any rounding.
        """
        tokens = [*request.prompt, *request.tokens[request.paths()[0]]]
        length, rows = len(request.prompt), self._rows_at_once
        longer = self._logits.of(tokens)
        choices = joined_choices([(longer.choices, range(length), range(length))], length)
        with taking_choices(self._logits.paths, choices, length):
            prompt = self._logits.of(request.prompt)
        parts = []
        for start in range(max(length - MOST_ROWS, 0), length, rows):
            positions = range(start, min(start + rows, length))
            parts.append(RowDifferences.of(prompt.rows(positions), longer.rows(positions)))
        differences = RowDifferences.joined(parts)
        natural = differences.ulps(self._rounding)
        if natural > self._rounding.most:
            raise TargetError(
                f"target {self._target.name!r}: the logits of its model for a prompt change by "
                f"{float(differences.largest.max()):.3g} when tokens follow the prompt, so that "
                "no wrapper can equal them. Call eval() on the model, pass a causal model, or "
                "compare in float32."
            )
        self._ulps = self._rounding.beside(natural)

    def agrees(self, runner: Runner[Any, Any], batch: TextBatch) -> bool:
        """Run a batch and compare its rows; note the first row that differs."""
        differences, choices = self._differences(runner, batch)
        largest = max(self.record.largest_difference, float(differences.largest.max()))
        rows = self.record.rows + len(differences.largest)
        wrong = differences.first_beyond(self._ulps, self._rounding)
        if wrong is not None:
            self._measure_decoding(batch)
            wrong = differences.first_beyond(self._ulps, self._rounding)
        difference = None
        if wrong is not None:
            difference = self._difference(runner, batch, choices, wrong, differences)
        self.record = WrapperRecord(rows=rows, largest_difference=largest, difference=difference)
        return difference is None

    def _measure_decoding(self, batch: TextBatch) -> None:
        """Allow what the model's own decoding of a batch's sequences differs by, if more.

        A difference that no rounding reaches is an error of the model, and allows nothing.
        """
        for source in batch.sources:
            run = self._logits.of(source.tokens)
            differences = decoding_differences(self._logits, run, self._rows_at_once)
            natural = 0.0 if differences is None else differences.ulps(self._rounding)
            if natural <= self._rounding.most:
                allowed = min(_FLUCTUATION * natural, self._rounding.most)
                self._ulps = max(self._ulps, allowed)

    def _differences(
        self, runner: Runner[Any, Any], batch: TextBatch
    ) -> tuple[RowDifferences, Choices]:
        """Run a batch; return how its rows differ from the model's, and the model's choices."""
        num_rows, made, expected = batch.inputs.num_tokens, [], []
        for source in batch.sources:
            run = self._logits.of(source.tokens)
            expected.append(run.rows(source.positions))
            made.append((run.choices, source.rows, source.positions))
        choices = joined_choices(made, num_rows)
        got, parts = self.run(runner, batch, choices), []
        for source, rows in zip(batch.sources, expected, strict=True):
            is_all = source.rows == range(num_rows)
            parts.append(RowDifferences.of(rows, got if is_all else got[list(source.rows)]))
        order = [row for source in batch.sources for row in source.rows]
        return RowDifferences.joined(parts).rows(torch.tensor(order).argsort()), choices

    def _paths(self, runner: Runner[Any, Any], batch: TextBatch) -> dict[nn.Module, str]:
        """Return the path of each module of the wrapper, as the model names it."""
        if not self._wrapper_paths:
            declared = [self._target.weights, *self._target.forwards.values()]
            called = outer_modules(lambda: self.run(runner, batch, {}))
            self._wrapper_paths = module_paths([*declared, *called], self._logits.paths)
        return self._wrapper_paths

    def run(self, runner: Runner[Any, Any], batch: TextBatch, choices: Choices) -> torch.Tensor:
        """Return the wrapper's logits for a batch, [T, V]. Commit the states of a prompt."""
        paths = self._paths(runner, batch) if choices else {}
        try:
            with taking_choices(
                paths, choices, batch.inputs.num_tokens, batch.keys(), self._least_agreement
            ):
                output: Any = run_batch(
                    batch,
                    self._target.recurrent_state,
                    lambda inputs, without: runner.fall_back(inputs, without=without),
                )
        except GraphkitError:
            raise
        except Exception as error:
            raise TargetError(
                f"target {self._target.name!r}: its forward failed for {batch.name}, "
                f"{batch.inputs.num_tokens} rows: {describe_exception(error)}. An engine runs "
                f"prompts through the forward of {runner.mode.name}, too."
            ) from error
        logits: torch.Tensor = output.next_token_logits
        return logits

    def _difference(
        self,
        runner: Runner[Any, Any],
        batch: TextBatch,
        choices: Choices,
        row: int,
        differences: RowDifferences,
    ) -> WrapperDifference:
        """Return the difference of a row, with the first module that differs."""
        source = next(source for source in batch.sources if row in source.rows)
        position = source.positions[list(source.rows).index(row)]
        first, both_call = self._first_module(runner, batch, choices, row, source, position)
        no_module = "No module that both call differs." if both_call else ""
        largest = float(differences.largest[row])
        dtype = self._rounding.coarser_dtype(differences.scale)
        return WrapperDifference(
            mode=runner.mode.name,
            batch=batch.name,
            row=row,
            request=source.request,
            position=position,
            difference=largest,
            ulps=largest / differences.ulp(self._rounding),
            dtype=str(dtype).removeprefix("torch."),
            expected_token=int(differences.expected_token[row]),
            token=int(differences.token[row]),
            module="" if first is None else first.module,
            source="" if first is None else first.source,
            first=no_module if first is None else first.text,
            advice=self._advice(batch, position),
        )

    def _first_module(
        self,
        runner: Runner[Any, Any],
        batch: TextBatch,
        choices: Choices,
        row: int,
        source: RowSource,
        position: int,
    ) -> tuple[ModuleDifference | None, bool]:
        """Run both again; return the first module that differs, and whether both call any."""
        wrapper = self._paths(runner, batch)
        with recorded_rows(wrapper, row, batch.inputs.num_tokens) as got:
            self.run(runner, batch, choices)
        with recorded_rows(self._logits.paths, position, len(source.tokens)) as expected:
            self._logits.run(source.tokens)
        first = first_module_difference(expected, got, self._ulps, self._rounding.dtype)
        return first, bool(expected.keys() & got.keys())

    def _advice(self, batch: TextBatch, position: int) -> str:
        for name, size in self._windows.items():
            if position == size:
                return (
                    f"All rows up to position {position - 1} agree, and {name} of the model is "
                    f"{size}: check that the wrapper passes it to the attention of each layer that "
                    "has it."
                )
        return batch.advice
