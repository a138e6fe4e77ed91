"""The forward that runs in this thread: what its layers read of the batch, and its pools.

Suffixes: T rows, N query heads, M key-value heads, D head size of keys, E head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphkit.buffers import Inputs
from graphkit.engine.attention import AbsorbedProjections, LatentHeads, ProjectedHeads
from graphkit.engine.kv import IndexKeyPool, RecurrentStatePool
from graphkit.engine.kv.recurrent_rows import ScanRows, StateSlots
from graphkit.engine.kv.scanned import ScanShape
from graphkit.errors import AttentionError
from graphkit.ops.attention_layout import DenseLayout
from graphkit.ops.decoder import in_vectors


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKeys:
    """The keys that each row attends to, as an indexer of a prepared model returns them.

    It is no tensor, so that a comparison of models does not take indices of transformers for it.

    Attributes:
        positions: Positions in the request of the row, [T, K] int64, -1 behind the last.
    """

    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LatentRows:
    """What a layer with latent attention keeps of its rows.

    Attributes:
        latents: [1, 1, T, R].
        rotated: Rotated part of the keys, [1, 1, T, P].
        projections: The projections of the layer.
    """

    latents: torch.Tensor
    rotated: torch.Tensor
    projections: AbsorbedProjections


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Arguments of one layer's attention.

    Attributes:
        module: The layer's attention module.
        query: [1, N, T, D].
        key: [1, M, T, D].
        value: [1, M, T, E].
        scaling: Factor on the scores.
        window: Most keys that a row sees, its own included; 0 for all.
        chunked: Whether a row sees the keys of its own chunk of ``window`` positions alone.
        softcap: Bound of the scores; 0 for none.
        sinks: A further score per query head, [N]; ``None`` for none.
        selected: The keys that each row attends to; ``None`` for all that it sees.
        latents: The latents of the rows, which ``key`` and ``value`` then do not have; ``None``
            without latent attention.
        others: Further arguments that are not ``None`` or false.
        heads: Projected heads that are rotated first, and take the place of the rows of the call;
            ``None`` if these are rotated already.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int
    chunked: bool
    softcap: float
    sinks: torch.Tensor | None
    selected: SelectedKeys | None
    others: dict[str, Any]
    latents: LatentRows | None = None
    heads: ProjectedHeads | LatentHeads | None = None

    def rotated(self) -> AttentionCall:
        """Return the call with rotated rows."""
        if self.heads is None:
            return self
        query, key, value = (part.transpose(0, 1)[None] for part in self.heads.rotated())
        if isinstance(self.heads, LatentHeads):
            latents = LatentRows(key, value, self.heads.projections)
            return replace(self, query=query, latents=latents, heads=None)
        return replace(self, query=query, key=key, value=value, heads=None)

    def expanded(self) -> AttentionCall:
        """Return the call with the keys and values of its rows in the place of their latents."""
        if self.latents is None:
            return self
        rotated = self.latents.rotated[0].transpose(0, 1)
        key, value = self.latents.projections.keys_and_values(
            self.latents.latents[0].transpose(0, 1)
        )
        key = torch.cat([key, rotated.expand(-1, key.shape[1], -1)], -1)
        key, value = (part.transpose(0, 1)[None] for part in (key, value))
        return replace(self, key=key, value=value, latents=None)


Attend = Callable[[AttentionCall], torch.Tensor]
"""Attends in one layer of a forward: returns the attended values, [1, T, N, E]."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexBatch:
    """The index keys of one batch.

    Attributes:
        pools: Pool and layer of each indexer.
        layout: Rows and keys of each request.
        out_cache_loc: Slots of the rows, [T] int64.
    """

    pools: tuple[tuple[IndexKeyPool, int], ...]
    layout: DenseLayout
    out_cache_loc: torch.Tensor


class NodeScan:
    """The states of one batch.

    A layer that runs all rows in one call calls ``convolve`` and ``recur``. Any other reads
    ``slots``, which are computed for the first layer that reads them.

    Args:
        pool: States of all requests.
        inputs: The batch; ``None`` with ``scan_rows``.
        scan_rows: Where its rows are.
    """

    def __init__(
        self,
        pool: RecurrentStatePool,
        inputs: Inputs | None = None,
        scan_rows: ScanRows | None = None,
    ) -> None:
        self.pool, self._inputs = pool, inputs
        if scan_rows is not None:
            self.scan_rows = scan_rows

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a mixer run over the states, outside of the forward of its model."""
        token = _SCAN.set(self)
        try:
            yield
        finally:
            _SCAN.reset(token)

    @cached_property
    def scan_rows(self) -> ScanRows:
        """Where the rows of the batch are."""
        batch = self._batch
        rows = self.pool.scan_rows(batch)
        if rows.begins is None:
            return rows
        first = rows.begins[:-1].clamp(max=batch.num_tokens - 1)  # of any row without rows
        return replace(rows, starts=batch.positions[first].long())

    @property
    def is_prompt(self) -> bool:
        """Whether the rows are those of prompts."""
        return self.scan_rows.begins is not None

    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a causal convolution over inputs, [T, M], of which ``columns`` selects [T, C]."""
        return self.pool.convolve(layer, "conv0", self.scan_rows, x, weight, bias, silu, columns)

    def recur(
        self, layer: int, shape: ScanShape, *inputs: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Run a linear recurrence of the shape of the pool's; see ``ScannedStates.scan``."""
        scanned: Any = self.pool.scanned
        assert scanned is not None, "the layout has the recurrence"
        assert scanned.shape == shape, "the mixer has noted it"
        out: torch.Tensor = scanned.scan(layer, self.scan_rows, *inputs, **options)
        return out

    @property
    def _batch(self) -> Inputs:
        assert self._inputs is not None, "given without rows"
        return self._inputs

    @cached_property
    def slots(self) -> StateSlots:
        """Slots that the batch reads and writes."""
        return self.pool.slots(self._batch)

    @property
    def prompts(self) -> Sequence[range] | None:
        """Positions of the rows of each prompt; ``None`` for the nodes of steps."""
        return self._batch.spans


@dataclass(frozen=True, slots=True, eq=False)
class RunningForward:
    """What the layers of a model use of the forward that runs.

    Attributes:
        attend: Attends in one layer.
        positions: Position of each row in its request, [T] int32 or int64.
        scan: States of the recurrent layers; ``None`` without such layers.
        index: Index keys of the indexers; ``None`` without indexers.
        products: Columns of merged linear layers that their layers have still to return, by group.
        slots: KV slot of each row, [T] int64, 0 for pads; ``None`` if there are no pads.
    """

    attend: Attend
    positions: torch.Tensor
    scan: NodeScan | None = None
    index: IndexBatch | None = None
    products: dict[Any, Any] = field(default_factory=dict)
    slots: torch.Tensor | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the prepared models that run in the block use this forward.

        On a CPU, their elementwise functions give a row the same bits in every batch.
        """
        token = _RUNNING.set(self)
        is_cpu = self.positions.device.type == "cpu"
        try:
            with Intercepted(_by_vectors) if is_cpu else nullcontext():
                yield
        finally:
            _RUNNING.reset(token)


class Intercepted(TorchFunctionMode):
    """Calls ``handle(function, *args, **kwargs)`` in the place of functions of torch in a block."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle a call."""
        return self._handle(func, *args, **kwargs or {})


def _by_vectors(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function, by ``in_vectors`` if torch computes its last numbers otherwise on a CPU."""
    if function in _DEPENDS_ON_PLACE and isinstance(args[0], torch.Tensor):
        return in_vectors(function, *args, **kwargs)
    return function(*args, **kwargs)


_DEPENDS_ON_PLACE = frozenset({
    torch.sigmoid, torch.Tensor.sigmoid, torch.exp2, torch.rsqrt, torch.Tensor.rsqrt,
    functional.sigmoid, functional.silu, functional.gelu, functional.softplus, functional.mish,
    functional.elu, functional.selu, functional.celu,
})  # fmt: skip

_SCAN: ContextVar[NodeScan | None] = ContextVar("graphkit_scan", default=None)
_RUNNING: ContextVar[RunningForward | None] = ContextVar("graphkit_forward", default=None)
# A context variable and not an argument of the model, because some classes do not pass
# arguments on to their attention (Nemotron and StableLM in transformers 5.23).


def attending(attend: Attend, positions: torch.Tensor) -> AbstractContextManager[None]:
    """Let prepared models attend through ``attend``, at positions [T], in a block."""
    return RunningForward(lambda call: attend(call.rotated()), positions).running()


def running_forward() -> RunningForward:
    """Return the forward that runs.

    Raises:
        AttentionError: The model runs outside of a forward of graphkit.
    """
    running = _RUNNING.get()
    if running is None:
        raise AttentionError(
            "this model runs through graphkit.models: call the forward of its target, not the "
            "model."
        )
    return running


def running_scan() -> NodeScan:
    """Return the states of the batch that runs.

    Raises:
        AttentionError: The model runs outside of a forward of graphkit.
    """
    scan = _SCAN.get() or running_forward().scan
    assert scan is not None, "the forward of a model with recurrent layers has states"
    return scan


def running_products() -> dict[Any, Any] | None:
    """Return the products of the forward that runs in this thread; ``None`` outside of one."""
    running = _RUNNING.get()
    return None if running is None else running.products


def running_slots(rows: int) -> torch.Tensor | None:
    """Return the KV slot of each row of the forward that runs in this thread, 0 for pads.

    ``None`` outside of a forward, and if it has another number of rows than a module receives.
    """
    running = _RUNNING.get()
    slots = None if running is None else running.slots
    return slots if slots is not None and len(slots) == rows else None


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    always_call: bool = False,
) -> Iterator[None]:
    """Let modules call ``before(module, args, kwargs)`` and ``after(module, args, output)``."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(after, always_call=always_call))
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run other forwards in a block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:
                module.forward = own
