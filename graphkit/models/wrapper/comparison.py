"""Comparison of the logits of a target's forwards with the model that they wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.errors import GraphkitError, TargetError, short_repr
from graphkit.graphs import StateSnapshot
from graphkit.graphs.capture_failure import describe_exception
from graphkit.graphs.compiles import compile_ahead
from graphkit.models.wrapper.model_logits import (
    MOST_ROWS,
    ModelLogits,
    RowDifferences,
    decoding_differences,
    rows_at_once,
)
from graphkit.models.wrapper.module_rows import (
    Choices,
    ModuleDifference,
    first_module_difference,
    joined_choices,
    module_paths,
    outer_modules,
    recorded_rows,
    taking_choices,
)
from graphkit.models.wrapper.text_batches import (
    SERVED_FIELDS,
    RowSource,
    TextBatch,
    TextBatches,
    TreeRequest,
    run_batch,
    tree_requests,
    window_settings,
)
from graphkit.records import WrapperDifference, WrapperRecord
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import Rounding
from graphkit.runners.comparison.step_comparison import restorable_state
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

_FLUCTUATION = 4
"""How many times as large as that of the model's own decoding the rounding of a wrapper may be."""

_AGREEMENT = 0.75
"""Least share of the keys that a wrapper and its model both select in a dtype of two bytes."""


class BatchComparison:
    """Compares batches, and keeps the result.

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


WRAPPED_MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
"""Modes that compute the logits of the model."""
_ORDER_OF_SUMS = {torch.float32: 4}
"""Factor on the tolerance by dtype, otherwise 1. Attention over pages adds in another order than
the model: in float32, correct small models differ by up to 14 ulp."""
_ORDER_OF_RECURRENCE = {torch.float32: 64}
"""The same with recurrent layers, otherwise 4. A model computes the states of a prompt in chunks, a
verify step node by node. Where more is needed, the model's own decoding is measured."""


def compare_wrapper(
    target: CaptureTarget,
    model: Callable[[torch.Tensor], Any],
    *,
    prompt_length: int | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
) -> WrapperRecord:
    """Compare the forwards of TARGET_VERIFY and DECODE with the model that they wrap.

    See ``check_wrapper``. The comparison ends with the first batch that differs. Modules that
    choose, such as a router of experts, take the choices of the model. Restores declared state and
    random numbers. ``skipped`` of the result says why a target cannot be compared.
    """
    modes = [mode for mode in WRAPPED_MODES if mode in target.forwards]
    skipped = skip_reason(target, modes)
    if skipped:
        return WrapperRecord(skipped=skipped)
    with ExitStack() as stack:
        runners = [stack.enter_context(target.runner(mode, device=device)) for mode in modes]
        unserved = unserved_field(runners)
        if unserved:
            return WrapperRecord(skipped=unserved)
        windows = window_settings(model, target.weights, *target.forwards.values())
        requests = tree_requests(target, runners[0], windows, prompt_length)
        logits = ModelLogits(model, runners[0].device, target.sizes.vocab_size)
        dtype = target.sizes.dtype
        if target.recurrent_state is None:
            factor = _ORDER_OF_SUMS.get(dtype, 1)
        else:
            factor = _ORDER_OF_RECURRENCE.get(dtype, 4)
        rounding = Rounding(dtype, tolerance * factor)
        comparison = BatchComparison(target, logits, rounding, windows)
        comparison.measure_rounding(requests[0])
        length = len(requests[0].prompt)
        state = {name: tensor for r in runners for name, tensor in restorable_state(r).items()}
        stack.enter_context(StateSnapshot(state, runners[0].device))
        batches = partial(_batches, runners, requests, rows_at_once(target.sizes))
        compile_ahead(
            runners[0].backend,
            [lambda: [comparison.run(runner, batch, {}) for runner, batch in batches()]],
        )
        for runner, batch in batches():
            if not comparison.agrees(runner, batch):
                break
    return replace(
        comparison.record,
        prompt_length=length,
        not_reached=tuple(f"{name} {size}" for name, size in windows.items() if size >= length),
    )


def _batches(
    runners: Sequence[Runner[Any, Any]], requests: Sequence[TreeRequest], rows: int
) -> Iterator[tuple[Runner[Any, Any], TextBatch]]:
    """Yield all batches of the first runner, then a step of every other runner."""
    first, *others = runners
    for batch in TextBatches(first, requests, rows).all():
        yield first, batch
    for runner in others:
        yield runner, TextBatches(runner, requests, rows).step(range(len(requests)))


def skip_reason(target: CaptureTarget, modes: Sequence[ForwardMode]) -> str:
    """Return why the target cannot be compared, as a phrase; empty if it can."""
    if not modes:
        return "the target has no forward for TARGET_VERIFY or DECODE"
    if target.group is not None:
        return "the target runs on several ranks"
    if target.spec.linear_attention and target.recurrent_state is None:
        return "the target has recurrent layers, but declares no recurrent_state"
    return ""


def unserved_field(runners: Sequence[Runner[Any, Any]]) -> str:
    """Return which field of the inputs has no values here, as a phrase; empty if none."""
    for runner in runners:
        for layout in runner.buffers.layouts:
            if layout.name not in SERVED_FIELDS:
                return f"there are no values for the field {layout.name!r} of {runner.mode.name}"
    return ""


def check_wrapper(
    target: CaptureTarget,
    model: Callable[[torch.Tensor], Any] | None = None,
    *,
    prompt_length: int | None = None,
    device: str = "auto",
    tolerance: float = 1.0,
) -> WrapperRecord:
    """Fail unless the forwards of a target compute the logits of the model that they wrap.

    Runs TARGET_VERIFY, and DECODE if the target has it, without graphs: the rows of a prompt, a
    tree of drafts behind it (a chain without ``custom_mask``), and a second request of another
    length beside the first. Every row must have the logits that the model computes on the prompt
    and the path to that row. They may differ by rounding: by 4 times what the model's own logits
    differ by when tokens follow the prompt, at least 8 ulp and at most 256 of float32, or 16 of
    bfloat16. In float32 four times that is allowed, and 64 times with recurrent layers. Where a
    model needs more, 4 times what its logits differ by from those of its own decoding, token by
    token over its cache, are allowed, too. Compare in float32 where you can: a small mistake may
    hide in the rounding of bfloat16.

    The target's KV pools, random numbers and other declared state are restored.

    Args:
        target: The wrapper. It needs a forward for TARGET_VERIFY or DECODE, and the KV slots of
            its sample batches' rows: an ``attention`` with a ``req_to_token_pool``, or
            ``kv_slots``.
        model: A causal language model of transformers, or any function from token ids, int64
            [1, N] on the device, to logits [1, N, V] or an object with ``logits``. It must not run
            through the wrapper. ``None`` selects ``target.model``. If it is a module whose
            submodules have the names of those of ``target.weights``, or are the same, a failure
            names the first module that differs.
        prompt_length: Tokens of the longer prompt; ``None`` selects 64, or 8 more than the largest
            ``sliding_window`` or ``attention_chunk_size`` of the model's config that the context of
            the target exceeds.
        device: ``auto``, ``cpu`` or ``cuda``; that of the model.
        tolerance: Multiple of the rounding that is allowed.

    Returns:
        What was compared. ``not_reached`` names the windows that no prompt exceeds.

    Raises:
        AssertionError: A row differs. The text has the row, its request and position, the largest
            difference, the first module that differs, and what to look at.
        ConfigError: ``prompt_length`` does not fit the context, or the tolerance is invalid.
        TargetError: There is no model, the target cannot be compared, or the model returns no
            logits of every token, or such that depend on later tokens.
    """
    compared_with = target.model if model is None else model
    if not callable(compared_with):
        raise TargetError(
            f"target {target.name!r} has nothing to be compared with: model is "
            f"{short_repr(compared_with)}. "
            "Pass a function from token ids [1, N] to logits [1, N, V], or a model of transformers."
        )
    record = compare_wrapper(
        target, compared_with, prompt_length=prompt_length, device=device, tolerance=tolerance
    )
    if record.skipped:
        raise TargetError(
            f"target {target.name!r} cannot be compared with its model: {record.skipped}."
        )
    difference = record.difference
    if difference is not None:
        line = f"\n  called at {difference.source}" if difference.source else ""
        raise AssertionError(f"{difference.mode}: {difference.text}{line}\n  {difference.advice}")
    return record
