"""What a runner is before it captures: its settings, checked, and the parts that they lead to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from graphkit.attention import AttentionBackend
from graphkit.buffers import InputBuffers, Inputs, capacity_of
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError
from graphkit.graphs import Attribution, Backend, CapturedGraph, SizeTable, backend_for
from graphkit.graphs.state import checked
from graphkit.runners.capturing import Capturing
from graphkit.runners.dispatch import Dispatch
from graphkit.runners.known_memory import memory_names
from graphkit.runners.outputs import Output
from graphkit.runners.parts import Parts
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode, SpecConfig

OutputT = TypeVar("OutputT", bound=Output)


class Planned(Generic[OutputT]):
    """The settings of a runner, as ``Runner`` explains them. A mode says here how it differs.

    Raises:
        ConfigError: A setting contradicts another one, or the device.
        DeviceError: There is no such device.
    """

    mode: ClassVar[ForwardMode]
    attention_mode: ClassVar[ForwardMode | None] = None
    """What the attention backend knows ``mode`` as, if not by that name."""
    buffers_type: ClassVar[type[InputBuffers]]
    output_type: ClassVar[type[Any]]
    step_type: ClassVar[type[Step[Any]]] = Step
    ragged: ClassVar[bool] = False
    """Whether a request may have fewer rows than ``tokens_per_request``."""
    may_stay_eager: ClassVar[bool] = False
    """Whether an attention backend without support makes batches fall back instead of an error."""

    def __init__(
        self,
        forward: Any,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        attention: AttentionBackend | None = None,
        multiple_of: int = 1,
        optional_fields: Collection[str] | None = None,
        inputs_type: type[Inputs] | None = None,
        bound_fields: Mapping[str, torch.Tensor] | None = None,
        mutable_state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if inputs_type is not None:
            _check_inputs_type(inputs_type, self.buffers_type.inputs_type)
        self.spec, self.sizes, self.attention = spec, sizes, attention
        self.table = SizeTable(sizes.max_batch_size, batch_sizes, multiple_of=multiple_of)
        self.backend = backend_for(device, backend)
        self.device = self.backend.device
        self.tokens_per_request = self.width()
        self.eager_reason = "" if attention is None else self._adopt(attention)
        """Why no batch has a graph, as a sentence; empty if that is not so."""
        self.buffers = self.buffers_type(
            capacity_of(
                spec,
                sizes,
                requests=self.table.largest,
                tokens_per_request=self.tokens_per_request,
                seq_len_fill=1 if attention is None else attention.seq_len_fill_value,
                ragged=self.ragged,
            ),
            self.device,
            inputs_type=inputs_type,
            optional_fields=self.implied_fields() if optional_fields is None else optional_fields,
            without=self.fields_without_use(),
            bound_fields=bound_fields,
            is_alive=self.backend.is_alive,
        )
        self.mutable_state = checked(mutable_state or {})
        """Tensors that a step changes, by name."""
        self.parts: Parts[OutputT] = Parts(
            mode=self.mode,
            output_type=self.output_type,
            table=self.table,
            backend=self.backend,
            buffers=self.buffers,
            step=self._make_step(forward),
            dispatch=Dispatch(self.table, self.buffers, self.eager_reason),
            plan_on_host=self._host_plan(),
        )
        """What captures and replays are made of. The audits make their own of them."""

    def implied_fields(self) -> tuple[str, ...]:
        """Optional fields that the settings imply."""
        return ()

    def fields_without_use(self) -> tuple[str, ...]:
        """Fields that the settings make meaningless; nothing is allocated for them."""
        return ()

    @contextmanager
    def captured_aside(
        self,
        batch_of: Callable[[int], Any] | None = None,
        *,
        attribution: Attribution | None = None,
    ) -> Iterator[Mapping[int, CapturedGraph]]:
        """Capture every size once more, for a block that wants to compare; then close those graphs.

        The runner stays what it is, but nothing may be replayed meanwhile.

        Args:
            batch_of: Makes the batch of a size that warm-ups and captures see; pads if left out.
            attribution: As for ``capture``.

        Raises:
            CaptureError: As for ``capture``.
        """
        capturing = Capturing(self.parts, self.mutable_state, attribution, batch_of)
        graphs, _ = capturing.every_size(lambda _size: None)
        try:
            yield graphs
        finally:
            for graph in graphs.values():
                graph.close()

    def memory_names(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Everything in memory that this runner can name, by kind; see ``graphkit.Pointer``."""
        return memory_names(self.buffers, self.mutable_state, self.attention, weights)

    def _make_step(self, forward: Any) -> Step[OutputT]:
        return self.step_type(
            forward, self._attention_mode, self.spec, self.output_type, self.buffers, self.attention
        )

    def width(self) -> int:
        """Rows per request (the field's num_tokens_per_bs)."""
        return self.spec.tokens_per_request(self.mode)

    def steps_ahead(self) -> int:
        """Positions beyond those of its batch that a step reaches at most."""
        return 0

    @property
    def _attention_mode(self) -> ForwardMode:
        return self.attention_mode or self.mode

    def _adopt(self, attention: AttentionBackend) -> str:
        """Prepare the backend; returns why it cannot serve graphs, if that is no error."""
        sizes = replace(self.sizes, max_batch_size=self.table.largest)
        if self.may_stay_eager or attention.supports(self._attention_mode):
            attention.init_state(sizes, self.table.largest * self.tokens_per_request)
        if attention.supports(self._attention_mode):
            return ""
        fact = (
            f"attention backend {type(attention).__name__} does not support "
            f"{self._attention_mode.name}"
        )
        if self.may_stay_eager:
            return f"{fact} graphs"
        raise ConfigError(
            f"{fact}. Pass one that does, or attention=None and attend in the forward.",
            field="attention",
        )

    def _host_plan(self) -> Callable[[Any, int], None] | None:
        hook = getattr(self.attention, "before_replay", None)
        if hook is None:
            return None
        mode = self._attention_mode
        return lambda batch, padded_batch_size: hook(mode, batch, padded_batch_size)


def _check_inputs_type(given: Any, base: type[Inputs]) -> None:
    if not (isinstance(given, type) and issubclass(given, base)):
        raise ConfigError(
            f"inputs_type must be a subclass of {base.__name__}, got {given!r}.",
            field="inputs_type",
        )
