"""Logits of a model on whole sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphkit.errors import TargetError
from graphkit.graphs.capture_failure import describe_exception
from graphkit.runners.sample_rows import Numbers
from graphkit.verify.wrapper.choices import Choices, recorded_choices
from graphkit.verify.wrapper.module_rows import module_paths, outer_modules


class ModelLogits:
    """Runs a model on sequences.

    Args:
        model: As for ``CaptureTarget``.
        device: Device of the token ids.
        vocab_size: Expected number of logits (V).

    Attributes:
        model: As passed.
        paths: Path of each module that it calls, known after the first sequence.
        choices: Choices in the sequence whose logits are kept.
    """

    def __init__(
        self, model: Callable[[torch.Tensor], Any], device: torch.device, vocab_size: int
    ) -> None:
        self.model = model
        self.paths: dict[nn.Module, str] = {}
        self.choices: Choices = {}
        self._device, self._vocab_size = device, vocab_size
        self._last: tuple[list[int], torch.Tensor] | None = None

    def of(self, tokens: Sequence[int] | Numbers) -> torch.Tensor:
        """Return the logits of a sequence, [N, V], and keep them until the next sequence.

        Raises:
            TargetError: As for ``run``.
        """
        ids = list(map(int, tokens))
        if self._last is None or self._last[0] != ids:
            self._last = None  # first free the logits of the other sequence
            if not self.paths:
                called = (
                    [self.model]
                    if isinstance(self.model, nn.Module)
                    else outer_modules(lambda: self.run(ids))
                )
                self.paths = module_paths(called, {})
            with recorded_choices(self.paths, len(ids)) as self.choices:
                self._last = ids, self.run(ids)
        return self._last[1]

    def run(self, tokens: Sequence[int] | Numbers) -> torch.Tensor:
        """Run the model on a sequence and return its logits, [N, V].

        Raises:
            TargetError: It raised an error, or returned something else.
        """
        ids = torch.tensor([list(map(int, tokens))], device=self._device)
        try:
            with torch.no_grad():
                output = self.model(ids)
        except Exception as error:
            raise TargetError(
                f"the model failed for token ids {list(ids.shape)}: {describe_exception(error)}. "
                "Pass a function from token ids [1, N] to logits [1, N, V]."
            ) from error
        logits = getattr(output, "logits", output)
        shape = (1, ids.shape[1], self._vocab_size)
        if not isinstance(logits, torch.Tensor) or logits.shape != shape:
            what = type(output).__name__
            if isinstance(logits, torch.Tensor):
                what = f"logits {list(logits.shape)}"
            raise TargetError(
                f"the model returned {what} for token ids {list(ids.shape)}. Pass a function that "
                f"returns logits {list(shape)}, or an object that has them as logits."
            )
        return logits[0]
