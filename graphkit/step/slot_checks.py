"""Checks that each request has KV slots for all its tokens, and shares them with no other.

Suffixes: B requests, C positions of each.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

import torch

from graphkit.errors import InputError
from graphkit.step.request_state import RequestState

_NUMBERS = 3
"""Numbers of a finding: entry of the table plus 1, its slot, and the entry that uses the slot."""


class SlotChecks:
    """Finds wrong slots of ``req_to_token`` on the device, and reports them on the host.

    A slot is wrong if it is outside the KV pool, if it is reserved for pads, or if another entry of
    the table uses it. An entry uses its slot while its request runs and may reach its position.
    A map from each slot to the entry that was last checked with it finds the other entry, so that
    the time of a check is proportional to the positions that it checks.

    Args:
        state: State of the requests.
        req_to_token: KV slot of each token, int32 [rows, context].
        slots_ahead: KV slots that one step writes behind the committed tokens of a request.
        first_slot: First slot that is not reserved for pads.
        end_slot: Slots of the KV pool, the reserved ones included.
    """

    def __init__(
        self,
        state: RequestState,
        req_to_token: torch.Tensor,
        slots_ahead: int,
        first_slot: int,
        end_slot: int,
    ) -> None:
        self._state, self._table, self._slots_ahead = state, req_to_token, slots_ahead
        self._first_slot, self._end_slot = first_slot, end_slot
        device = req_to_token.device
        self._entries = torch.zeros(end_slot, dtype=torch.int64, device=device)
        """Entry of the flat table that each slot was last checked with; 0 for none."""
        self._found = torch.zeros(_NUMBERS, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._on_host = torch.zeros(_NUMBERS, dtype=torch.int64, pin_memory=is_cuda)
        self._numbers = self._on_host.numpy()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the checks work with, by name."""
        found = {"slot checks": self._found, "slot checks, host": self._on_host}
        return {"slot checks, entries": self._entries, **found}

    def enqueue_row(self, row: int, length: int) -> None:
        """Check the first ``length`` slots of a row. Enqueues only.

        On the CPU the next ``report`` raises; on a device a later one may.
        """
        rows = torch.full((1,), row, dtype=torch.int64, device=self._table.device)
        self._enqueue(rows, torch.zeros_like(rows), length)

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
        self._found.zero_()
        self._on_host.copy_(self._found)
        raise InputError(self._text(entry - 1, slot, other), field="req_to_token")

    def _enqueue(self, rows_B: torch.Tensor, starts_B: torch.Tensor, count: int) -> None:
        """Check ``count`` positions of each row from its start on; row 0 belongs to pads."""
        context = self._table.shape[1]
        position_BC = starts_B[:, None] + torch.arange(count, device=rows_B.device)
        is_inside_BC = position_BC < context
        entry_BC = rows_B[:, None] * context + position_BC.clamp(max=context - 1)
        slot_BC = self._table.view(-1)[entry_BC].long() * is_inside_BC
        is_live_BC = (rows_B > 0)[:, None].expand_as(entry_BC)
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
        is_new = is_wrong_BC.any() & (self._found[0] == 0)
        self._found.copy_(torch.where(is_new, finding, self._found))
        self._on_host.copy_(self._found, non_blocking=True)

    def _text(self, entry: int, slot: int, other: int) -> str:
        row, position = divmod(entry, self._table.shape[1])
        name, last = f"req_to_token[{row}, {position}]", self._end_slot - 1
        if other:
            one, where = divmod(other, self._table.shape[1])
            return (
                f"{name} is slot {slot}, which is also req_to_token[{one}, {where}] of a running "
                "request: one would overwrite the other's KV. Allocate each slot to one request, "
                "and reuse it only after the request has ended or was released."
            )
        end = ": the row ends too early" if slot < self._first_slot else ""
        return (
            f"{name} is slot {slot}{end}. Expected slots from {self._first_slot} to {last}, for "
            f"the prompt, max_new_tokens and slots_ahead = {self._slots_ahead} more tokens of the "
            "request. Allocate them before admit."
        )
