"""State of every request on the device, by request row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graphkit.engine.step.processors import LogitsProcessors, kind_of, least_length
from graphkit.engine.step.sampling_params import MAX_STOP_IDS, SamplingParams
from graphkit.errors import InputError, short_repr
from graphkit.graphs.devices import to_device
from graphkit.ops.step_state import begin_step, finish_step

_INT = {int}
"""Types of the elements of the usual list, which needs no numpy."""


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt on its way into the KV pool.

    Attributes:
        row: The request row.
        sampling: Parameters of the request.
        max_new_tokens: Most tokens to generate, the context limit included.
        token_ids: The prompt, or prompt and output of a request that runs again.
        bitmask: Tokens that may be the first new one, [1, ceil(V / 32)] int32 on the CPU; ``None``
            allows all.
        num_outputs: How many of the last ``token_ids`` are output.
        done: Tokens that have been prefilled.
    """

    row: int
    sampling: SamplingParams
    max_new_tokens: int
    token_ids: Sequence[int]
    bitmask: torch.Tensor | None = None
    num_outputs: int = 0
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that have not been prefilled."""
        return len(self.token_ids) - self.done

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt without output."""
        return len(self.token_ids) - self.num_outputs

    @property
    def is_at_output(self) -> bool:
        """Whether the next tokens are output, which steps have computed before."""
        return self.done >= self.prompt_length

    @property
    def left_alike(self) -> int:
        """Tokens of the prompt that have not been prefilled, or then those of the output."""
        return self.left if self.is_at_output else self.prompt_length - self.done

    def tokens(self, count: int) -> list[int]:
        """Return the next tokens and the one behind them, which is 0 behind the prompt."""
        tokens = list(self.token_ids[self.done : self.done + count + 1])
        return tokens if len(tokens) > count else [*tokens, 0]


class RequestState:
    """What a step reads and writes of each request, on the device.

    Row 0 belongs to pads. It never changes: one committed token and no tokens remaining, so that a
    pad reads KV slot 0 and ends at once. Tensors keep their addresses, so captured graphs may hold
    them. A row is assigned before its first step and released after its last one.

    Args:
        rows: Request rows, row 0 excluded.
        device: Device of the tensors.
        vocab_size: Tokens of the target's vocabulary.

    Attributes:
        last_row: Largest row.
        seq_lens: [rows + 1] int32, committed tokens: those with a KV slot.
        bonus_tokens: [rows + 1] int64, newest token, which has no KV slot yet.
        remaining: [rows + 1] int32, tokens that the request may still generate; 0 once it has
            ended. A row without remaining tokens runs as a pad.
        stop_ids: [rows + 1, 16] int64, stop tokens, padded with -1.
        temperatures: [rows + 1] float32; 0 is greedy.
        top_ks: [rows + 1] int32; 0 or -1 keeps every token.
        top_ps: [rows + 1] float32; 1 keeps every token.
        min_ps: [rows + 1] float32; 0 keeps every token.
        seeds: [rows + 1] int64, keys of the random numbers.
        behind: [rows + 1] int32, tokens that the drafter has yet to process; ``None`` if it
            processes the tokens of every step. See ``PendingCatchUp``.
        acceptance: [rows + 1, positions, 2] float32, running counts of the drafts of each request;
            ``None`` with one draft length, and for trees. See ``ops.draft_length``.
        processors: Biases, least lengths and penalties.
    """

    def __init__(self, rows: int, device: torch.device, vocab_size: int = 1) -> None:
        self.last_row, size = rows, rows + 1
        self.seq_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.bonus_tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.remaining = torch.zeros(size, dtype=torch.int32, device=device)
        self.stop_ids = torch.full((size, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(size, dtype=torch.float32, device=device)
        self.top_ks = torch.zeros(size, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(size, dtype=torch.float32, device=device)
        self.min_ps = torch.zeros(size, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.behind: torch.Tensor | None = None
        self.acceptance: torch.Tensor | None = None
        self.processors = LogitsProcessors(rows, vocab_size, device)
        self._device = device
        self._sampled: set[int] = set()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        members = {**vars(self), **vars(self.processors)}.items()
        return {name: value for name, value in members if isinstance(value, torch.Tensor)}

    def count_behind(self) -> None:
        """Create ``behind``. Called before the first request."""
        self.behind = torch.zeros_like(self.remaining)

    def count_acceptance(self, positions: int) -> None:
        """Create ``acceptance``. Called before the first request."""
        size = len(self.remaining), positions, 2
        self.acceptance = torch.zeros(size, device=self._device)

    def valid_rows(
        self,
        req_pool_indices: Sequence[int],
        until: Collection[int] = (),
        *,
        may_be_empty: bool = False,
    ) -> list[int]:
        """Return request rows as a list.

        Args:
            req_pool_indices: Distinct rows, the row of pads excluded.
            until: Some of the rows.
            may_be_empty: Whether there may be no rows.

        Raises:
            InputError: A value is not a row or occurs twice, or ``until`` has another one.
        """
        field, rows = "req_pool_indices", req_pool_indices
        if type(rows) is not list or {*map(type, rows)} != _INT:
            rows = _listed(req_pool_indices)
        if not rows:
            if may_be_empty:
                return rows
            raise _error(field, req_pool_indices, "a sequence of ints, at least one")
        distinct = {*rows}
        if len(distinct) < len(rows) or min(distinct) < 1 or max(distinct) > self.last_row:
            expected = f"distinct rows from 1 to {self.last_row}: row 0 belongs to pads"
            raise _error(field, req_pool_indices, expected)
        try:
            is_subset = distinct.issuperset(until)
        except TypeError:
            is_subset = False
        if not is_subset:
            raise _error("until", until, f"rows of the batch: {sorted(distinct)}")
        return rows

    def is_greedy(self, rows: Iterable[int]) -> bool:
        """Return whether the requests of all rows have temperature 0; known to the host."""
        return self._sampled.isdisjoint(rows)

    def release(self, rows: torch.Tensor) -> None:
        """Make rows, int64 [B], pads from the next step on; enqueues only."""
        self.remaining.index_fill_(0, rows, 0)

    def running(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, committed tokens and newest tokens, with row 0 for ended requests.

        See ``ops.step_state``.
        """
        return begin_step(rows, self.remaining, self.seq_lens, self.bonus_tokens)

    def advance(
        self,
        rows: torch.Tensor,
        predict: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        longest_path: int,
        accept_index: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        log_sums: torch.Tensor | None = None,
        num_drafts: torch.Tensor | None = None,
        most_drafts: int = -1,
    ) -> torch.Tensor:
        """Commit the accepted tokens of a step and return its report; see ``ops.step_state``.

        The report has log-probabilities if ``log_sums`` are given, with the two arguments before.
        """
        return finish_step(
            rows, predict, num_accepted_tokens, self.stop_ids, self.seq_lens, self.bonus_tokens,
            self.remaining, longest_path, self.processors.kinds, self.processors.token_counts,
            accept_index, logits, log_sums, num_drafts, most_drafts,
        )  # fmt: skip


def assign(state: RequestState, prefills: Sequence[Prefill]) -> None:
    """Set the state of requests whose prompts are complete; enqueues only.

    A request with a temperature has a seed.
    """
    numbers, kinds = [], [kind_of(prefill.sampling) for prefill in prefills]
    for prefill, kind in zip(prefills, kinds, strict=True):
        sampling, is_sampled = prefill.sampling, bool(prefill.sampling.temperature)
        assert sampling.seed is not None or not is_sampled, "a sampled request has a seed"
        (state._sampled.add if is_sampled else state._sampled.discard)(prefill.row)
        stops = sorted(sampling.stop_token_ids)
        stops += [-1] * (MAX_STOP_IDS - len(stops))
        # One copy holds all numbers: the bits of float32 as int32, and these in int64.
        floats = [
            sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
            sampling.presence_penalty, sampling.frequency_penalty,
        ]  # fmt: skip
        bits = np.array(floats, np.float32).view(np.int32).tolist()
        ints = [
            prefill.row, len(prefill.token_ids) - 1, prefill.max_new_tokens, sampling.top_k,
            sampling.seed or 0, kind, least_length(sampling, prefill.prompt_length),
        ]  # fmt: skip
        numbers += [*ints, *bits, *stops]
    values = to_device(numbers, state._device).view(len(prefills), -1)
    int_columns, bit_columns, stop_ids = values.split((7, 6, MAX_STOP_IDS), dim=1)
    index, seq_lens, remaining, top_ks, seeds, kind_words, least_lens = int_columns.unbind(1)
    floats_of = bit_columns.int().view(torch.float32)
    temperatures, top_ps, min_ps = floats_of[:, :3].unbind(1)
    state.seq_lens[index] = seq_lens.int()
    state.remaining[index] = remaining.int()
    state.top_ks[index] = top_ks.int()
    state.seeds[index] = seeds
    state.temperatures[index] = temperatures
    state.top_ps[index] = top_ps
    state.min_ps[index] = min_ps
    state.stop_ids[index] = stop_ids
    if state.behind is not None:
        state.behind[index] = 0
    if state.acceptance is not None:
        state.acceptance[index] = 0
    processors = state.processors
    processors.kinds[index] = kind_words.int()
    if any(kinds):
        processors.penalties[index] = floats_of[:, 3:]
        processors.least_lens[index] = least_lens.int()
    for prefill in prefills:
        ids, length = prefill.token_ids, prefill.prompt_length
        processors.assign(prefill.row, prefill.sampling, ids[:length], ids[length:])


def _listed(req_pool_indices: Sequence[int]) -> list[int]:
    """Return the ints of a sequence of any type, such as an array."""
    try:
        rows = np.asarray(req_pool_indices)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise _error("req_pool_indices", req_pool_indices, "a sequence of ints") from error
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise _error("req_pool_indices", req_pool_indices, "a sequence of ints")
    listed: list[int] = rows.tolist()
    return listed


def _error(field: str, value: object, expected: str) -> InputError:
    return InputError(f"{field} is {short_repr(value)}, expected {expected}.", field=field)
