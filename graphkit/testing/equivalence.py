"""Asserting that a replay is what the forward makes without a graph and without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from graphkit.audit.pads import live_sizes
from graphkit.errors import ConfigError, ReplayError, TargetError
from graphkit.records import Mismatch
from graphkit.runners import Runner
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget
from graphkit.targets.lockstep import Lockstep
from graphkit.targets.size_check import PADDING_LEAKS, SizeCheck
from graphkit.testing.likely import likely_bug


def assert_replay_equivalent(
    runner: Runner[Any],
    batches: Iterable[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    padded_batch_size: int | None = None,
) -> None:
    """Fail unless replays of the batches are right.

    Each batch runs three ways from the same state: the replay, the identical padded path without a
    graph, and the live rows alone. The first two must agree to the bit. The third may run other
    kernels, so it gets a tolerance; where a step chooses tokens, it follows the choices of the
    padded path, so that near ties are no difference. What the runner's ``state`` and its attention
    backend hold is put back after each way.

    Args:
        runner: Captured.
        batches: The mode's inputs with live rows; at least one batch.
        rtol: How far padded may be from unpadded numbers, as a part of them. The graph gets no
            tolerance.
        atol: The same as a number. Both left out, a few roundings of the largest number.
        padded_batch_size: A captured size to run at instead of the smallest that fits.

    Raises:
        AssertionError: A replay is wrong, or a batch has no graph. The text says where, how much,
            whether graph or padding is guilty, and what kind of bug that hints at.
        ConfigError: A tolerance is negative, or no number.
        ReplayError: The runner is not captured.
        TargetError: There was no batch.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{name} must be a number of at least 0, got {value!r}.", field=name)
    if runner.status != "captured":
        why = runner.eager_reason or f"runner is {runner.status}"
        raise ReplayError(f"{why}: there is no replay to compare. Capture the runner first.")
    given = iter(batches)
    first = next(given, None)
    if first is None:
        raise TargetError("there is no batch to compare. Give at least one.")
    with _watched(runner) as (target, lockstep):
        for batch in chain([first], given):
            size = _size_of(runner, batch, padded_batch_size)
            if batch.batch_size:  # an idle batch launches nothing
                check = SizeCheck(target, runner, lockstep, size, rtol=rtol, atol=atol)
                check.compare_batch(batch)
                if check.mismatches:
                    raise AssertionError(_text(runner, batch, check))


def assert_target_equivalent(
    target: CaptureTarget,
    *,
    modes: Sequence[ForwardMode] | None = None,
    batch_sizes: Sequence[int] | None = None,
    device: str = "auto",
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Capture a target, and fail unless replays of its sample batches are right at every size.

    Args:
        target: What to capture.
        modes: Modes to capture; ``None`` takes all that the target has.
        batch_sizes: Sizes to capture; ``None`` takes the target's.
        device: ``auto``, ``cpu`` or ``cuda``.
        rtol: As for ``assert_replay_equivalent``.
        atol: As for ``assert_replay_equivalent``.

    Raises:
        AssertionError: A replay is wrong.
        CaptureError: A forward cannot be captured.
        ConfigError: A tolerance is negative, or no number.
        TargetError: The target lacks a mode.
    """
    for mode in modes or target.forwards:
        with target.runner(mode, batch_sizes=batch_sizes, device=device) as runner:
            runner.capture()
            for size in () if runner.eager_reason else runner.table:
                batches = sample_batches(target, runner, size)
                assert_replay_equivalent(
                    runner, batches, rtol=rtol, atol=atol, padded_batch_size=size
                )


def sample_batches(target: CaptureTarget, runner: Runner[Any], size: int) -> Iterator[Any]:
    """Batches of the live sizes that are worth trying at a captured size."""
    smaller = max((each for each in runner.table if each < size), default=0)
    return (target.batch(runner.mode, live, live) for live in live_sizes(size, smaller))


@contextmanager
def _watched(runner: Runner[Any]) -> Iterator[tuple[CaptureTarget, Lockstep]]:
    """The runner's forward as a target that is watched without a graph, for the block alone."""
    step, lockstep, shadow = runner.parts.step, Lockstep(), runner.shadow
    forward = step.forward
    target = CaptureTarget(
        name=step.name,
        spec=runner.spec,
        sizes=runner.sizes,
        forwards={runner.mode: forward},
        sample_batch=lambda *_: None,
        mutable_state=runner.memory_names()["state"],
    )
    step.forward = lockstep.watched(forward)
    try:
        yield target, lockstep
    finally:
        step.forward, runner.shadow = forward, shadow


def _size_of(runner: Runner[Any], batch: Any, size: int | None) -> int:
    decision = runner.can_replay(batch)
    if not decision:
        raise AssertionError(
            f"{runner.mode.name}: a batch of {batch.batch_size} requests is not replayed at all: "
            f"{decision.reason}."
        )
    return size or decision.padded_batch_size or 0


def _text(runner: Runner[Any], batch: Any, check: SizeCheck) -> str:
    mismatch: Mismatch = check.mismatches[0]
    guilty = "padding" if mismatch.kind == PADDING_LEAKS else "graph"
    likely = likely_bug(runner, check.target.mutable_state or {}, batch, check.size, guilty)
    live = mismatch.batch_size
    return (
        f"{mismatch.mode}: the replay of {live} live request{'s' if live > 1 else ''} at captured "
        f"size {mismatch.padded_batch_size} is wrong: {mismatch.kind}.\n"
        f"  guilty: {guilty}\n"
        f"  where: {mismatch.field}, row {mismatch.row}, request {mismatch.request}\n"
        f"  expected: {mismatch.expected:.9g}\n"
        f"  got: {mismatch.got:.9g}\n"
        f"  largest difference: {check.largest:.3g}\n"
        f"  likely: {likely}"
    )
