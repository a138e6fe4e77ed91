"""What ``graphkit capture`` and its sisters work on: a model's forwards with everything around."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from graphkit.attention import AttentionBackend
from graphkit.buffers import StepInputs
from graphkit.config import BufferSizes
from graphkit.errors import TargetError
from graphkit.graphs import Backend
from graphkit.graphs.capture_failure import describe_exception
from graphkit.runners import RUNNERS, Output, Runner
from graphkit.spec import ForwardMode, SpecConfig

Forward = Callable[[Any], Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CaptureTarget:
    """A model, and its draft models if it has any, for the command line and the audits.

    Raises:
        TargetError: A forward is for something that is no mode with a runner.

    Commands take one as ``package.module:attribute``, or a function that makes one, called with
    ``device=`` if it takes that. ``tools/examples/own_target.py`` is a whole one.

    ``attention``, ``optional_fields`` and ``inputs_type`` apply to all modes, or are mappings from
    a mode to its value; a mode that is not in the mapping has none.

    Attributes:
        name: Shown to people.
        spec: How its algorithm drafts and verifies.
        sizes: How large the buffers must be.
        forwards: The forward of each mode, as the mode's runner takes it (``RUNNERS``); of
            MULTI_LAYER_EAGLE a sequence, one per step.
        sample_batch: ``sample_batch(mode, batch_size, seed)`` makes a live batch, the same for the
            same arguments: the mode's inputs, numpy arrays or CPU tensors, and hidden states on the
            target's device. What is missing is refused by name.
        weights: A module, or tensors by name; constant while graphs live.
        mutable_state: Tensors that a step of any mode may change, by name: KV pools, counters.
        host_values: Host-side values that a graph must not freeze: name -> (setter, two or more
            values). A value that is set applies from the next step on, replayed or not.
        attention: The attention backend that forwards read ``inputs.attention`` from. A draft model
            has its own KV pool, hence its own backend.
        batch_sizes: Sizes to capture beside the largest unless asked otherwise; ``None`` takes the
            field's list.
        optional_fields: Optional fields that batches bring; ``None`` takes what the spec implies,
            such as ``custom_mask`` for trees.
        inputs_type: A subclass of the mode's inputs that declares further fields.
    """

    name: str
    spec: SpecConfig
    sizes: BufferSizes
    forwards: Mapping[ForwardMode, Forward | Sequence[Forward]]
    sample_batch: Callable[[ForwardMode, int, int], Any]
    weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    mutable_state: Mapping[str, torch.Tensor] | None = None
    host_values: Mapping[str, tuple[Callable[[Any], None], Sequence[Any]]] = field(
        default_factory=dict
    )
    attention: AttentionBackend | Mapping[ForwardMode, AttentionBackend] | None = None
    batch_sizes: Sequence[int] | None = None
    optional_fields: Sequence[str] | Mapping[ForwardMode, Sequence[str]] | None = None
    inputs_type: type[StepInputs] | Mapping[ForwardMode, type[StepInputs]] | None = None
    output_type: type[Output] | Mapping[ForwardMode, type[Output]] | None = None

    def __post_init__(self) -> None:
        for mode in self.forwards:
            if mode not in RUNNERS:
                raise TargetError(
                    f"target {self.name!r} has a forward for {mode!r}. Forwards are a mapping from "
                    f"graphkit.ForwardMode, one of {', '.join(mode.name for mode in RUNNERS)}."
                )

    def batch(self, mode: ForwardMode, batch_size: int, seed: int) -> Any:
        """What ``sample_batch`` makes, if it is of the size that was asked for.

        Raises:
            TargetError: It is not, or ``sample_batch`` raises.
        """
        try:
            batch = self.sample_batch(mode, batch_size, seed)
        except Exception as error:
            raise TargetError(
                f"target {self.name!r}: sample_batch({mode.name}, {batch_size}, {seed}) failed: "
                f"{describe_exception(error)}."
            ) from error
        if not isinstance(batch, StepInputs):
            raise TargetError(
                f"target {self.name!r}: sample_batch made a {type(batch).__name__} for "
                f"{mode.name}. Make graphkit.{RUNNERS[mode].buffers_type.inputs_type.__name__}."
            )
        if batch.batch_size != batch_size:
            raise TargetError(
                f"target {self.name!r}: sample_batch made {batch.batch_size} requests where "
                f"{batch_size} were asked for."
            )
        return batch

    def runner(
        self,
        mode: ForwardMode,
        *,
        batch_sizes: Sequence[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
    ) -> Runner[Any, Any]:
        """A planned runner for one of the target's modes.

        Raises:
            TargetError: The target has no forward for the mode.
        """
        if mode not in self.forwards:
            names = ", ".join(mode.name for mode in self.forwards) or "none"
            raise TargetError(
                f"target {self.name!r} has no forward for {mode.name}; it has {names}."
            )
        kind = RUNNERS[mode]
        attention = _of_mode(self.attention, mode)
        return kind(
            self.forwards[mode],
            spec=self.spec,
            sizes=self.sizes,
            batch_sizes=self.batch_sizes if batch_sizes is None else batch_sizes,
            device=device,
            backend=backend,
            **({} if attention is None else {"attention": attention}),
            optional_fields=_of_mode(self.optional_fields, mode),
            **kind.declared(_of_mode(self.inputs_type, mode), _of_mode(self.output_type, mode)),
            mutable_state=self.mutable_state,
        )


def _of_mode(value: T | Mapping[ForwardMode, T] | None, mode: ForwardMode) -> T | None:
    return value.get(mode) if isinstance(value, Mapping) else value
