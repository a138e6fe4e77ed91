"""Teacher forcing: a second run of a step continues with the results of the first.

A draft step chooses tokens between its forwards. Where two tokens are almost equally probable, the
rounding of a kernel decides, and the rest of the step is a different draft, as valid as the first.
So the outputs of two runs cannot be compared.

Instead the first run is recorded. In the second run each forward computes its own result, which is
kept for a comparison as numbers; the step then continues with the recorded result. All other code
of the step is graphkit's: from equal numbers it must choose equal tokens, in any precision. KV
pools hold what each run wrote itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphkit.buffers import Inputs
from graphkit.runners import Output
from graphkit.runners.step import Step


@dataclass(frozen=True, slots=True)
class ForwardPair:
    """Results of one forward in a recorded run and in the forced run.

    Attributes:
        inputs: Inputs of the forced run; every row is live.
        own: What the forward of the forced run computed, by field.
        recorded: What the recorded run computed, by field: its first rows, as many as ``own`` has.
    """

    inputs: Inputs
    own: dict[str, torch.Tensor]
    recorded: dict[str, torch.Tensor]

    def owner(self, row: int, num_rows: int) -> int:
        """Return the request that a row belongs to."""
        requests = self.inputs.batch_size
        if self.inputs.width is None or num_rows == requests:
            return row * requests // num_rows
        ends = self.inputs.num_accepted_tokens.cumsum(0)  # type: ignore[attr-defined]
        return int((ends <= row).sum())


class TeacherForcing:
    """Records the forwards of one run of a step, and forces their results on another run.

    Applies to runs without a graph. Outside of its blocks the step is not affected.
    """

    def __init__(self, step: Step[Any]) -> None:
        self._step = step
        self._recorded: list[dict[str, torch.Tensor]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the results of the forwards that run in the block, instead of earlier ones."""
        self._recorded = []

        def keep(_inputs: Any, output: Output) -> Output:
            self._recorded.append(output.clone().tensors())
            return output

        with self._step.wrapped(lambda forward: _followed_by(keep, forward)):
            yield

    @contextmanager
    def force(self) -> Iterator[list[ForwardPair]]:
        """Force the recorded results on the forwards that run in the block; yields the pairs."""
        pairs: list[ForwardPair] = []

        def exchange(inputs: Any, output: Output) -> Output:
            recorded, own = self._recorded[len(pairs)], output.tensors()
            recorded = {name: rows[: len(own.get(name, rows))] for name, rows in recorded.items()}
            pairs.append(ForwardPair(inputs, own, recorded))
            return replace(output, **{name: recorded[name] for name in recorded.keys() & own})

        with self._step.wrapped(lambda forward: _followed_by(exchange, forward)):
            yield pairs


def wrapped_forward(forward: Any, call: Callable[[Any, Any], Any]) -> Any:
    """Return a forward, or each of several, that runs as ``call(forward, inputs)``."""
    if isinstance(forward, tuple):
        return tuple(wrapped_forward(part, call) for part in forward)
    return partial(call, forward)


def _followed_by(then: Callable[[Any, Output], Output], forward: Any) -> Any:
    """Return a forward, or each of several, whose output passes through ``then``.

    A result that is not an output passes unchanged: the runner refuses it.
    """

    def call(forward: Any, inputs: Any) -> Any:
        output = forward(inputs)
        return then(inputs, output) if isinstance(output, Output) else output

    return wrapped_forward(forward, call)
