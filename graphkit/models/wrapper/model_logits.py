"""Logits of a model, by whole sequences and by its own decoding, and their differences per row.

Logits of all rows of a prompt may need more memory than the weights. So a comparison computes those
of few rows at a time, and keeps of each row what it needs to judge and to describe it.

A model adds in another order for a prompt than for a new token: recurrent layers compute the states
of a prompt in chunks, and libraries multiply few rows by other kernels. Where a layer divides by a
small number, the difference grows. So it is measured where it matters: on the same sequence,
without a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from graphkit.config import BufferSizes
from graphkit.errors import TargetError
from graphkit.graphs.capture_failure import describe_exception
from graphkit.models.running import replaced_forwards
from graphkit.models.wrapper.module_rows import (
    Choices,
    joined_choices,
    module_paths,
    outer_modules,
    recorded_choices,
    taking_choices,
)
from graphkit.runners.comparison.differences import Rounding
from graphkit.runners.mode_declaration import Numbers

MOST_ROWS = 512
"""Most rows whose logits are computed at once."""
_SHARE_OF_HEAD = 32
"""The logits that are computed at once have at most this part of the numbers of the head."""
_ALWAYS = 2**20
"""So many logits are computed at once whatever the size of the head."""
_LEAST_ROWS = 8
_REDUCED_AT_ONCE = 2**16
"""Logits whose differences are computed at once, in float64."""


def rows_at_once(sizes: BufferSizes) -> int:
    """Return of how many rows the logits are computed at once."""
    rows = max(sizes.hidden_size // _SHARE_OF_HEAD, _ALWAYS // sizes.vocab_size, _LEAST_ROWS)
    return min(rows, MOST_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class RowDifferences:
    """What is known of each row after its logits are compared.

    Attributes:
        largest: Largest absolute difference, [T] float64; infinite where only one side is NaN.
        scale: Largest finite absolute logit of the model, [T].
        expected_token: Index of the model's largest logit, [T].
        token: Index of the wrapper's largest logit, [T].
    """

    largest: torch.Tensor
    scale: torch.Tensor
    expected_token: torch.Tensor
    token: torch.Tensor

    @classmethod
    def of(cls, expected: torch.Tensor, got: torch.Tensor) -> RowDifferences:
        """Compare logits of the model and the wrapper, [T, V], in the dtype of the wrapper."""
        rows = max(1, _REDUCED_AT_ONCE // expected.shape[1])
        parts = zip(expected.split(rows), got.split(rows), strict=True)
        return cls.joined([cls._of_few(one.to(other.dtype), other) for one, other in parts])

    @classmethod
    def joined(cls, parts: Sequence[RowDifferences]) -> RowDifferences:
        """Return the rows of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def rows(self, order: torch.Tensor) -> RowDifferences:
        """Return some rows."""
        names = [field.name for field in fields(self)]
        return RowDifferences(**{name: getattr(self, name)[order] for name in names})

    @classmethod
    def _of_few(cls, expected: torch.Tensor, got: torch.Tensor) -> RowDifferences:
        difference = got.double().sub_(expected).abs_()
        if not difference.isfinite().all():
            same = (expected == got) | (expected.isnan() & got.isnan())
            difference.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(same, 0.0)
        return cls(
            largest=difference.amax(1),
            scale=expected.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1),
            expected_token=expected.argmax(1),
            token=got.argmax(1),
        )

    def ulp(self, rounding: Rounding) -> float:
        """Return one ulp of all rows, see ``Rounding``."""
        return rounding.ulp(self.scale)

    def ulps(self, rounding: Rounding) -> float:
        """Return the largest difference in ulp."""
        return float(self.largest.max()) / self.ulp(rounding)

    def first_beyond(self, ulps: float, rounding: Rounding) -> int | None:
        """Return the first row that differs by more than so many ulp."""
        wrong = (self.largest > ulps * self.ulp(rounding)).nonzero()
        return int(wrong[0]) if wrong.numel() else None


_ROWS_ARGUMENT = "logits_to_keep"
"""Argument of models of transformers: positions whose logits they compute."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelRun:
    """A run of a model on a sequence.

    Attributes:
        tokens: The sequence.
        choices: Choices of the model's modules.
        rows: Returns the logits at some positions, [n, V].
    """

    tokens: list[int]
    choices: Choices
    rows: Callable[[Sequence[int]], torch.Tensor]


class ModelLogits:
    """Runs a model on sequences.

    A model of transformers runs its layers once per sequence. Its head then computes the logits of
    the rows that are asked for, so that the logits of all rows never exist at the same time.

    Args:
        model: As for ``CaptureTarget``.
        device: Device of the token ids.
        vocab_size: Expected number of logits (V).

    Attributes:
        model: As passed.
        paths: Path of each module that it calls, known after the first sequence.
        device: Device of the token ids.
    """

    def __init__(
        self, model: Callable[[torch.Tensor], Any], device: torch.device, vocab_size: int
    ) -> None:
        self.model = model
        self.paths: dict[nn.Module, str] = {}
        self.device, self._vocab_size = device, vocab_size
        self._body = _body_without_head(model)
        self._last: ModelRun | None = None

    def of(self, tokens: Sequence[int] | Numbers) -> ModelRun:
        """Return the run on a sequence, and keep it until the next sequence.

        Raises:
            TargetError: As for ``run``.
        """
        ids = list(map(int, tokens))
        if self._last is None or self._last.tokens != ids:
            self._last = None  # first free the logits of the other sequence
            if not self.paths:
                called = (
                    [self.model]
                    if isinstance(self.model, nn.Module)
                    else outer_modules(lambda: self.run(ids))
                )
                self.paths = module_paths(called, {})
            with recorded_choices(self.paths, len(ids)) as choices:
                rows = self._rows(ids)
            self._last = ModelRun(ids, choices, rows)
        return self._last

    def run(
        self, tokens: Sequence[int] | Numbers, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run the model on a sequence and return its logits, [N, V].

        Args:
            tokens: The sequence.
            positions: Positions whose logits a model of transformers returns; ``None`` for all.

        Raises:
            TargetError: It raised an error, or returned something else.
        """
        ids = torch.tensor([list(map(int, tokens))], device=self.device)
        options: dict[str, Any] = {}
        if positions is not None:
            options[_ROWS_ARGUMENT] = torch.tensor(list(positions), device=self.device)
        try:
            with torch.no_grad():
                output = self.model(ids, **options)
        except Exception as error:
            raise TargetError(
                f"the model failed for token ids {list(ids.shape)}: {describe_exception(error)}. "
                "Pass a function from token ids [1, N] to logits [1, N, V]."
            ) from error
        logits = getattr(output, "logits", output)
        shape = (1, ids.shape[1] if positions is None else len(positions), self._vocab_size)
        if not isinstance(logits, torch.Tensor) or logits.shape != shape:
            what = type(output).__name__
            if isinstance(logits, torch.Tensor):
                what = f"logits {list(logits.shape)}"
            raise TargetError(
                f"the model returned {what} for token ids {list(ids.shape)}. Pass a function that "
                f"returns logits {list(shape)}, or an object that has them as logits."
            )
        return logits[0]

    def _rows(self, ids: list[int]) -> Callable[[Sequence[int]], torch.Tensor]:
        """Run the model, and return what returns the logits at some positions."""
        body, outputs = self._body, list[Any]()
        if body is not None:
            hook = body.register_forward_hook(lambda _, __, output: outputs.append(output))
            try:
                self.run(ids, [len(ids) - 1])
            finally:
                hook.remove()
        if body is None or len(outputs) != 1:
            logits = self.run(ids)
            return lambda positions: logits[list(positions)]

        def rows(positions: Sequence[int]) -> torch.Tensor:
            with replaced_forwards({body: lambda *_, **__: outputs[0]}):
                return self.run(ids, positions)

        return rows


def _body_without_head(model: object) -> nn.Module | None:
    """Return the module that computes what the head of a model of transformers receives."""
    body = getattr(model, "base_model", None)
    if not isinstance(model, nn.Module) or not isinstance(body, nn.Module) or body is model:
        return None
    return body if _ROWS_ARGUMENT in signature(model.forward).parameters else None


_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache among the arguments and in the output of models of transformers."""


def cache_argument(model: nn.Module) -> str:
    """Return the argument of a model of transformers that takes its cache; empty without one."""
    parameters = signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def decoding_differences(
    logits: ModelLogits, run: ModelRun, rows_at_once: int
) -> RowDifferences | None:
    """Compare the logits of a sequence with those of its tokens one by one over the model's cache.

    Modules that choose take the choices of the run on the whole sequence.

    Returns:
        The differences, [N]; ``None`` for a function, and for a model that fails or has no cache.
    """
    parts: list[RowDifferences] = []
    decoded = _decoded(logits, run)
    for start in range(0, len(run.tokens), rows_at_once):
        positions = range(start, min(start + rows_at_once, len(run.tokens)))
        for row in run.rows(positions):
            got = next(decoded)
            if got is None:
                return None
            parts.append(RowDifferences.of(row[None], got))
    return RowDifferences.joined(parts)


def _decoded(logits: ModelLogits, run: ModelRun) -> Iterator[torch.Tensor | None]:
    """Yield the logits of each token, [1, V], or ``None`` if the model does not decode."""
    model: Any = logits.model
    parameters = signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    name = cache_argument(model) if isinstance(model, nn.Module) else ""
    cache = None
    for position, token in enumerate(run.tokens):
        choices = joined_choices([(run.choices, [0], [position])], 1)
        options: dict[str, Any] = {"use_cache": True, name: cache}
        if "position_ids" in parameters:  # a cache may not know its length, such as that of Bamba
            options["position_ids"] = torch.tensor([[position]], device=logits.device)
        ids, output = torch.tensor([[token]], device=logits.device), None
        taking = taking_choices(logits.paths, choices, 1)
        with suppress(Exception), torch.no_grad(), taking:  # a model may raise anything
            output = model(ids, **options)
        cache = getattr(output, name, None)
        yield None if output is None or cache is None else output.logits[0]
