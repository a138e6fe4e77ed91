"""Comparison of the rows of one batch with the model, and the module that differs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphkit.errors import GraphkitError, TargetError
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import Mismatch, WrapperDifference, WrapperRecord
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget
from graphkit.verify.differences import first_difference, largest_difference, largest_ulps
from graphkit.verify.rounding import Rounding
from graphkit.verify.wrapper.batches import CHUNK, RowSource, WrapperBatch
from graphkit.verify.wrapper.choices import Choices, joined_choices, taking_choices
from graphkit.verify.wrapper.model_logits import ModelLogits
from graphkit.verify.wrapper.module_rows import (
    ModuleDifference,
    first_module_difference,
    module_paths,
    outer_modules,
    recorded_rows,
)
from graphkit.verify.wrapper.requests import TreeRequest

_LOGITS = "next_token_logits"


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
        self._wrapper_paths: dict[nn.Module, str] = {}
        self.record = WrapperRecord()

    def measure_rounding(self, request: TreeRequest) -> None:
        """Take as rounding what the model's own logits of a prompt differ by in a longer text.

        Raises:
            TargetError: They differ by more than any rounding.
        """
        tokens = [*request.prompt, *request.tokens[request.paths()[0]]]
        length = len(request.prompt)
        rows = slice(max(length - CHUNK, 0), length)
        longer = {_LOGITS: self._logits.of(tokens)[rows].clone()}
        choices = joined_choices([(self._logits.choices, range(length), range(length))], length)
        with taking_choices(self._logits.paths, choices, length):
            prompt = {_LOGITS: self._logits.of(request.prompt)[rows]}
        natural = largest_ulps(prompt, longer, self._rounding)
        if natural > self._rounding.most:
            raise TargetError(
                f"target {self._target.name!r}: the logits of its model for a prompt change by "
                f"{largest_difference(prompt, longer):.3g} when tokens follow the prompt, so that "
                "no wrapper can equal them. Call eval() on the model, pass a causal model, or "
                "compare in float32."
            )
        self._ulps = self._rounding.beside(natural)

    def agrees(self, runner: Runner[Any, Any], batch: WrapperBatch) -> bool:
        """Run a batch and compare its rows; note the first row that differs."""
        logits, choices = self._model_rows(batch)
        got = {_LOGITS: self._run(runner, batch, choices)}
        expected = {_LOGITS: logits.to(got[_LOGITS].dtype)}
        largest = max(self.record.largest_difference, largest_difference(expected, got))
        rows = self.record.rows + len(got[_LOGITS])
        wrong = first_difference(expected, got, lambda row, _: row, self._rounding, self._ulps)
        difference = None
        if wrong is not None:
            tokens = [int(output[_LOGITS][wrong.row].argmax()) for output in (expected, got)]
            difference = self._difference(runner, batch, choices, wrong, tokens)
        self.record = WrapperRecord(rows=rows, largest_difference=largest, difference=difference)
        return difference is None

    def _model_rows(self, batch: WrapperBatch) -> tuple[torch.Tensor, Choices]:
        """Return the model's logits for the rows of a batch, [T, V], and its choices there."""
        num_rows = batch.inputs.num_tokens
        parts, logits = [], None
        for source in batch.sources:
            of_source = self._logits.of(source.tokens)
            if logits is None:
                logits = of_source.new_empty(num_rows, of_source.shape[1])
            logits[list(source.rows)] = of_source[source.positions]
            parts.append((self._logits.choices, source.rows, source.positions))
        assert logits is not None, "a batch has rows"
        return logits, joined_choices(parts, num_rows)

    def _paths(self, runner: Runner[Any, Any], batch: WrapperBatch) -> dict[nn.Module, str]:
        """Return the path of each module of the wrapper, as the model names it."""
        if not self._wrapper_paths:
            declared = [self._target.weights, *self._target.forwards.values()]
            called = outer_modules(lambda: self._run(runner, batch, {}))
            self._wrapper_paths = module_paths([*declared, *called], self._logits.paths)
        return self._wrapper_paths

    def _run(self, runner: Runner[Any, Any], batch: WrapperBatch, choices: Choices) -> torch.Tensor:
        """Return the wrapper's logits for a batch, [T, V]. Commit the states of a prompt."""
        paths = self._paths(runner, batch) if choices else {}
        states, row = self._target.recurrent_state, torch.as_tensor(batch.inputs.req_pool_indices)
        if states is not None and batch.prompt_start == 0:
            states.reset(row.to(states.device))
        try:
            with taking_choices(paths, choices, batch.inputs.num_tokens):
                output = runner.fall_back(batch.inputs, without=batch.without)
        except GraphkitError:
            raise
        except Exception as error:
            raise TargetError(
                f"target {self._target.name!r}: its forward failed for {batch.name}, "
                f"{batch.inputs.num_tokens} rows: {describe_exception(error)}. An engine runs "
                f"prompts through the forward of {runner.mode.name}, too."
            ) from error
        if states is not None and batch.prompt_start is not None:
            last = min(batch.inputs.num_tokens, states.width) - 1
            states.commit(row.to(states.device), torch.full_like(row, last).to(states.device))
        logits: torch.Tensor = output.next_token_logits
        return logits

    def _difference(
        self,
        runner: Runner[Any, Any],
        batch: WrapperBatch,
        choices: Choices,
        wrong: Mismatch,
        tokens: Sequence[int],
    ) -> WrapperDifference:
        """Return the difference of a row, with the first module that differs."""
        source = next(source for source in batch.sources if wrong.row in source.rows)
        position = source.positions[list(source.rows).index(wrong.row)]
        first, both_call = self._first_module(runner, batch, choices, wrong.row, source, position)
        no_module = "No module that both call differs." if both_call else ""
        assert wrong.ulps is not None, "logits are floating-point numbers"
        return WrapperDifference(
            mode=runner.mode.name,
            batch=batch.name,
            row=wrong.row,
            request=source.request,
            position=position,
            difference=abs(wrong.got - wrong.expected),
            ulps=wrong.ulps,
            dtype=wrong.dtype,
            expected_token=tokens[0],
            token=tokens[1],
            module="" if first is None else first.module,
            source="" if first is None else first.source,
            first=no_module if first is None else first.text,
            advice=self._advice(batch, position),
        )

    def _first_module(
        self,
        runner: Runner[Any, Any],
        batch: WrapperBatch,
        choices: Choices,
        row: int,
        source: RowSource,
        position: int,
    ) -> tuple[ModuleDifference | None, bool]:
        """Run both again; return the first module that differs, and whether both call any."""
        wrapper = self._paths(runner, batch)
        with recorded_rows(wrapper, row, batch.inputs.num_tokens) as got:
            self._run(runner, batch, choices)
        with recorded_rows(self._logits.paths, position, len(source.tokens)) as expected:
            self._logits.run(source.tokens)
        first = first_module_difference(expected, got, self._ulps, self._rounding.dtype)
        return first, bool(expected.keys() & got.keys())

    def _advice(self, batch: WrapperBatch, position: int) -> str:
        for name, size in self._windows.items():
            if position == size:
                return (
                    f"All rows up to position {position - 1} agree, and {name} of the model is "
                    f"{size}: check that the wrapper passes it to the attention of each layer that "
                    "has it."
                )
        return batch.advice
