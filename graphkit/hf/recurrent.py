"""Recurrent layers of a transformers model over a pool of states.

A mixer of transformers knows one sequence per row of its batch and keeps its states in a cache.
Here its batch is one node of each request, or several of a prompt, and the cache holds the states
before them. Suffixes: B requests, N nodes of each, T rows.
"""

# ruff: noqa: ARG002 - the signatures are those of transformers.Cache
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from graphkit.errors import AttentionError
from graphkit.hf.layout import ModelLayout, RecurrentLayer
from graphkit.kv import RecurrentStatePool
from graphkit.kv.recurrent import StateSlots


@dataclass(frozen=True, slots=True, eq=False)
class NodeScan:
    """The states of one batch.

    Attributes:
        pool: States of all requests.
        slots: Slots that the batch reads and writes.
    """

    pool: RecurrentStatePool
    slots: StateSlots


_SCAN: ContextVar[NodeScan | None] = ContextVar("graphkit_hf_scan", default=None)


@contextmanager
def scanning(scan: NodeScan) -> Iterator[None]:
    """Let the recurrent layers of prepared models run over the states of a batch."""
    token = _SCAN.set(scan)
    try:
        yield
    finally:
        _SCAN.reset(token)


class NodeCache:
    """The cache that one recurrent layer sees while it computes nodes of each request.

    Implements what mixers of transformers 5.23 call of a ``Cache``. The layer always has a previous
    state; that of a new request is zeros, as in transformers.

    Args:
        states: States before the nodes, ``[B, *shape]``, by kind and number, such as ``conv0``.

    Attributes:
        states: States after the nodes.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self.states = dict(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last columns of the convolution's input, or ``None`` without one."""
        return self.states.get(f"conv{state_idx}")

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        """Append columns, and return all that the convolution reads."""
        before = self.states[f"conv{state_idx}"]
        columns = torch.cat([before, conv_states.to(before.dtype)], -1)
        self.states[f"conv{state_idx}"] = columns[..., -before.shape[-1] :]
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state, or ``None`` without one."""
        return self.states.get(f"recurrent{state_idx}")

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        """Set the recurrent state, and return it."""
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return true: there is always a state."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return false: states are those after the last node."""
        return False


def convert_mixers(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the recurrent layers of a model run over the pool of the running batch; in place."""
    modules = dict(model.named_modules())
    for number, layer in enumerate(layout.recurrent):
        mixer = modules[layer.name]
        mixer.forward = PooledMixer(mixer.forward, layer, number)


class PooledMixer:
    """A mixer over the states of the running batch.

    The nodes of a step run one after the other, parents before their children, because the state
    after each of them is kept. A chain with more nodes than the pool keeps states is a part of a
    prompt: its first nodes run in one call of the mixer. The first such chain is computed both
    ways; a mixer that computes something else for several tokens runs all of them one by one.

    Args:
        forward: Forward of the mixer.
        layer: The layer.
        number: Its index among the recurrent layers.
    """

    def __init__(self, forward: Callable[..., Any], layer: RecurrentLayer, number: int) -> None:
        self._forward, self._layer, self._number = forward, layer, number
        self._takes_chunks: bool | None = None

    def __call__(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        """Run the mixer over the rows of a batch, [1, T, H]; takes the arguments of the mixer."""
        scan = _SCAN.get()
        if scan is None:
            raise AttentionError(
                "this model runs through graphkit.hf: call the forward of its target, not the "
                "model."
            )

        def run(states: Mapping[str, torch.Tensor], rows: torch.Tensor) -> Any:
            cache: Any = NodeCache(states)
            out = self._forward(rows, **others | {self._layer.cache_argument: cache})
            return cache.states, out

        pool, slots = scan.pool, scan.slots

        def update(states: Mapping[str, torch.Tensor], row: torch.Tensor) -> Any:
            if (
                slots.is_row is not None
            ):  # the pool keeps states of ended prompts; a mixer may write
                states = {name: state.clone() for name, state in states.items()}
            states, out = run(states, row[:, None])
            return states, out[:, 0]

        rows = hidden_states[0].unflatten(0, (len(slots.after), -1)) if _is_even(slots) else None
        most = 0 if rows is None else rows.shape[1] - pool.width
        if rows is None or most < 2 or self._takes_chunks is False:
            return pool.scan(self._number, slots, update, hidden_states[0])[None]
        states: Mapping[str, torch.Tensor] = pool.load(self._number, slots.before[:, 0])
        if self._takes_chunks is None:
            self._takes_chunks = _same_in_chunks(run, states, rows[:, :most])
            return self(hidden_states, **others)
        states, out = run(states, rows[:, :most])
        outputs = [out]
        for node in range(-pool.width, 0):
            states, out = run(states, rows[:, node].unsqueeze(1))
            pool.store(self._number, slots.after[:, node], states)
            outputs.append(out)
        return torch.cat(outputs, 1).flatten(0, 1)[None]


def _is_even(slots: StateSlots) -> bool:
    """Return whether a batch has chains of one length, as far as the host knows."""
    return slots.order is None and (slots.packed is None or len(slots.after) == 1)


_CHUNK_DIFFERENCE = 0.05
"""Largest root mean square difference between a chunk and its single nodes, relative to these.

Both add in different orders, in several steps. What computes something else, such as without the
states before a chunk, differs by as much as its values.
"""


def _same_in_chunks(
    run: Callable[..., Any], states: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> bool:
    """Return whether a mixer computes two chunks as it computes their nodes, [B, N, H]."""
    half, nodes = rows.shape[1] // 2, rows.shape[1]

    def parts(bounds: Sequence[int]) -> list[torch.Tensor]:
        after = {name: state.clone() for name, state in states.items()}  # a mixer may write them
        outputs = []
        for begin, end in pairwise(bounds):
            after, out = run(after, rows[:, begin:end])
            outputs.append(out)
        return [torch.cat(outputs, 1), *(after[name] for name in states)]

    try:
        chunks = parts([0, half, nodes])
    except (RuntimeError, ValueError, TypeError):  # a kernel for single tokens alone
        return False
    singles = parts(range(nodes + 1))
    return all(
        one.shape == other.shape
        and bool((one - other).float().norm() <= _CHUNK_DIFFERENCE * other.float().norm())
        for one, other in zip(chunks, singles, strict=True)
    )
