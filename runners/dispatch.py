"""Which way a batch goes: replay, or eager with a reason, or refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphkit.buffers import InputBuffers, admit
from graphkit.errors import InputError
from graphkit.graphs import SizeTable


class Reason(Enum):
    """Why a batch is not replayed. The value is the key under which fallbacks are counted."""

    NOT_CAPTURED = "not captured"
    CLOSED = "closed"
    BATCH_TOO_LARGE = "batch too large"
    WRONG_WIDTH = "wrong width"
    FIELD_NOT_CAPTURED = "field not captured"
    UNSUPPORTED_ATTENTION = "attention backend"
    BAD_FIELD = "bad field"

    @property
    def has_eager_way(self) -> bool:
        """Whether the batch is sound, so that the forward can run it without a graph."""
        return self not in (Reason.CLOSED, Reason.BAD_FIELD)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of ``can_replay``.

    Attributes:
        ok: Whether ``replay`` takes the batch.
        reason: Why not, naming the field or the sizes; empty if ok.
        padded_batch_size: The captured size it would run at; 0 for an idle batch.
        kind: The class of the reason.
    """

    ok: bool
    reason: str = ""
    padded_batch_size: int | None = None
    kind: Reason | None = None

    def __bool__(self) -> bool:
        return self.ok


class Dispatch:
    """The rules of one runner.

    Args:
        table: Its captured sizes.
        buffers: Its fields.
        eager_reason: Why no batch ever has a graph, as a sentence; empty if that is not so.
    """

    def __init__(self, table: SizeTable, buffers: InputBuffers, eager_reason: str = "") -> None:
        self._table, self._buffers, self._eager_reason = table, buffers, eager_reason
        self._width = buffers.capacity.tokens_per_request
        self._ragged = buffers.capacity.ragged
        self.fallbacks: Counter[str] = Counter()
        """Eager runs by reason."""

    def miss(self, batch: Any, status: str) -> Reason | None:
        """Why the batch has no graph, from its sizes alone; ``None`` if it has one."""
        if self._eager_reason and status != "closed":
            return Reason.UNSUPPORTED_ATTENTION
        if status != "captured":
            return Reason.CLOSED if status == "closed" else Reason.NOT_CAPTURED
        requests = batch.batch_size
        if not self._table.fits(requests):
            return Reason.BATCH_TOO_LARGE
        if not self._has_captured_width(requests, self._buffers.tokens_of(batch)):
            return Reason.WRONG_WIDTH
        if self.surplus_field(batch) is not None:
            return Reason.FIELD_NOT_CAPTURED
        return None

    def check_idle(self, batch: Any) -> None:
        """Refuse rows of a batch without requests, which would vanish."""
        if self._buffers.tokens_of(batch):
            text = self.explain(Reason.WRONG_WIDTH, batch, "")
            raise InputError(f"{text}.", field="num_tokens")

    def _has_captured_width(self, requests: int, tokens: int) -> bool:
        most = requests * self._width
        return requests <= tokens <= most if self._ragged else tokens == most

    def surplus_field(self, batch: Any) -> str | None:
        """An optional field that the batch brings although the graph does not read it."""
        for name in self._buffers.absent:
            if getattr(batch, name, None) is not None:
                return name
        return None

    def explain(self, miss: Reason, batch: Any, status: str) -> str:
        """The reason as a sentence with what came and what was captured."""
        requests, tokens = batch.batch_size, self._buffers.tokens_of(batch)
        if miss is Reason.BATCH_TOO_LARGE:
            return f"batch of {requests} requests; the largest captured is {self._table.largest}"
        if miss is Reason.WRONG_WIDTH:
            width = f"1 to {self._width}" if self._ragged else self._width
            return (
                f"{tokens} tokens in {requests} requests; captured are {width} tokens per request"
            )
        if miss is Reason.UNSUPPORTED_ATTENTION:
            return self._eager_reason
        if miss is Reason.FIELD_NOT_CAPTURED:
            return self._buffers.not_captured(str(self.surplus_field(batch)))
        return f"runner is {status}, not captured"

    def decide(self, batch: Any, status: str) -> Decision:
        """The whole answer, every field looked at."""
        try:
            miss = self.miss(batch, status)
            if miss is not None:
                return Decision(False, self.explain(miss, batch, status), None, miss)
            if batch.batch_size == 0:
                return Decision(True, "", 0)
            self._admit_all(batch)
        except InputError as error:
            return Decision(False, str(error), None, Reason.BAD_FIELD)
        return Decision(True, "", self._table.fit(batch.batch_size))

    def _admit_all(self, batch: Any) -> None:
        requests, tokens = batch.batch_size, self._buffers.tokens_of(batch)
        self._buffers.check_bound(batch)
        for layout in self._buffers.layouts:
            if layout.name not in self._buffers.bound_fields:
                rows = self._buffers.capacity.rows(layout.field.axis, requests, tokens)
                admit(layout, getattr(batch, layout.name, None), rows, self._buffers.device)
        self._buffers.check(batch, tokens)
