"""Comparing replays, while they are in use, with the same step run without a graph.

Every so many replays the batch runs again: padded but without the graph, and without padding. If
the replay is not the padded way to the bit, the graph is wrong: it froze something, or reads what
is gone. If the padded way is not the bare one, padding is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.shadow.divergence import Divergence, first_divergence
from graphkit.audit.shadow.ways import Replay, Ways
from graphkit.config import require_int
from graphkit.graphs import preserved
from graphkit.records import Finding, Mismatch
from graphkit.runners import Runner
from graphkit.runners.fit import Fit
from graphkit.targets import CaptureTarget
from graphkit.targets.compare import Tensors, tolerance

_SEED = 50
_TIMES = 3
"""How often the padded way of a wrong replay is taken again, to see whether it is restless."""
_GRAPH = "The graph froze something, or points to what was replaced: run the other audits."
_PADDING = "Look for what mixes rows, such as a mean over the batch: run the audit of pads."
_RESTLESS = "Use deterministic kernels; else no replay can be told from another."
_FAILED = "Run the batch with runner.fall_back, and mend what it raises."


class ShadowWatch:
    """Compares every n-th replay of a captured runner with its other ways, in a ``with`` block.

    Callers get what the graph made, and state, random numbers and what the forward holds on the
    host are as the graph left them. A replay that is compared takes as long as several forwards and
    waits for the device; meanwhile there are up to three copies of the declared state. The others
    cost nothing but the counting.

    Args:
        runner: Captured. ``replay``, ``run`` and staged batches are all watched.
        every: Compare every so many replays.
        weights: The model, or its weights by name, to name nodes by.
        bisect: Whether to capture a size whose graph is wrong again, aside, and look for the node
            from which on it differs. Takes as long as capturing, and runs the forward.

    Attributes:
        compared: Replays compared so far.

    Raises:
        ConfigError: ``every`` is no int of at least 1.
        ReplayError: On entering: the runner is not ``captured``.
    """

    def __init__(
        self,
        runner: Runner[Any],
        *,
        every: int = 100,
        weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
        bisect: bool = False,
    ) -> None:
        require_int("ShadowWatch", "every", every)
        self.compared = 0
        self._runner, self._every, self._weights, self._bisect = runner, every, weights, bisect
        self._ways = Ways(runner)
        self._check = Check("shadow", runner.mode.name, 0)
        self._told: set[tuple[str, int, str]] = set()
        self._turn, self._exits = 0, ExitStack()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far; of each size, kind and field the first."""
        return self._check.findings

    def __enter__(self) -> Self:
        replayer = self._runner.replayer("a shadow watch")
        self._exits.enter_context(replayer.watched(self._launched))
        return self

    def __exit__(self, *exc: object) -> None:
        self._exits.close()

    def _launched(
        self, launch: Callable[..., Any], fit: Fit, entry: int, tokens: int, in_flight: list[Any]
    ) -> Any:
        self._turn += 1
        if self._turn % self._every or self._runner.shadow is not None:
            return launch(fit, entry, tokens, in_flight)
        batch = self._ways.read(fit, entry, tokens)
        before = self._ways.now()
        output = launch(fit, entry, tokens, in_flight)
        replay = Replay(
            fit, batch, before, output.clone().tensors(), self._ways.now(), self._ways.host()
        )
        try:
            self._compare(replay)
        except Exception as error:  # whoever replays must not suffer from it
            self._ways.recover()
            text = f"it could not be compared: {type(error).__name__}: {error}"
            self._found("shadow failed", replay, "", text, _FAILED, severity="warning")
        finally:
            replay.after.put_back()
            replay.host.restore()
            _write(output.tensors(), replay.got)
        return output

    def _compare(self, replay: Replay) -> None:
        self.compared += 1
        padded = self._padded(replay)
        state, graph = replay.after.changed(replay.batch), replay.difference(padded, replay.got)
        if graph is not None or state:
            is_wild = self._judge_graph(replay, padded, graph, state)
            if is_wild:  # then the bare way is another one as well, pads or not
                return
        replay.rewind()
        padding = self._ways.padding_changes(replay.batch, replay.fit, padded)
        if padding is not None:
            self._found_row("padding bug", replay, padding, ("with pads", "without"), _PADDING)

    def _padded(self, replay: Replay) -> Tensors:
        replay.rewind()
        return self._ways.padded(replay.batch, replay.fit)

    def _judge_graph(
        self, replay: Replay, padded: Tensors, graph: Mismatch | None, state: list[str]
    ) -> bool:
        """A graph that is not as its padded way is wrong.

        If that way is restless itself, as sums in changing order are, the graph is wrong if it is
        further off than rounding goes and the padded way never is. Returns whether that way is:
        then nothing can be told from it.
        """
        left = self._ways.now()
        again = [self._padded(replay) for _ in range(_TIMES)]
        restless = _first(replay.difference(padded, each) for each in again)
        is_wild = False
        if restless is not None:
            allowed = tolerance(padded)
            is_wild = _first(replay.difference(padded, each, allowed) for each in again) is not None
            graph = None if is_wild else replay.difference(padded, replay.got, allowed)
        if graph is not None:
            self._found_row("graph bug", replay, graph, ("from the graph", "without it"), _GRAPH)
        elif restless is not None:
            ways = "once more without a graph", "the first time"
            self._found_row("restless step", replay, restless, ways, _RESTLESS)
        else:
            moving = left.changed(replay.batch)
            self._judge_state(replay, [name for name in state if name not in moving])
        return is_wild

    def _judge_state(self, replay: Replay, names: Sequence[str]) -> None:
        if names:
            text = f"the graph leaves other values in {names[0]} than the same step without it."
            self._found("graph bug", replay, names[0], text, _GRAPH)

    def _found_row(
        self, kind: str, replay: Replay, wrong: Mismatch, ways: tuple[str, str], advice: str
    ) -> None:
        before, after = f"{wrong.expected:.6g}", f"{wrong.got:.6g}"
        text = (
            f"row {wrong.row} of {wrong.field}, of request {wrong.request}, is {after} {ways[0]} "
            f"and {before} {ways[1]}."
        )
        facts = {"row": wrong.row, "request": wrong.request, "before": before, "after": after}
        self._found(kind, replay, wrong.field, text, advice, **facts)

    def _found(
        self, kind: str, replay: Replay, field: str, text: str, advice: str, **facts: Any
    ) -> None:
        """Write it down, and where a wrong graph goes wrong, unless it was told already."""
        size = replay.fit.padded_batch_size
        if (kind, size, field) in self._told:
            return
        self._told.add((kind, size, field))
        if kind == "graph bug" and self._bisect:
            found = self._bisected(replay)
            text, facts["node"] = f"{text} {found.text}", found.node
        text = f"with {_counted(replay.fit.requests)} {text}"
        self._check.report(kind, text, batch_size=size, field=field, advice=advice, **facts)

    def _bisected(self, replay: Replay) -> Divergence:
        replay.rewind()
        size, before = replay.fit.padded_batch_size, replay.before
        try:
            return first_divergence(self._runner, replay.batch, size, before, self._weights)
        except Exception as error:  # the bug is told all the same
            self._ways.recover()
            return Divergence(f"A capture now fails: {type(error).__name__}: {error}")


def _first(found: Iterable[Mismatch | None]) -> Mismatch | None:
    return next((each for each in found if each is not None), None)


def _write(output: Tensors, rows: Tensors) -> None:
    """Looking for a node has run the graph again."""
    with torch.inference_mode():
        for name, tensor in output.items():
            tensor.copy_(rows[name])


def audit_shadow(target: CaptureTarget, runner: Runner[Any], log: AuditLog) -> None:
    """Compare replays of sample batches with their other ways; see ``ShadowWatch``.

    Args:
        target: Makes the batches.
        runner: One of the target's, captured.
        log: Takes what is found.
    """
    for size in runner.table:
        with log.check("shadow", runner.mode.name, size) as check:
            watch = ShadowWatch(runner, every=1, weights=target.weights, bisect=True)
            with preserved(target.mutable_state or {}), watch:
                lives = _lives(min(size, runner.table.max_batch_size))
                for live in lives:
                    batch = target.batch(runner.mode, live, _SEED + live)
                    runner.replay(batch, padded_batch_size=size)
            check.findings += watch.findings
            check.text = (
                f"compared with the padded and the unpadded step: {', '.join(map(str, lives))} live"
            )


def _counted(live: int) -> str:
    return f"{live} live request" if live == 1 else f"{live} live requests"


def _lives(most: int) -> list[int]:
    """Live sizes that have many pads, some, one and none."""
    return sorted({1, -(-most // 2), max(most - 1, 1), most})
