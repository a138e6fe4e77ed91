"""The graphs of a runner: records of them, their memory, and further captures of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import nn

from graphkit.errors import ReplayError, SizeError
from graphkit.graphs import Attribution, Backend, CapturedGraph, SizeTable, backend_for
from graphkit.records import CaptureRecord, GraphRecord, ModeRecord
from graphkit.runners.capture import SizeCapture, mode_record
from graphkit.runners.capture_checks import FrozenValues
from graphkit.runners.dispatch import Dispatch
from graphkit.runners.known_memory import memory_names, memory_parts
from graphkit.runners.mode_declaration import ModeDeclaration
from graphkit.runners.outputs import Output
from graphkit.runners.replayer import Replayer
from graphkit.runners.settings import check_callable
from graphkit.runners.step import Step

if TYPE_CHECKING:
    from graphkit.records import Finding, MemoryEstimate
    from graphkit.runners.ranks import RunnerGroup

OutputT = TypeVar("OutputT", bound=Output)


class _CapturedGraphs(ModeDeclaration, Generic[OutputT]):
    """Base of ``Runner``, which sets the attributes: what it tells about its graphs."""

    status: Literal["planned", "captured", "closed"] = "planned"
    """State of the life cycle."""
    eager_reason: str
    """Reason why no batch has a graph, or an empty string."""
    step: Step[OutputT]
    """The forward with everything around it."""
    dispatch: Dispatch
    """Decides which batches have a graph."""
    mutable_state: dict[str, torch.Tensor]
    """Tensors that a step changes, by name."""
    draft_token_map: torch.Tensor | None
    """Target token of each id of a reduced draft vocabulary, if any."""
    group: RunnerGroup | None
    """Ranks that capture and replay together, if any."""
    table: SizeTable
    backend: Backend
    device: torch.device
    _replayer: Replayer[OutputT] | None
    _frozen: FrozenValues | None
    _captured_at: str
    _captured_mode: ModeRecord | None
    """Record of the graphs of a captured runner."""

    @property
    def graphs(self) -> Mapping[int, CapturedGraph]:
        """The captured graph of each size.

        Raises:
            ReplayError: The runner is not ``captured``.
        """
        return self._require_captured("graphs").graphs

    def inspect(
        self,
        batch_size: int,
        *,
        weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
        replay: Callable[[], object] | None = None,
    ) -> GraphRecord:
        """Inspect the graph of a captured size; see ``graphkit.inspect_graph``.

        Pointers are named by input field, by ``mutable_state``, by the attributes of the attention
        backend, and by ``weights``.

        Args:
            batch_size: A captured size.
            weights: The model, or its weights by name.
            replay: Replays a batch at that size, so that the nodes of some replays are measured.

        Raises:
            InspectError: See ``inspect_graph``.
            ReplayError: The runner is not ``captured``.
            SizeError: The size was not captured.
        """
        from graphkit.graphs import inspect_graph  # no capture or replay needs it

        graph = self._graph("inspect", batch_size)
        record = inspect_graph(
            graph,
            names=self.memory_names(weights),
            name=f"{self.mode.name} {batch_size}",
            captured_at=self._captured_at,
            replay=replay,
        )
        return replace(record, mode=self.mode.name, batch_size=batch_size)

    def memory_names(
        self, weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return every tensor that this runner can name, by kind of memory and by name.

        Args:
            weights: The model, or its weights by name.
        """
        names = memory_names(self.buffers, self.mutable_state, self.attention, weights)
        if self.draft_token_map is not None:
            names["weight"]["draft_token_map"] = self.draft_token_map
        return names

    def frozen_values(self, batch_size: int) -> list[Finding]:
        """Return what the forward reads on the host, has changed since capture, and a graph keeps.

        Compares the attributes, closure variables, globals and list lengths that the forward can
        read, except in the models of a ``SpecStepRunner``. If one has changed, captures the size
        again with both values, next to the graphs; outputs of the pool become invalid. A weight or
        another tensor that is replaced counts if a node reads the earlier one. With ``group`` all
        ranks call it.

        Args:
            batch_size: A captured size.

        Raises:
            CaptureError: The size cannot be captured again.
            ReplayError: The runner is not ``captured``.
            SizeError: The size was not captured.
        """
        self._graph("frozen_values", batch_size)
        assert self._frozen is not None, "a captured runner has recorded its host numbers"
        return self._frozen.find(batch_size)

    def estimate(self, record: CaptureRecord | None = None) -> MemoryEstimate:
        """Return the device memory that this runner takes once it is captured.

        The tensors of the runner exist already, so their bytes are exact. The memory of the graphs
        is predicted: the largest, the middle and the smallest size are captured, measured and
        closed, which needs the memory of the largest one for a while. Other processes on the device
        disturb the measurement. Runners that share a backend share its pool: estimate them
        together, as ``SpeculativeEngine.estimate`` does.

        A captured runner returns what its graphs took. With ``group`` all ranks call this.

        Args:
            record: Record of an earlier capture of the same model and settings, of any sizes, to
                predict from; ``None`` captures.

        Raises:
            CaptureError: A size cannot be captured.
            ConfigError: ``record`` is not a ``CaptureRecord``.
            RecordError: ``record`` has no graphs of this mode and width.
            ReplayError: The runner is closed.
        """
        from graphkit.runners.memory_estimate import estimate_memory

        return estimate_memory(self.backend, [self], record)

    @contextmanager
    def trial_capture(self) -> Iterator[ModeRecord]:
        """Capture the sizes that an estimate needs for a block, and yield their record.

        A captured runner yields the record of its graphs.

        Raises:
            CaptureError: A size cannot be captured.
            ReplayError: The runner is closed.
        """
        if self.status == "closed":
            raise ReplayError("estimate() needs an open runner, but this one is closed.")
        if self._captured_mode is not None:
            yield self._captured_mode
            return
        if self.eager_reason:
            yield mode_record(self.step, (), self.eager_reason)
            return
        from graphkit.runners.memory_estimate import trial_sizes

        for size in self.table:
            self.buffers.prepare(size)
        table = trial_sizes(self.table)
        capture = SizeCapture(self.step, table, self.capturing_backend(), self.mutable_state)
        with capture.temporary_graphs():
            yield mode_record(self.step, capture.records, "")

    @property
    def graph_bytes(self) -> int:
        """Bytes by which the pool grew for the graphs of this runner, loops included."""
        return 0 if self._captured_mode is None else self._captured_mode.graph_bytes

    def memory_parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of this runner by the attribute of ``MemoryEstimate`` of each."""
        return memory_parts(self.buffers, self.mutable_state, self.attention)

    def recapture(
        self,
        make_batch: Callable[[int], Any] | None = None,
        *,
        batch_sizes: Iterable[int] | None = None,
        backend: Backend | None = None,
        attribution: Attribution | None = None,
    ) -> AbstractContextManager[Mapping[int, CapturedGraph]]:
        """Capture sizes again for a block, next to the runner's graphs, and close them after it.

        The runner does not change. Nothing may be replayed during the captures.

        Args:
            make_batch: Returns the batch of a size that warm-ups and captures run on, instead of
                pads.
            batch_sizes: Sizes to capture; ``None`` selects the runner's.
            backend: Backend that captures; ``None`` selects the runner's.
            attribution: As for ``capture``.

        Raises:
            CaptureError: A size cannot be captured.
            ConfigError: The runner has no such size, or an argument has a wrong type.
        """
        if make_batch is not None:
            check_callable("make_batch", make_batch)
        table = self.table
        chosen_backend = self.capturing_backend(
            None if backend is None else backend_for("auto", backend)
        )
        if batch_sizes is not None:
            table = table.subset(batch_sizes)
        return SizeCapture(
            self.step, table, chosen_backend, self.mutable_state, attribution, make_batch
        ).temporary_graphs()

    def capturing_backend(self, backend: Backend | None = None) -> Backend:
        """Return a backend that captures on all ranks at once; without ``group`` as it is.

        Args:
            backend: Backend of this rank; ``None`` selects the runner's.
        """
        backend = backend or self.backend
        if self.group is None:
            return backend
        return self.group.capturing_backend(backend, self._shared_settings())

    def make_replayer(self, graphs: Mapping[int, CapturedGraph]) -> Replayer[OutputT]:
        """Return a replayer of other graphs of this runner's step, such as ``recapture``'s.

        Its replays do not count in ``stats``.
        """
        table = self.table
        if len(graphs) < len(table.sizes):
            table = SizeTable(max(graphs), list(graphs))
        return Replayer(self.step, table, graphs, self.dispatch, self.backend)

    def _shared_settings(self) -> dict[str, str]:
        """Return what must be the same on all ranks, by name."""
        fields = [layout.name for layout in self.buffers.layouts]
        return {
            "the runner": f"{type(self).__name__} ({self.mode.name})",
            "spec": repr(self.spec),
            "sizes": repr(self.sizes),
            "batch_sizes": str(list(self.table)),
            "tokens_per_request": str(self.tokens_per_request),
            "the captured fields": ", ".join(fields),
            "attention": type(self.attention).__name__,
            "check": str(self.buffers.value_checks is not None),
            "same_batch": str(self.group is not None and self.group.same_batch),
        }

    def _graph(self, what: str, batch_size: int) -> CapturedGraph:
        """Return the graph of a captured size, for ``what``."""
        graphs = self._require_captured(what).graphs
        if batch_size not in list(graphs):  # a list takes unhashable values
            raise SizeError(
                f"batch size {batch_size} was not captured: captured are {list(self.table)}.",
                batch_size=batch_size,
                largest=self.table.largest,
            )
        return graphs[batch_size]

    def _require_captured(self, what: str) -> Replayer[OutputT]:
        """Return the replayer."""
        if self.eager_reason and self.status != "closed":
            raise ReplayError(f"{what} needs a graph, but {self.eager_reason}. Use run(batch).")
        if self.status != "captured":
            remedy = "Call capture() first." if self.status == "planned" else "Create a new runner."
            raise ReplayError(
                f"{what} needs a captured runner, but this one is {self.status}. {remedy}"
            )
        assert self._replayer is not None, "a captured runner has a replayer"
        return self._replayer
