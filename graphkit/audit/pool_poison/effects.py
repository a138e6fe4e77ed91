"""How a replay changes if pool memory is overwritten before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphkit.audit.node_switches import ReplayGraph
from graphkit.audit.object_snapshot import checksum
from graphkit.audit.places import row_text
from graphkit.audit.pool_poison.memory import PoolMemory
from graphkit.audit.pool_poison.ranges import Poison, Range
from graphkit.audit.row_axes import changed_state
from graphkit.audit.runs import EqualStateRuns
from graphkit.graphs import StateSnapshot
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import Mismatch, distinct_text
from graphkit.runners import Runner
from graphkit.runners.comparison import first_difference
from graphkit.runners.comparison.differences import even_owner
from graphkit.runners.comparison.drawn_state import restorable_state


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


class PoisonedReplays:
    """Replays of one batch at one captured size, compared with a replay on unchanged memory.

    Args:
        runner: Captured. No other batch may run meanwhile.
        batch: The mode's inputs, with at least one live request.
        size: The captured size.
        memory: Memory of the runner's pool.
        start: Snapshot of the runner's state that also restores ``memory``. The caller restores it
            after the last replay.
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
        self._expected = EqualStateRuns(runner, batch, size, start).replay()
        self._state = StateSnapshot(restorable_state(runner), runner.device)

    def effect(self, poison: Poison) -> Effect | None:
        """Replay after overwriting, and return what differs from a replay without it."""
        runs = self._runs(poison)
        try:
            got = runs.replay()
        except Exception as error:
            return Effect(f"the replay fails: {describe_exception(error)}")
        live = self._batch.batch_size
        found = first_difference(self._expected, got, even_owner(live), runs.rounding)
        if found is not None:
            before, after = distinct_text(found.expected, found.got)
            text = f"{row_text(found, live)} is {after} instead of {before}"
            return Effect(text, found.field, found)
        changed = changed_state(self._state, self._batch, self.runner.sizes.page_size)
        return Effect(f"the state `{changed[0]}` differs", changed[0]) if changed else None

    def image(
        self, poison: Poison, run: Callable[[ReplayGraph], object], ignored: Range
    ) -> list[int]:
        """Return checksums of the memory and the state after another graph of the same step.

        Empty if the replay fails.

        Args:
            poison: What to overwrite before.
            run: Runs a graph on the same memory, by the function that it gets.
            ignored: Range of the pool that does not count.
        """
        try:
            run(self._runs(poison).replay)
        except Exception:
            return []
        for part in self.memory.parts([ignored]):
            part.zero_()
        blocks = [block.data for block in self.memory.blocks]
        return [checksum(tensor) for tensor in (*blocks, *self._state.tensors.values())]

    def _runs(self, poison: Poison) -> EqualStateRuns:
        prepare = partial(self.memory.overwrite, poison)
        return EqualStateRuns(self.runner, self._batch, self.size, self._start, prepare=prepare)
