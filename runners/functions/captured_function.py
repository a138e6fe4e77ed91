"""A captured function: calls, replays and staged batches with the arguments of the function."""

from __future__ import annotations

from typing import Any, Self

from graphkit.buffers import StepInputs
from graphkit.config import is_int
from graphkit.errors import SizeError
from graphkit.graphs import StateSnapshot
from graphkit.records import CaptureRecord, GraphRecord, ReplayStats
from graphkit.runners import Runner, StagedBatch
from graphkit.runners.functions.arguments import Arguments
from graphkit.runners.functions.results import Results
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode


class CapturedFunction:
    """A function that replays a graph; see ``graphkit.capture``, which returns it.

    A call takes the arguments of the function and returns its results as new tensors.
    Arguments are device tensors, CPU tensors or numpy arrays. A batch that is larger than every
    captured size runs without a graph; ``stats`` counts it. A context manager that closes itself.
    One thread at a time may use it.

    Attributes:
        record: Record of the capture.
        runner: The ``StepRunner`` that replays. ``graphkit.testing.assert_replay_equivalent``
            takes it, with batches of ``batch``.
        target: The function as a target of ``audit_target``, ``capture_target`` and the commands.
            Its sample batches are rows of the example.

    Raises:
        InputError: A call lacks an argument, or an argument has another row shape, dtype or number
            of rows.
        ReplayError: The function is closed.
    """

    def __init__(
        self,
        runner: Runner[Any, Any],
        arguments: Arguments,
        results: Results,
        target: CaptureTarget,
        record: CaptureRecord,
    ) -> None:
        self.runner, self.target, self.record = runner, target, record
        self._arguments, self._results = arguments, results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay a batch, or run it without a graph if no captured size holds it.

        Returns:
            What the function returns, with the live rows, as new tensors.
        """
        batch = self._arguments.batch(args, kwargs)
        return self._results.returned(self.runner.run(batch, clone=True))

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graph of the smallest size that holds the batch, without a copy.

        Returns:
            As the function does. The tensors alias graph memory and are valid until the next replay
            in that pool.

        Raises:
            InputError: As for a call.
            ReplayError: The function is closed.
            SizeError: The batch is larger than the largest size.
        """
        batch = self._arguments.batch(args, kwargs)
        self._check_fits(batch.batch_size)
        return self._results.returned(self.runner.replay(batch))

    def stage(self, batch_size: int) -> StagedCall:
        """Return the next mailbox entry, whose fields are the arguments; see ``Runner.stage``.

        Args:
            batch_size: Number of live rows.

        Raises:
            InputError: ``batch_size`` is not an int.
            ReplayError: The function is closed.
            SizeError: The batch is larger than the largest size, or empty.
        """
        self._check_fits(batch_size)
        return StagedCall(self.runner.stage(batch_size), self._arguments, self._results)

    def batch(self, *args: Any, **kwargs: Any) -> StepInputs:
        """Return the arguments of a call as a batch of ``runner``.

        Raises:
            InputError: As for a call.
        """
        return self._arguments.batch(args, kwargs)

    def inspect(self, batch_size: int) -> GraphRecord:
        """Inspect the graph of a captured size, and measure its nodes; see ``Runner.inspect``.

        Restores mutable state.

        Args:
            batch_size: A captured size.

        Raises:
            InspectError: See ``inspect_graph``.
            ReplayError: The function is closed.
            SizeError: The size was not captured.
        """
        batch, runner = self.target.batch(ForwardMode.STEP, 1, 0), self.runner
        with runner.without_stats(), StateSnapshot(runner.mutable_state, runner.device):
            return runner.inspect(
                batch_size,
                weights=self.target.weights,
                replay=lambda: runner.replay(batch, padded_batch_size=batch_size),
            )

    @property
    def stats(self) -> ReplayStats:
        """Replays and fallbacks so far; also after ``close``."""
        return self.runner.stats

    def close(self) -> None:
        """Close all graphs. May be called again. Results of ``replay`` must not be used after."""
        self.runner.close()

    def _check_fits(self, batch_size: int) -> None:
        largest = self.runner.table.largest
        if is_int(batch_size) and batch_size > largest:
            raise SizeError(
                f"a batch of {batch_size} rows has no captured size: the largest is {largest}. Add "
                f"a size to batch_sizes, or call {self.target.name}, which then runs without a "
                "graph.",
                batch_size=batch_size,
                largest=largest,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StagedCall(StagedBatch[Any]):
    """A ``StagedBatch`` whose fields are the arguments of a function.

    ``replay`` returns what the function returns.
    """

    def __init__(self, staged: StagedBatch[Any], arguments: Arguments, results: Results) -> None:
        own = vars(self)  # an assignment would write a field
        own.update(vars(staged))
        own["_fields"], own["_results"] = arguments.fields, results

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        field = own.get("_fields", {}).get(name, name)
        return own[field] if field in own else super().__getattr__(field)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._fields.get(name, name), value)

    def replay(self, *, clone: bool = False) -> Any:
        """Replay the batch; see ``StagedBatch.replay``."""
        return self._results.returned(super().replay(clone=clone))
