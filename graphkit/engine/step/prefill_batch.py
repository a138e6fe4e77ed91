"""Chunks of prompts that the target has prefilled, as drafters receive them.

Shape letters: B requests, C tokens of a chunk, T tokens of all chunks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from graphkit.buffers import AcceptedCounts, TargetVerifyInputs
from graphkit.engine.step.context import EngineContext
from graphkit.graphs.devices import to_device
from graphkit.ops.packed import read


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

    @classmethod
    def packed(
        cls,
        context: EngineContext,
        rows: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> PrefillBatch:
        """Return chunks as one batch, without hidden states and ``are_last``.

        Args:
            context: The engine's.
            rows: Request row of each chunk.
            starts: Position of its first token.
            tokens: Its tokens and the one behind them.
        """
        lengths = [len(chunk) - 1 for chunk in tokens]
        total, count = sum(lengths), len(rows)
        spans = zip(starts, lengths, strict=True)
        parts = [
            [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)],
            [position for start, length in spans for position in range(start, start + length)],
            [token for chunk in tokens for token in chunk[:-1]],
            [token for chunk in tokens for token in chunk[1:]],
            rows,
            lengths,
        ]
        numbers = to_device([*chain(*parts)], context.device)  # in one copy
        row_indices, positions, input_ids, next_ids = numbers[: 4 * total].view(4, -1)
        row, length = numbers[4 * total :].view(2, count)
        return cls(
            req_pool_indices=row,
            starts=starts,
            lengths=lengths,
            are_last=[],
            device_lengths=length.int(),
            row_indices=row_indices,
            positions=positions,
            input_ids=input_ids,
            next_ids=next_ids,
            out_cache_loc=context.req_to_token[row_indices, positions].long(),
            hidden_states=None,
        )

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
            logit_rows=self.last_rows,
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

    def with_front(
        self,
        context: EngineContext,
        tokens: torch.Tensor,
        states: torch.Tensor | None = None,
        *,
        moved: int = 0,
    ) -> PrefillBatch:
        """Return the chunks with rows before those of each request.

        A row of the result takes the token of ``next_ids``. There are no ``input_ids``.

        Args:
            context: The engine's.
            tokens: ``next_ids`` of the rows before, [B, F] int64.
            states: Their hidden states, [B, F, H]; ``None`` for a model that reads none.
            moved: Positions by which all rows move.
        """
        device, (requests, front) = tokens.device, tokens.shape
        lengths = self.device_lengths + front
        total = len(self.next_ids) + requests * front
        request = torch.arange(requests, device=device)
        request = request.repeat_interleave(lengths, output_size=total)
        ends, row = lengths.cumsum(0)[request], torch.arange(total, device=device)
        column = row - ends + lengths[request]
        is_before = column < front
        source = torch.where(
            is_before, request * front + column, front * (requests - 1 - request) + row
        )
        positions = self.positions[self.last_rows][request] + 1 + moved + row - ends
        row_indices = self.req_pool_indices[request]
        table = context.req_to_token
        hidden_states = self.hidden_states
        if states is not None and hidden_states is not None:
            hidden_states = torch.cat([states.flatten(0, 1), hidden_states])[source]
        next_ids = torch.cat([tokens.flatten(), self.next_ids])[source]
        return replace(
            self,
            lengths=[length + front for length in self.lengths],
            device_lengths=lengths,
            row_indices=row_indices,
            # Pads of a warm-up may fill the context, and have no room for another token.
            positions=positions.clamp(0, context.sizes.max_context_len - 1),
            input_ids=next_ids,
            next_ids=next_ids,
            out_cache_loc=read(table, (row_indices, positions), torch.zeros_like(positions)),
            hidden_states=hidden_states,
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
