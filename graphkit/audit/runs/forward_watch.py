"""Side effects of a forward: writes into its inputs and random draws.

Both are watched in a run without a graph. A graph is captured from the same code, so that it has
the same nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphkit.audit.bits import first_difference_in_bits
from graphkit.audit.runs.forward_trace import Weights, call_observed
from graphkit.audit.runs.teacher_forcing import ForwardPair, wrapped_forward
from graphkit.buffers import fields_of
from graphkit.graphs import NodeOrigin, StateSnapshot
from graphkit.graphs.operations import OpOverload, arguments_written, extent_bytes
from graphkit.records import Mismatch
from graphkit.runners.step import Step

SAMPLER = "sampler"
"""Name of the ``graphkit.scope`` in which a forward may draw random numbers."""


@dataclass(frozen=True, slots=True)
class InputWrite:
    """A write of a forward into one of its input fields.

    Attributes:
        field: Name of the field.
        change: The first number that it changed, with its value before as the expected one;
            ``None`` if the values stayed the same.
        origin: Operation, module and line that wrote; ``None`` if that is unknown.
    """

    field: str
    change: Mismatch | None
    origin: NodeOrigin | None


class ForwardWatch:
    """Watches the forwards of a step in runs without a graph.

    Args:
        step: The runner's.
        device: Device of its tensors.
        weights: The model, or its weights by name, to name modules by.
        with_ops: Whether to watch each operation, which names its line. Compiled functions then run
            eagerly. If not, only changes of input fields are found, and no random draws.

    Attributes:
        writes: Writes into inputs so far: the first of each field.
        draws: Origins of the operations that drew random numbers outside of a sampler, each once.
        num_ops: Number of operations watched so far.
    """

    def __init__(
        self,
        step: Step[Any],
        device: torch.device,
        weights: Weights = None,
        *,
        with_ops: bool = True,
    ) -> None:
        self.writes: list[InputWrite] = []
        self.draws: list[NodeOrigin] = []
        self.num_ops = 0
        self._step, self._device, self._weights = step, device, weights
        self._with_ops = with_ops

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forwards that run in the block."""
        with self._step.wrapped(lambda forward: wrapped_forward(forward, self._call)):
            yield

    def _call(self, forward: Any, inputs: Any) -> Any:
        tensors = _input_tensors(inputs)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        writers: dict[str, NodeOrigin] = {}
        if self._with_ops:
            output = self._call_by_ops(forward, inputs, tensors, writers)
        else:
            output = forward(inputs)
        known = {write.field for write in self.writes}
        for name, tensor in tensors.items():
            change = _change(before[name], tensor, name, inputs)
            if name not in known and (change is not None or name in writers):
                self.writes.append(InputWrite(name, change, writers.get(name)))
        return output

    def _call_by_ops(
        self,
        forward: Any,
        inputs: Any,
        tensors: Mapping[str, torch.Tensor],
        writers: dict[str, NodeOrigin],
    ) -> Any:
        """Call a forward, and note the first operation that writes each of its inputs."""
        random, count = StateSnapshot({}, self._device), 0
        written, drawn = dict[str, int](), list[int]()
        ranges = {
            name: range(tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor))
            for name, tensor in tensors.items()
        }

        def note(
            op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any
        ) -> None:
            nonlocal random, count
            for tensor in arguments_written(op, args, kwargs):
                for name, addresses in ranges.items():
                    if tensor.numel() and tensor.data_ptr() in addresses:
                        written.setdefault(name, count)
            has_generator = any(isinstance(value, torch.Generator) for value in kwargs.values())
            if has_generator or random.drew_random_numbers():
                drawn.append(count)
                random = StateSnapshot({}, self._device)
            count += 1

        output, origins = call_observed(lambda: forward(inputs), note, lambda: count, self._weights)
        self.num_ops += count
        if origins:
            writers |= {name: origins[index] for name, index in written.items()}
            draws = (origins[index] for index in drawn)
            self.draws += [draw for draw in draws if SAMPLER not in draw.scope.split("/")]
        return output


def _input_tensors(inputs: Any) -> dict[str, torch.Tensor]:
    """Return the input fields by name, fields of the batch before fields of one forward alone.

    Of several that are the same memory, only the first.
    """
    declared = [field.name for field in fields_of(type(inputs))]
    by_address: dict[int, tuple[str, torch.Tensor]] = {}
    for name in (*declared, *(field.name for field in dataclasses.fields(inputs))):
        tensor = getattr(inputs, name)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            by_address.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(by_address.values())


def _change(before: torch.Tensor, now: torch.Tensor, name: str, inputs: Any) -> Mismatch | None:
    """Return the first number of a field that differs in any bit."""
    index = first_difference_in_bits(before, now)
    if index is None:
        return None
    one, other = (tensor.flatten() for tensor in (before, now))
    has_lead = any(field.lead for field in fields_of(type(inputs)) if field.name == name)
    dim = 1 if has_lead else 0
    row = int(np.unravel_index(index, now.shape)[dim])
    request = ForwardPair(inputs, {}, {}).owner(row, now.shape[dim])
    return Mismatch(
        field=name, row=row, request=request, expected=float(one[index]), got=float(other[index])
    )
