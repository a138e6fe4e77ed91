"""Whether a batch can be replayed, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a batch is not replayed. The value is the key under which fallbacks are counted."""

    NOT_CAPTURED = "not captured"
    CLOSED = "closed"
    BATCH_TOO_LARGE = "batch too large"
    WRONG_WIDTH = "wrong width"
    FIELD_NOT_CAPTURED = "field not captured"
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
