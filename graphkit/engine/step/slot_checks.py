"""Checks that each request has KV slots for all its tokens, and shares them with no other.

Suffixes: B requests, C positions of each.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphkit.engine.step.request_state import RequestState
from graphkit.errors import InputError
from graphkit.graphs.devices import to_device

_TAG = 1 << 31
"""Factor of the columns in words that also have the number of an admission."""
_NUMBERS = 3
"""Numbers of a finding: entry of the table plus 1, its slot, and the entry that uses the slot."""


class SlotChecks:
    """Finds wrong slots of ``req_to_token`` on the device, and reports them on the host.

    A slot is wrong if it is outside the KV pool, if it is reserved for pads, or if another entry of
    the table uses it. An entry uses its slot while its request runs and may reach its position.
    A map from each slot to the entry that was last checked with it finds the other entry, so that
    the time of a check is proportional to the positions that it checks.

    A row may get further slots while its request runs. It is complete once it has a slot for each
    position that the request can reach; until then, each launch checks the slots that it needs.

    Args:
        state: State of the requests.
        req_to_token: KV slot of each token, int32 [rows, context].
        slots_ahead: KV slots that one step writes behind the committed tokens of a request.
        first_slot: First slot that is not reserved for pads.
        end_slot: Slots of the KV pool, the reserved ones included.
        max_path: Most tokens that one step accepts.
    """

    def __init__(
        self,
        state: RequestState,
        req_to_token: torch.Tensor,
        slots_ahead: int,
        first_slot: int,
        end_slot: int,
        max_path: int,
    ) -> None:
        self._state, self._table, self._slots_ahead = state, req_to_token, slots_ahead
        self._max_path = max_path
        self._first_slot, self._end_slot = first_slot, end_slot
        device = req_to_token.device
        self._entries = torch.zeros(end_slot, dtype=torch.int64, device=device)
        """Entry of the flat table that each slot was last checked with; 0 for none."""
        self._finding = torch.zeros(_NUMBERS, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.zeros(_NUMBERS, dtype=torch.int64, pin_memory=is_cuda)
        self._numbers = self._on_host.numpy()
        self._ends = torch.zeros(len(req_to_token), dtype=torch.int64, pin_memory=is_cuda)
        """Columns with a slot of each row when it was admitted, times ``_TAG``, and the number of
        the admission: copies from the device arrive late."""
        self._end_words = self._ends.numpy()
        self._admissions = 0
        self._growing: dict[int, int] = {}
        """Value in ``_ends`` of each admitted row once it is complete."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the checks work with, by name."""
        return {
            "slot checks, entries": self._entries, "slot checks, ends": self._ends,
            "slot checks": self._finding, "slot checks, host": self._on_host,
        }  # fmt: skip

    def enqueue_row(self, row: int, most: int, least: int) -> None:
        """Check the slots of a new request. Enqueues only.

        On the CPU the next ``report`` raises; on a device a later one may.

        Args:
            row: The request row.
            most: Columns that the request can reach.
            least: Columns that must have a slot. An empty one behind them ends those that are
                checked.
        """
        device = self._table.device
        self._admissions = (self._admissions + 1) % _TAG
        self._growing[row] = most * _TAG + self._admissions
        rows = torch.full((1,), row, dtype=torch.int64, device=device)
        least_B = torch.full_like(rows, least)
        end_B = self._enqueue(rows, torch.zeros_like(rows), most, least_B)
        word = end_B * _TAG + self._admissions
        self._ends[row : row + 1].copy_(word, non_blocking=True)

    def release(self, rows: Iterable[int]) -> None:
        """Forget rows, whose requests have ended."""
        for row in rows:
            self._growing.pop(row, None)

    def growing(self, rows: Iterable[int]) -> list[int]:
        """Return the rows that may lack slots for their longest text. Does not wait."""
        if not self._growing:
            return []
        for row, word in list(self._growing.items()):
            if self._end_words[row] == word:
                del self._growing[row]
        return [row for row in rows if row in self._growing]

    def enqueue_launch(self, rows: Sequence[int], max_steps: int) -> None:
        """Check the slots that the next steps of the requests of some rows need. Enqueues only."""
        rows_B, seq_lens_B, _ = self._state.running(to_device(list(rows), self._table.device))
        left_B = (self._state.remaining[rows_B].long() - 1).clamp(min=0)
        steps = (max_steps - 1) * self._max_path
        count = min(steps, self._table.shape[1]) + self._slots_ahead
        needed_B = left_B.clamp(max=steps) + self._slots_ahead
        self._enqueue(rows_B, seq_lens_B, count, needed_B)

    def enqueue_step(self, req_pool_indices: torch.Tensor) -> None:
        """Check the slots that the next step of the requests, int64 [B], may write.

        Enqueues only; may be captured. Requests that have ended are skipped.
        """
        rows, seq_lens, _ = self._state.running(req_pool_indices)
        self._enqueue(rows, seq_lens, self._slots_ahead)

    def report(self) -> None:
        """Raise for a wrong slot that a check has found, and forget it. Reads host memory only.

        Raises:
            InputError: A slot is wrong; ``field`` is ``req_to_token``.
        """
        if not self._numbers[0]:
            return
        entry, slot, other = self._numbers.tolist()
        self._finding.zero_()
        self._on_host.copy_(self._finding)
        raise InputError(self._text(entry - 1, slot, other), field="req_to_token")

    def _enqueue(
        self,
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        count: int,
        least_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Check ``count`` positions of each row from its start on; row 0 belongs to pads.

        Args:
            rows_B: The rows.
            starts_B: First position of each.
            count: Positions of each.
            least_B: Positions that must have a slot. The first empty one behind them ends the row;
                ``None`` checks all.

        Returns:
            Positions of each row before its end, [B] int64.
        """
        context = self._table.shape[1]
        place_C = torch.arange(count, device=rows_B.device)
        position_BC = starts_B[:, None] + place_C
        is_inside_BC = position_BC < context
        entry_BC = rows_B[:, None] * context + position_BC.clamp(max=context - 1)
        slot_BC = self._table.view(-1)[entry_BC].long() * is_inside_BC
        is_live_BC = (rows_B > 0)[:, None].expand_as(entry_BC)
        if least_B is not None:
            is_end_BC = (slot_BC == 0) & (place_C >= least_B[:, None])
            is_live_BC = is_live_BC & (is_end_BC.cumsum(1) == 0)
        is_slot_BC = (slot_BC >= self._first_slot) & (slot_BC < self._end_slot)
        # Slots that are not checked become slot 0, whose entry stays 0.
        known_BC = torch.where(is_slot_BC & is_live_BC, slot_BC, 0)
        before_BC = self._entries[known_BC]
        is_taken_BC = (before_BC != entry_BC) & self._is_used(before_BC, known_BC)
        kept_BC = torch.where(is_taken_BC | (known_BC == 0), before_BC, entry_BC)
        self._entries.scatter_(0, known_BC.flatten(), kept_BC.flatten())
        after_BC = self._entries[known_BC]
        is_shared_BC = (known_BC > 0) & (after_BC != entry_BC)
        self._note(
            (is_live_BC & ~is_slot_BC) | is_shared_BC,
            torch.stack([entry_BC + 1, slot_BC, after_BC * is_shared_BC]),
        )
        return is_live_BC.sum(1)

    def _is_used(self, entry_BC: torch.Tensor, slot_BC: torch.Tensor) -> torch.Tensor:
        """Return whether entries contain slots that their requests may still read or write."""
        context, state = self._table.shape[1], self._state
        row_BC, position_BC = entry_BC // context, entry_BC % context
        remaining_BC = state.remaining[row_BC]
        end_BC = state.seq_lens[row_BC] + remaining_BC + self._slots_ahead
        holds_BC = self._table.view(-1)[entry_BC] == slot_BC
        return holds_BC & (remaining_BC > 0) & (position_BC < end_BC)

    def _note(self, is_wrong_BC: torch.Tensor, numbers: torch.Tensor) -> None:
        """Keep the first finding until ``report``."""
        first = is_wrong_BC.flatten().int().argmax()
        finding = numbers.flatten(1).index_select(1, first.view(1))[:, 0]
        is_new = is_wrong_BC.any() & (self._finding[0] == 0)
        self._finding.copy_(torch.where(is_new, finding, self._finding))
        self._on_host.copy_(self._finding, non_blocking=True)

    def _text(self, entry: int, slot: int, other: int) -> str:
        row, position = divmod(entry, self._table.shape[1])
        name, last = f"req_to_token[{row}, {position}]", self._end_slot - 1
        if other:
            one, where = divmod(other, self._table.shape[1])
            return (
                f"{name} is slot {slot}, which is also req_to_token[{one}, {where}] of a running "
                "request: one would overwrite the other's KV. Allocate each slot to one request, "
                "and reuse it only after the request has ended or was released. Set the columns "
                "behind the slots of a row to 0."
            )
        end = ": the row ends too early" if slot < self._first_slot else ""
        return (
            f"{name} is slot {slot}{end}. Expected slots from {self._first_slot} to {last}, for "
            f"the text of the request, max_path = {self._max_path} tokens of each further step of "
            f"a launch, and slots_ahead = {self._slots_ahead} more. Allocate those of the prompt "
            "before admit, and those of a launch before it."
        )
