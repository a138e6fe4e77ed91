"""Chunks of prompts that the target has prefilled, as drafters receive them.

Shape letters: B requests, C tokens of a chunk, T tokens of all chunks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.step.device_copies import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A chunk of one request's prompt that the target has prefilled.

    Attributes:
        req_pool_indices: [1] int64, the request row.
        start: Position of the chunk's first token.
        input_ids: [C] int64, the chunk's tokens.
        next_ids: [C] int64, the token after each of them.
        out_cache_loc: [C] int64, their KV slots.
        hidden_states: [C, H], the target's; ``None`` if its forward returns none.
        is_last: Whether the chunk ends the prompt. ``next_ids`` then ends with the first new token.
    """

    req_pool_indices: torch.Tensor
    start: int
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    hidden_states: torch.Tensor | None
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Chunks of the prompts of several requests that the target has prefilled in one forward.

    Rows are packed: the C rows of a request follow those of the request before it, T in total. Each
    request has one chunk.

    Attributes:
        req_pool_indices: [B] int64, request rows.
        starts: Position of the first token of each chunk, on the host.
        lengths: Tokens of each chunk (C), on the host.
        are_last: Whether each chunk ends its prompt. Its ``next_ids`` then end with the first new
            token.
        device_lengths: [B] int32, ``lengths`` on the device.
        row_indices: [T] int64, request row of each token.
        positions: [T] int64.
        input_ids: [T] int64.
        next_ids: [T] int64, the token after each of them.
        out_cache_loc: [T] int64, their KV slots.
        hidden_states: [T, H], the target's; ``None`` if its forward returns none.
    """

    req_pool_indices: torch.Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    are_last: Sequence[bool]
    device_lengths: torch.Tensor
    row_indices: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor
    next_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    hidden_states: torch.Tensor | None

    @property
    def last_rows(self) -> torch.Tensor:
        """Row of the last token of each chunk, [B] int64."""
        return self.device_lengths.cumsum(0) - 1

    def target_inputs(self) -> TargetVerifyInputs:
        """Return the inputs of the target's forward."""
        return TargetVerifyInputs(
            req_pool_indices=self.req_pool_indices,
            seq_lens=(self.positions[self.last_rows] + 1).int() - self.device_lengths,
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            lengths=self.device_lengths,
            width=max(self.lengths),
            spans=[
                range(start, start + length)
                for start, length in zip(self.starts, self.lengths, strict=True)
            ],
        )

    def extend_fields(self) -> dict[str, Any]:
        """Return the fields of ``DraftExtendInputs``, except token ids and hidden states."""
        return {
            "req_pool_indices": self.req_pool_indices,
            "seq_lens": (self.positions[self.last_rows] + 1).int(),
            "extend_seq_lens": self.device_lengths,
            "positions": self.positions,
            "out_cache_loc": self.out_cache_loc,
            "lengths": self.device_lengths,
            "width": max(self.lengths),
            **AcceptedCounts.from_tokens(self.device_lengths).fields(),
        }

    def with_new_tokens(self, req_to_token: torch.Tensor) -> PrefillBatch:
        """Return the batch with the first new token behind each chunk that ends its prompt.

        The tokens after the rows are not known: ``next_ids`` are those of ``input_ids``, and there
        are no hidden states.

        Args:
            req_to_token: KV slot of each token, int32 [rows, context].
        """
        ends, total = [int(is_last) for is_last in self.are_last], sum(self.lengths)
        order: list[int] = []
        first = 0
        for place, (length, end) in enumerate(zip(self.lengths, ends, strict=True)):
            order += [*range(first, first + length), *[total + place] * end]
            first += length
        numbers = to_device([*order, *ends], self.positions.device)
        index, more, last = numbers[: len(order)], numbers[len(order) :], self.last_rows

        def rows(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.cat([old, new])[index]

        # The warm-up prefills prompts of a whole context, which have no room for another token.
        position = rows(self.positions, self.positions[last] + 1).clamp(
            max=req_to_token.shape[1] - 1
        )
        row_indices = rows(self.row_indices, self.req_pool_indices)
        input_ids = rows(self.input_ids, self.next_ids[last])
        return replace(
            self,
            lengths=[length + end for length, end in zip(self.lengths, ends, strict=True)],
            device_lengths=self.device_lengths + more.int(),
            row_indices=row_indices,
            positions=position,
            input_ids=input_ids,
            next_ids=input_ids,
            out_cache_loc=req_to_token[row_indices, position].long(),
            hidden_states=None,
        )

    def chunks(self) -> Iterator[PrefillChunk]:
        """Yield the chunk of each request, as views."""
        end = 0
        for place, (start, length, is_last) in enumerate(
            zip(self.starts, self.lengths, self.are_last, strict=True)
        ):
            rows, end = slice(end, end + length), end + length
            hidden_states = self.hidden_states
            yield PrefillChunk(
                req_pool_indices=self.req_pool_indices[place : place + 1],
                start=start,
                input_ids=self.input_ids[rows],
                next_ids=self.next_ids[rows],
                out_cache_loc=self.out_cache_loc[rows],
                hidden_states=None if hidden_states is None else hidden_states[rows],
                is_last=is_last,
            )
