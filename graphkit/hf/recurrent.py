"""Recurrent layers of a transformers model over a pool of states, node by node.

A mixer of transformers knows one sequence per row of its batch and keeps its states in a cache.
Here its batch is one node of each request, and the cache holds the states before that node.
Suffixes: B requests, T rows.
"""

# ruff: noqa: ARG002 - the signatures are those of transformers.Cache
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
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
    """The cache that one recurrent layer sees while it computes one node of each request.

    Implements what mixers of transformers 5.23 call of a ``Cache``. The layer always has a previous
    state; that of a new request is zeros, as in transformers.

    Args:
        states: States before the node, ``[B, *shape]``, by kind and number, such as ``conv0``.

    Attributes:
        states: States after the node.
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
        """Return false: states are those of one node."""
        return False


def convert_mixers(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Let the recurrent layers of a model run over the pool of the running batch; in place."""
    modules = dict(model.named_modules())
    for number, layer in enumerate(layout.recurrent):
        mixer = modules[layer.name]
        mixer.forward = partial(_scanned, mixer.forward, layer, number)


def _scanned(
    forward: Any, layer: RecurrentLayer, number: int, hidden_states: torch.Tensor, **others: Any
) -> torch.Tensor:
    """Run a mixer over the rows of a batch, [1, T, H], parents before their children."""
    scan = _SCAN.get()
    if scan is None:
        raise AttentionError(
            "this model runs through graphkit.hf: call the forward of its target, not the model."
        )

    def update(states: Mapping[str, torch.Tensor], row: torch.Tensor) -> Any:
        cache: Any = NodeCache(states)
        out = forward(row[:, None], **others | {layer.cache_argument: cache})
        return cache.states, out[:, 0]

    return scan.pool.scan(number, scan.slots, update, hidden_states[0])[None]
