"""Replays of one batch from equal state and pool memory, with some of that memory overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.object_snapshot import checksum
from graphkit.audit.pool_poison.memory import PoolMemory
from graphkit.audit.pool_poison.ranges import Poison, Range
from graphkit.audit.shadow.changed_state import changed_state
from graphkit.graphs import StateSnapshot
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import Mismatch, distinct_text
from graphkit.runners import Runner
from graphkit.verify import Rounding, first_difference
from graphkit.verify.comparison import restorable_state
from graphkit.verify.differences import even_owner


@dataclass(frozen=True, slots=True)
class Effect:
    """How a replay changed when pool memory was overwritten before it.

    Attributes:
        text: The change, as a clause.
        field: Name of the output or of the state that differs; empty if the replay failed.
        mismatch: The first row of an output that differs; ``None`` if none does.
    """

    text: str
    field: str = ""
    mismatch: Mismatch | None = None


class PoisonTrials:
    """Replays of one batch at one captured size.

    Each replay starts from the state and the random numbers of ``start`` and from the pool memory
    that ``memory`` has saved. The caller restores both after the last one.

    Args:
        runner: Captured. No other batch may run meanwhile.
        batch: The mode's inputs, with at least one live request.
        size: The captured size.
        memory: Memory of the runner's pool.
        start: Snapshot of the runner's state.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        batch: Any,
        size: int,
        memory: PoolMemory,
        start: StateSnapshot,
    ) -> None:
        self.runner, self.size, self.memory = runner, size, memory
        self._batch, self._start = batch, start
        self._expected = self._replay(None)
        self._state = StateSnapshot(restorable_state(runner), runner.device)

    def effect(self, poison: Poison) -> Effect | None:
        """Replay after overwriting, and return what differs from a replay without it."""
        try:
            got = self._replay(poison)
        except Exception as error:
            return Effect(f"the replay fails: {describe_exception(error)}")
        owner = even_owner(self._batch.batch_size)
        rounding = Rounding(self.runner.sizes.dtype)
        found = first_difference(self._expected, got, owner, rounding)
        if found is not None:
            before, after = distinct_text(found.expected, found.got)
            text = (
                f"row {found.row} of {found.field} (request {found.request} of "
                f"{self._batch.batch_size}) is {after} instead of {before}"
            )
            return Effect(text, found.field, found)
        changed = changed_state(self._state, self._batch, self.runner.sizes.page_size)
        return Effect(f"the state `{changed[0]}` differs", changed[0]) if changed else None

    def image(self, poison: Poison, graph: Any, ignored: Range) -> list[int]:
        """Return checksums of the memory and the state after another graph of the same step.

        Empty if the replay fails.

        Args:
            poison: What to overwrite before.
            graph: The graph to replay, on the same memory.
            ignored: Range of the pool that does not count.
        """
        self._restore(poison)
        try:
            self.runner.make_replayer({self.size: graph}).replay(self._batch, self.size)
        except Exception:
            return []
        if self.runner.device.type == "cuda":
            # A graph whose last nodes are off lets the stream go on before its last node that is
            # on has ended (driver 580).
            torch.cuda.synchronize(self.runner.device)
        for part in self.memory.parts([ignored]):
            part.zero_()
        blocks = [block.data for block in self.memory.blocks]
        return [checksum(tensor) for tensor in (*blocks, *self._state.tensors.values())]

    def _replay(self, poison: Poison | None) -> dict[str, torch.Tensor]:
        self._restore(poison)
        output = self.runner.replay(self._batch, padded_batch_size=self.size, clone=True)
        tensors: dict[str, torch.Tensor] = output.tensors()
        return tensors

    def _restore(self, poison: Poison | None) -> None:
        self.memory.restore()
        self._start.restore()
        if poison is not None:
            self.memory.overwrite(poison)
