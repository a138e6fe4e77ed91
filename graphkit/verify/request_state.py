"""State of requests between two steps, as copies that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphkit.attention.cache import kv_pools
from graphkit.step import DeviceStep


def request_state(step: DeviceStep, rows: Sequence[int], positions: int) -> dict[str, torch.Tensor]:
    """Return copies of what the next step reads of some requests, by name.

    ``RequestState``, ``FutureMap``, committed recurrent state, and KV of committed tokens. Behind
    them the KV is zero: what rejected drafts left there is written again before it is read.

    Args:
        step: The step; its work is done.
        rows: Rows of the requests (B).
        positions: Number of positions whose KV is returned (P).

    Shapes:
        KV: [B * P, ...]. All others: [B, ...].
    """
    by_row = dict(step.state.tensors())
    stashed = step.context.future_map.tensors()
    by_row |= {f"future map {name}": each for name, each in stashed.items()}
    recurrent = step.verifier.recurrent_state
    if recurrent is not None:  # each row begins with the committed state
        committed = {k: each[:, 0] for k, each in recurrent.tensors().items()}
        by_row |= {f"recurrent {name}": each for name, each in committed.items()}
    index = torch.tensor(rows, device=step.context.device)
    found = {name: each[index] for name, each in by_row.items()}
    slots = step.context.req_to_token[index, :positions].long().flatten()
    column = torch.arange(positions, device=step.context.device)
    is_rejected = (column >= step.state.seq_lens[index, None]).flatten()
    for name, each in _kv_buffers(step).items():
        found[name] = each[slots]
        found[name][is_rejected] = 0
    return found


def _kv_buffers(step: DeviceStep) -> dict[str, torch.Tensor]:
    """Return the KV buffers of target and drafter by name; runners may share a pool."""
    pools: dict[int, tuple[str, Any]] = {}
    for runner in step.runners:
        for pool in kv_pools(runner.attention):
            pools.setdefault(id(pool), (runner.mode.name, pool))
    return {
        f"KV {mode} {name}": each
        for mode, pool in pools.values()
        for name, each in pool.tensors().items()
    }
