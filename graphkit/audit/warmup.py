"""What capturing leaves behind.

A capture runs the forward a few times, on pads. Replays run no Python, and state that was declared
is put back; whatever else those runs changed stays: a step that was counted, a flag that was set, a
buffer that was replaced, or a cache that was built from pads and that every replay then reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.object_snapshot import ABSENT, ObjectChange, ObjectSnapshot
from graphkit.graphs import CapturedGraph, inspect_graph, tensors_of
from graphkit.runners import Runner
from graphkit.runners.step import name_of
from graphkit.targets import CaptureTarget

_SEED = 30
_MOVE = "Keep it out of the forward, or keep it on the device and declare it as state."
_BUILD = "Make it from the inputs in every forward, or keep nothing in it that depends on them."
_GROW = "Make it large enough before capturing, and write it in place."


def audit_warmup(target: CaptureTarget, runner: Runner[Any], log: AuditLog) -> None:
    """Check for what capturing a runner's graphs changes.

    What the forward holds on the host is as before afterwards.

    Args:
        target: The target. If its forward has run before, caches that it builds once are there
            already, and go unseen.
        runner: One of the target's; nothing may be replayed meanwhile.
        log: Takes what is found.
    """
    with log.check("warmup", runner.mode.name) as check:
        captures = _Captures(target, runner)
        try:
            changes = captures.changes()
            constant = captures.constant([each for each in changes if each.is_built])
        finally:
            captures.before.put_back()
        changes = [change for change in changes if change.name not in constant]
        _tell(check, changes)
        caches = f"; {len(constant)} caches hold the same for any batch" if constant else ""
        count = len(captures.before.images)
        check.text = f"{count} things before and after a capture: {len(changes)} changed{caches}"


class _Captures:
    """Captures a runner's graphs aside, and looks at all that its forward can reach."""

    def __init__(self, target: CaptureTarget, runner: Runner[Any]) -> None:
        self._target, self._runner = target, runner
        forward = target.forwards[runner.mode]
        self._roots = {_class_of(forward): forward}
        self._tensors = {**(target.mutable_state or {}), **tensors_of(target.weights)}
        self.before = self._snapshot()

    def changes(self) -> list[ObjectChange]:
        """What a capture on pads changes, but for what its graphs make anew at every replay."""
        with self._runner.captured_aside() as graphs:
            changes = list(self.before.changes(self._snapshot()))
            made = _made_by(graphs) if changes else set()
        return [change for change in changes if change.after.address not in made]

    def constant(self, built: Sequence[ObjectChange]) -> set[str]:
        """Names of those caches that a capture on live batches builds just so."""
        if not built:
            return set()
        self.before.put_back()
        with self._runner.captured_aside(self._batch):
            again = self._snapshot().images
        return {
            each.name
            for each in built
            if again.get(each.name, ABSENT).content == each.after.content
        }

    def _snapshot(self) -> ObjectSnapshot:
        return ObjectSnapshot(self._roots, self._tensors)

    def _batch(self, size: int) -> Any:
        live = min(size, self._target.sizes.max_batch_size)
        return self._target.batch(self._runner.mode, live, _SEED)


def _made_by(graphs: Mapping[int, CapturedGraph]) -> set[int | None]:
    """Where the graphs' own memory is used."""
    nodes = (node for graph in graphs.values() for node in inspect_graph(graph).nodes)
    pointers = (p for node in nodes for argument in node.arguments for p in argument.pointers)
    return {pointer.address for pointer in pointers if pointer.memory == "pool"}


def _class_of(forward: Any) -> str:
    """What a forward is called among its attributes' names: its class, or its own last name."""
    first = forward[0] if isinstance(forward, Sequence) else forward
    return name_of(first).rpartition(".")[2]


def _tell(check: Check, changes: Iterable[ObjectChange]) -> None:
    for change in changes:
        kind, text, advice = _told(change)
        before, after = change.before.text, change.after.text
        check.report(kind, text, advice=advice, before=before, after=after)


def _told(change: ObjectChange) -> tuple[str, str, str]:
    """Kind, sentence and advice."""
    name, before, after = change.name, change.before.text, change.after.text
    if change.is_built:
        text = f"capturing built {name}, {after}, from pads; a live batch makes another, but "
        return "lazy cache", f"{text}replays keep this one.", _BUILD
    if change.is_replaced:
        text = f"capturing replaced {name}, {before}, by {after}: graphs keep the address of "
        return "replaced buffer", f"{text}the one that they were captured with.", _GROW
    if after == name:  # random numbers
        return "warm-up leak", f"capturing drew from {name}: replays do not.", _MOVE
    if before == after:
        return "warm-up leak", f"capturing changed what {name} holds, {after}.", _MOVE
    return "warm-up leak", f"capturing changed {name} from {before} to {after}.", _MOVE
