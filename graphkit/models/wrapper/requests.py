"""Requests of the comparison: prompts that leave the windows of the model, trees, and KV slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphkit.config import is_int
from graphkit.errors import ConfigError, TargetError, short_repr
from graphkit.models.wrapper.text_batches import TreeRequest
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.mode_declaration import Numbers
from graphkit.runners.targets import CaptureTarget

_USUAL_PROMPT = 64
BEYOND_WINDOW = 8
"""Rows of a prompt behind the last window that they leave."""
_WINDOWS = (
    "sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "index_topk",
)  # fmt: skip
"""Settings of a model's config: numbers of tokens that a row of a layer sees at most."""


def window_settings(*owners: object) -> dict[str, int]:
    """Return the windows and chunks in the configs of models of transformers, by name.

    Args:
        owners: A ``config`` among their attributes is read.
    """
    windows: dict[str, int] = {}
    for owner in owners:
        config: Any = getattr(owner, "config", None)
        text_config = getattr(config, "get_text_config", None)
        config = text_config() if callable(text_config) else config
        for name in _WINDOWS:
            size = getattr(config, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                windows[name] = size
    return windows


def tree_requests(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    windows: Mapping[str, int],
    prompt_length: int | None,
) -> Sequence[TreeRequest]:
    """Return two requests of different length, or one if the target's batches hold no more.

    Args:
        target: Has the rows and the KV slots.
        runner: Runner of the mode whose trees are made. Without ``custom_mask`` they are chains.
        windows: Numbers of tokens that the longer prompt should exceed.
        prompt_length: Its length; ``None`` exceeds the windows that are smaller than the context.

    Raises:
        ConfigError: ``prompt_length`` does not fit the context.
        TargetError: The KV slots of the target are unknown, too few, or used twice.
    """
    width = runner.tokens_per_request
    rows = _rows(target, runner)
    table = _slots(target, runner, rows)
    room = min(target.sizes.max_context_len, *map(_num_slots, table)) - width
    if room < 1:
        raise TargetError(
            f"target {target.name!r}: rows {rows} of its request pool have KV slots for "
            f"{room + width} tokens, and a comparison with the model needs {width + 1} or more. "
            "Fill req_to_token before, or pass kv_slots=."
        )
    reached = max((size for size in windows.values() if size < room), default=0)
    needed = max(_USUAL_PROMPT, reached + BEYOND_WINDOW)
    length = min(needed, room) if prompt_length is None else prompt_length
    if not is_int(length) or not 1 <= length <= room:
        raise ConfigError(
            f"prompt_length must be from 1 to {room}, the context without {width} drafts, got "
            f"{short_repr(prompt_length)}.",
            field="prompt_length",
        )
    has_mask = any(layout.name == "custom_mask" for layout in runner.buffers.layouts)
    parents = np.maximum(np.arange(width) - (2 if has_mask else 1), 0)
    random = np.random.default_rng(SEED)
    requests = []
    for row, slots, size in zip(rows, table, (length, max(length // 3, 1)), strict=False):
        ids = random.integers(0, target.sizes.vocab_size, size + width)
        used = slots[: size + width]
        requests.append(TreeRequest(row, ids[:size], ids[size:], parents, used))
    _check_unique(target, requests)
    return requests


def _rows(target: CaptureTarget, runner: Runner[Any, Any]) -> list[int]:
    """Return the rows of a sample batch of two requests, or of one."""
    count = min(2, target.sizes.max_batch_size)
    batch = target.batch(runner.mode, count, SEED)
    return [int(row) for row in batch.req_pool_indices]


def _slots(target: CaptureTarget, runner: Runner[Any, Any], rows: Sequence[int]) -> list[Numbers]:
    """Return the KV slots of each position of some rows."""
    table = target.kv_slots
    if table is None:
        pool = getattr(runner.attention, "req_to_token_pool", None)
        table = getattr(pool, "req_to_token", None)
    if table is None:
        raise TargetError(
            f"target {target.name!r}: the KV slots of its requests are unknown, so no text runs. "
            "Its attention has no req_to_token_pool. Pass kv_slots=, the slot of each "
            "position of each request row."
        )
    if max(rows) >= len(table):
        raise TargetError(
            f"target {target.name!r}: kv_slots has {len(table)} rows, but sample_batch uses row "
            f"{max(rows)} of the request pool. Pass a row for each of them, row 0 included."
        )
    return [table[row].cpu().numpy().astype(np.int64) for row in rows]


def _num_slots(slots: Numbers) -> int:
    """Return the number of positions before the first one without a slot."""
    missing = np.flatnonzero(slots <= 0)
    return int(missing[0]) if len(missing) else len(slots)


def _check_unique(target: CaptureTarget, requests: Sequence[TreeRequest]) -> None:
    slots = np.concatenate([request.slots for request in requests])
    values, counts = np.unique(slots, return_counts=True)
    if (counts > 1).any():
        raise TargetError(
            f"target {target.name!r}: KV slot {values[counts > 1][0]} belongs to several positions "
            f"of rows {[request.row for request in requests]}. Give each position of each request "
            "a slot of its own."
        )
