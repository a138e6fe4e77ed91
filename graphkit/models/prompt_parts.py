"""Parts of prompts that recurrent layers compute in one call.

Suffixes: B requests, G of them, N nodes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch

from graphkit.engine.kv.recurrent_rows import States
from graphkit.graphs.devices import to_device

Run = Callable[[States, torch.Tensor], tuple[States, torch.Tensor]]
"""Runs a mixer from the states before nodes over their rows, [G, N, H]: states after, outputs."""
ChunkSupport = Literal["all", "first", "none"]
"""Chunks that a mixer computes in one call: all, those that begin prompts, or none."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPart:
    """Nodes of prompts that a mixer may compute in one call.

    Attributes:
        rows: The rows of the nodes in the batch, int64 [G, N].
        requests: The requests in the batch that have them, int64 [G]; ``None`` for all.
        is_first: Whether the nodes begin the prompts, so that the states before are zeros.
        column: Column of ``StateSlots.after`` for the states after the nodes; ``None`` for none.
    """

    rows: torch.Tensor
    requests: torch.Tensor | None
    is_first: bool
    column: int | None


def prompt_parts(
    lengths: Sequence[int], starts: Sequence[int | None], width: int, device: torch.device
) -> list[PromptPart]:
    """Return the parts of a batch of chains, in the order in which they run.

    Each of the last W nodes of the chains is a part of its own, after which the states are kept.
    Chains with the same number of nodes before these share one part for them. The number of parts
    thus grows with the number of different lengths, and not with the lengths.

    Args:
        lengths: Rows of each request.
        starts: Position of the first row of each; ``None`` if unknown.
        width: Nodes of a request whose states are kept (W).
        device: Device of the rows.

    Returns:
        No parts if no request has two nodes before the last W.
    """
    heads: dict[tuple[int, bool], list[int]] = {}
    for place, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        if length > width:
            heads.setdefault((length - width, start == 0), []).append(place)
    if max((count for count, _ in heads), default=0) < 2:
        return []
    ends = list(accumulate(lengths))

    def rows_of(
        places: Sequence[int], begins: Sequence[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``count`` rows of some requests from ``begins`` on, and the requests."""
        requests, first = to_device([*places, *begins], device).view(2, -1)
        rows = first[:, None] + torch.arange(count, device=device)
        return rows, None if len(places) == len(lengths) else requests

    parts = []
    for (count, is_first), places in heads.items():
        begins = [ends[place] - lengths[place] for place in places]
        parts.append(PromptPart(*rows_of(places, begins, count), is_first, column=None))
    for left in range(min(width, max(lengths)), 0, -1):
        places = [place for place, length in enumerate(lengths) if length >= left]
        begins = [ends[place] - left for place in places]
        parts.append(PromptPart(*rows_of(places, begins, 1), is_first=False, column=-left))
    return parts


LEAST_CHUNK = 4
"""Least nodes for which ``chunk_support`` is called: it compares halves of two nodes or more."""
_CHUNK_DIFFERENCE = 0.05
"""Largest root mean square difference between a chunk and its single nodes, relative to these.

Both add in different orders, in several steps. What computes something else differs by as much as
its values.
"""


def chunk_support(run: Run, states: States, rows: torch.Tensor) -> ChunkSupport:
    """Return which chunks a mixer computes as it computes their nodes one by one.

    Args:
        run: Runs the mixer.
        states: States of the requests; only their shapes and dtypes are read.
        rows: Nodes of the requests, [G, N, H], at least ``LEAST_CHUNK`` of each.
    """
    half, nodes = rows.shape[1] // 2, rows.shape[1]
    initial = {name: torch.zeros_like(state) for name, state in states.items()}
    if not _same_in_chunks(run, initial, rows, [0, nodes]):
        return "none"
    reads = _reads_states(run, run(copied(initial), rows[:, :half])[0], rows[:, half:])
    is_same = reads and _same_in_chunks(run, initial, rows, [0, half, nodes])
    return "all" if is_same else "first"


def _reads_states(run: Run, states: States, rows: torch.Tensor) -> bool:
    """Return whether each state before a chunk changes the results of the chunk.

    A state may change them by less than ``_CHUNK_DIFFERENCE``, so that bits are compared.
    """

    def results(before: States) -> list[torch.Tensor]:
        after, out = run(copied(before), rows)
        return [out, *after.values()]

    whole = results(states)
    others = (results({**states, name: torch.zeros_like(states[name])}) for name in states)
    return not any(all(map(torch.equal, whole, other)) for other in others)


def _same_in_chunks(run: Run, states: States, rows: torch.Tensor, bounds: Sequence[int]) -> bool:
    """Return whether a mixer computes the chunks between bounds as it computes their nodes."""

    def parts(bounds: Sequence[int]) -> list[torch.Tensor]:
        after = copied(states)
        outputs = []
        for begin, end in pairwise(bounds):
            after, out = run(after, rows[:, begin:end])
            outputs.append(out)
        return [torch.cat(outputs, 1), *(after[name] for name in states)]

    try:
        chunks = parts(bounds)
    except (RuntimeError, ValueError, TypeError):  # a kernel for single tokens alone
        return False
    singles = parts(range(rows.shape[1] + 1))
    return all(
        one.shape == other.shape
        and bool((one - other).float().norm() <= _CHUNK_DIFFERENCE * other.float().norm())
        for one, other in zip(chunks, singles, strict=True)
    )


def copied(states: States) -> States:
    """Return copies of states, which a mixer may write."""
    return {name: state.clone() for name, state in states.items()}
