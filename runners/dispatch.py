"""Dispatch of a batch: replay it, run it eagerly for a stated reason, or refuse it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphkit.buffers import InputBuffers, StepInputs
from graphkit.config import is_int
from graphkit.errors import InputError, SizeError, short_repr
from graphkit.graphs import SizeTable

logger = logging.getLogger(__name__)


class Reason(Enum):
    """Reason why a batch is not replayed. Fallbacks are counted by its value."""

    NOT_CAPTURED = "not captured"
    CLOSED = "closed"
    BATCH_TOO_LARGE = "batch too large"
    WRONG_WIDTH = "wrong width"
    FIELD_NOT_CAPTURED = "field not captured"
    UNSUPPORTED_ATTENTION = "attention backend"
    BAD_FIELD = "bad field"

    @property
    def has_eager_way(self) -> bool:
        """Whether the forward can run the batch without a graph."""
        return self not in (Reason.CLOSED, Reason.BAD_FIELD)


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of ``can_replay``.

    Attributes:
        ok: Whether ``replay`` accepts the batch.
        reason: Reason of the refusal, with the field or the sizes, or an empty string.
        padded_batch_size: Captured size that would run; 0 for an idle batch.
        kind: Class of the reason.
    """

    ok: bool
    reason: str = ""
    padded_batch_size: int | None = None
    kind: Reason | None = None

    def __bool__(self) -> bool:
        return self.ok


def require_count(field: str, value: object) -> None:
    """Refuse a number of requests or rows that is not an int."""
    if not is_int(value):
        raise InputError(f"{field} must be an int, got {short_repr(value)}.", field=field)


def size_error(requests: int, padded_batch_size: int, table: SizeTable) -> SizeError:
    """Return the error of a batch that a size does not hold, or of a size that is not captured."""
    return SizeError(
        f"{requests} requests cannot run at batch size {padded_batch_size}: captured are "
        f"{list(table)}.",
        batch_size=requests,
        largest=table.largest,
    )


class Dispatch:
    """Decides how a runner runs a batch.

    Args:
        table: Captured sizes.
        buffers: The runner's buffers.
        inputs_type: Class of the batches; the buffers may be of a subclass.
        eager_reason: Reason why no batch has a graph, as a phrase, or an empty string.
    """

    def __init__(
        self,
        table: SizeTable,
        buffers: InputBuffers,
        inputs_type: type[StepInputs],
        eager_reason: str,
    ) -> None:
        self._table, self._buffers, self._eager_reason = table, buffers, eager_reason
        self._checks = buffers.checks
        self.inputs_type = inputs_type
        self.fallbacks: Counter[str] = Counter()
        """Number of eager runs by reason."""
        self.counts_fallbacks = True
        """Whether eager runs are counted and logged."""

    def require_inputs(self, batch: Any) -> None:
        """Refuse a value that is not a batch of the runner's inputs."""
        if not isinstance(batch, self.inputs_type):
            raise InputError(
                f"a batch must be a graphkit.{self._buffers.inputs.__name__}, got a "
                f"{type(batch).__name__}.",
                field="batch",
            )

    def eager_reason(self, batch: Any, status: str) -> Reason | None:
        """Return why the batch has no graph, from its sizes and fields; ``None`` if it has one."""
        self.require_inputs(batch)
        if self._eager_reason and status != "closed":
            return Reason.UNSUPPORTED_ATTENTION
        if status != "captured":
            return Reason.CLOSED if status == "closed" else Reason.NOT_CAPTURED
        requests = batch.batch_size
        if not self._table.fits(requests):
            return Reason.BATCH_TOO_LARGE
        if self._checks.wrong_width(requests, self._checks.count_tokens(batch)):
            return Reason.WRONG_WIDTH
        if self._checks.surplus_field(batch) is not None:
            return Reason.FIELD_NOT_CAPTURED
        return None

    def count_fallback(self, reason: str, name: str, explain: Callable[[], str]) -> None:
        """Count an eager run, and log the first one of each reason.

        Args:
            reason: Value of a ``Reason``, with the rank if another one has it.
            name: Name of the mode.
            explain: Returns the reason as a sentence; called for the first one alone.
        """
        if not self.counts_fallbacks:
            return
        if reason not in self.fallbacks:
            logger.warning("%s falls back to eager: %s. Logged once.", name, explain())
        self.fallbacks[reason] += 1

    def checked_size(self, batch: Any, padded_batch_size: int | None) -> int:
        """Check a batch, in the checking mode its values too, and return the size that holds it.

        Args:
            batch: Inputs of the mode with at least one request.
            padded_batch_size: A captured size; ``None`` selects the smallest that holds the batch.

        Raises:
            InputError: See ``BatchChecks.check``, or ``padded_batch_size`` is not an int.
            SizeError: The size does not hold the batch, or was not captured.
        """
        requests, size = batch.batch_size, padded_batch_size
        if size is None:
            size = self._table.fit(requests)
        require_count("padded_batch_size", size)
        if size not in self._table.sizes or size < requests:
            raise size_error(requests, size, self._table)
        self._checks.check(batch)
        if self._buffers.value_checks is not None:
            self._buffers.value_checks.report()
            self._buffers.value_checks.check(batch)
        return size

    def explain(self, reason: Reason, batch: Any, status: str) -> str:
        """Return a reason as a sentence, with the sizes of the batch and the captured ones."""
        if reason is Reason.BATCH_TOO_LARGE:
            return (
                f"the batch has {batch.batch_size} requests; the largest captured size is "
                f"{self._table.largest}"
            )
        if reason is Reason.WRONG_WIDTH:
            return self._checks.wrong_width(batch.batch_size, self._checks.count_tokens(batch))
        if reason is Reason.UNSUPPORTED_ATTENTION:
            return self._eager_reason
        if reason is Reason.FIELD_NOT_CAPTURED:
            return self._checks.not_captured(str(self._checks.surplus_field(batch)))
        return f"the runner is {status}, not captured"

    def decide(self, batch: Any, status: str) -> Decision:
        """Return the decision for a batch, with every field checked."""
        try:
            reason = self.eager_reason(batch, status)
            if reason is not None:
                return Decision(False, self.explain(reason, batch, status), None, reason)
            if batch.batch_size == 0:
                return Decision(True, "", 0)
            self._checks.check(batch)
        except InputError as error:
            return Decision(False, str(error), None, Reason.BAD_FIELD)
        return Decision(True, "", self._table.fit(batch.batch_size))
