"""Valid random batches of a runner, for a first replay, audits and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from graphkit.buffers import FieldLayout
from graphkit.config import BufferSizes, is_int
from graphkit.errors import ConfigError, InputError, short_repr
from graphkit.runners.mode_declaration import ModeDeclaration, Numbers, SampleRows
from graphkit.runners.settings import value_limits

TOKEN_IDS = ("input_ids", "topk_index")
_POSITIONS = ("positions", "mrope_positions")
_LONGEST = 4096
"""Tokens of the longest request. Longer ones would only enlarge the table of slots."""

Content = Callable[[FieldLayout, tuple[int, ...]], Any]
"""Returns the values of a field that does not say where rows are, from its layout and shape."""


def sample_batch(runner: ModeDeclaration, batch_size: int, seed: int) -> Any:
    """Return a random batch; see ``Runner.sample_batch``."""
    _check_range("batch_size", batch_size, 1, runner.sizes.max_batch_size)
    _check_range("seed", seed, 0, 2**63 - 1)
    random = np.random.default_rng([seed, batch_size])
    slots, longest = _own_slots(runner, batch_size)
    width = runner.tokens_per_request - runner.num_front_tokens
    rows = SampleRows(
        rows=1 + random.permutation(batch_size),
        committed=random.integers(1, longest + 1, batch_size),
        accepted=random.integers(1, most_accepted(runner) + 1, batch_size),
        slots=slots,
        parents=random.integers(0, np.maximum(np.arange(width), 1), (batch_size, width)),
        num_front_tokens=runner.num_front_tokens,
        width=width,
    )

    def content(layout: FieldLayout, shape: tuple[int, ...]) -> Any:
        if layout.dtype.is_floating_point:
            if layout.field.by_address:  # hidden states
                return random.standard_normal(shape)
            return 1 - random.random(shape)  # probabilities and temperatures are above 0
        largest = largest_number(layout, runner.sizes, runner.steps_ahead())
        if largest is None:
            return np.full(shape, layout.pad)
        return random.integers(0, largest + 1, shape)

    return filled_batch(runner, rows, content)


def filled_batch(runner: ModeDeclaration, rows: SampleRows, content: Content) -> Any:
    """Return a batch of the runner's inputs.

    Fields are numpy arrays, or tensors on the runner's device where numpy lacks the dtype or the
    graph reads the field through its address. Bound fields are left out.

    Args:
        runner: Says which fields a batch has, and where the rows of requests are.
        rows: The requests. Their trees count only in batches with ``custom_mask``.
        content: Fills all other fields.
    """
    buffers = runner.buffers
    if all(layout.name != "custom_mask" for layout in buffers.layouts):
        rows = replace(rows, parents=None)
    places = runner.sample_fields(runner.spec, rows)
    values: dict[str, Any] = {}
    for layout in buffers.layouts:
        if layout.name in buffers.bound_fields:
            continue
        count = buffers.capacity.rows(layout.field.axis, len(rows.rows), len(places["positions"]))
        shape = layout.shape(count)
        value = places.get(layout.name)
        if value is None or value.shape != shape:  # a field of the caller's own may have the name
            value = content(layout, shape)
        tensor = torch.from_numpy(np.ascontiguousarray(value)).to(layout.dtype)
        is_tensor = layout.field.by_address or layout.dtype is torch.bfloat16
        values[layout.name] = tensor.to(buffers.device) if is_tensor else tensor.numpy()
    return buffers.inputs(**values)


def own_slots(rows: int, context: int, page_size: int) -> Numbers:
    """Return a table of KV slots, [rows + 1, context]: whole pages for each row; row 0 is 0."""
    pages = -(-context // page_size)
    first = page_size * (1 + pages * np.arange(-1, rows))
    table = first[:, None] + np.arange(context)
    table[0] = 0
    return table


def most_accepted(runner: ModeDeclaration) -> int:
    """Return the most tokens that a request of a batch may have accepted, bonus token included."""
    width = runner.tokens_per_request - runner.num_front_tokens
    return min(runner.spec.num_steps + 1, width)


def longest_request(runner: ModeDeclaration, context: int) -> int:
    """Return the most committed tokens of a request, if it has room for ``context`` tokens."""
    ahead = runner.slots_written(runner.spec) + runner.num_front_tokens
    if context <= ahead:
        raise ConfigError(
            f"requests of up to {context} tokens have no room for the {ahead} that a "
            f"{runner.mode.name} step writes. Increase max_context_len, or the KV pool.",
            field="max_context_len",
        )
    return context - ahead


def largest_number(layout: FieldLayout, sizes: BufferSizes, steps_ahead: int = 0) -> int | None:
    """Return the largest integer that a field of the library may hold; ``None`` if unknown."""
    if layout.name in TOKEN_IDS:  # the reduced vocabulary of drafts is part of the target's
        return (sizes.draft_vocab_size or sizes.vocab_size) - 1
    return sizes.max_context_len - 1 - steps_ahead if layout.name in _POSITIONS else None


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not is_int(value) or not least <= value <= most:
        raise InputError(
            f"{name} must be an int from {least} to {most}, got {short_repr(value)}.", field=name
        )


def _own_slots(runner: ModeDeclaration, requests: int) -> tuple[Numbers, int]:
    """Return KV slots for requests that fit the KV pool, and the most committed tokens of one."""
    sizes, limits = runner.sizes, value_limits(runner.sizes, runner.attention)
    context = min(sizes.max_context_len, _LONGEST)
    if limits.kv_slots is not None:
        pages = limits.kv_slots // sizes.page_size - 1  # slot 0 takes a page
        context = min(context, pages // requests * sizes.page_size)
    longest = longest_request(runner, context)
    return own_slots(requests, context, sizes.page_size), longest
