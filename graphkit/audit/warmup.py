"""Search for what capturing a forward changes on the host.

A capture runs the forward a few times on pad rows; replays run no Python. Declared state is
restored, but other effects of those runs stay: a counted step, a flag, a replaced buffer, or a
cache that was built from pads and that every replay reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.changing_lines import changing_lines
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.reachable_objects import ReachableObjects, walk_roots
from graphkit.audit.object_snapshot import ABSENT, RANDOM_STATE, ObjectChange, ObjectSnapshot
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs.equal_state_runs import restored
from graphkit.graphs import CapturedGraph, inspect_graph, named_tensors
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget


def audit_warmup(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report what capturing a runner's graphs changes.

    Restores what the forward holds on the host. Lazy caches are found only if the forward has not
    run before.

    Raises:
        CaptureError: The forward cannot be captured.
    """
    with log.check(Audit.WARMUP, runner.mode.name) as check:
        captures = _Captures(target, runner)
        before = captures.before
        try:
            changes = captures.changes()
            values = captures.values(changes)
            state, replayed = captures.state_and_replayed(changes)
            constant, followed = captures.constants(changes), captures.set_from_inputs(changes)
            changes = [change for change in changes if change.name not in constant | followed]
            before.restore()
            names = [change.name for change in changes if change.name in values]
            lines = _lines(runner, {name: values[name] for name in names})
        finally:
            before.restore()
        for change in changes:
            is_state = change.name in state
            is_replayed = change.name in replayed
            kind, text = _finding(change, is_state=is_state, is_replayed=is_replayed)
            check.report(
                kind,
                text,
                advice=(FindingKind.UNDECLARED_STATE if is_replayed else kind).advice,
                names=(change.name,),
                source=lines.get(change.name, ""),
                cause=kind if is_state else "",
                before=change.before.text,
                after=change.after.text,
            )
        check.text = (
            f"compared {count_of(len(before.summaries), 'value')} before and after capture: "
            f"{count_of(len(changes), 'change')}"
        )
        if constant:
            check.text += f"; ignored {count_of(len(constant), 'cache')} of constants"
        if followed:
            check.text += f"; ignored {count_of(len(followed), 'value')} that each forward sets"


class _Captures:
    """Captures of a runner, compared with what the host held before them.

    Attributes:
        before: What it held.
    """

    def __init__(self, target: CaptureTarget, runner: Runner[Any, Any]) -> None:
        self._target, self._runner = target, runner
        self._roots = walk_roots(target.forwards[runner.mode])
        self.before = self._snapshot()

    def changes(self) -> list[ObjectChange]:
        """Return what a capture on pads changes.

        Tensors in the graphs' own memory are left out, which each call makes anew, and tensors of
        the inputs and others that the runner knows: a graph may read those at the address that they
        have. So are tensors that are held no more and that no graph reads.
        """
        with self._runner.recapture() as graphs:
            changes = list(self.before.changes(self._snapshot()))
            written = _addresses(graphs, "pool") if changes else set()
            read = _addresses(graphs, "external") if changes else set()
        known = [
            (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            for tensors in self._runner.memory_names().values()
            for tensor in tensors.values()
        ]

        def is_known(change: ObjectChange) -> bool:
            if change.is_replaced and change.after is ABSENT:  # its object was replaced
                return change.before.address not in read
            address = change.after.address or 0
            is_other = change.is_created or change.is_replaced
            return is_other and any(begin <= address < begin + size for begin, size in known)

        return [
            change
            for change in changes
            if change.after.address not in written and not is_known(change)
        ]

    def values(self, changes: Sequence[ObjectChange]) -> dict[str, Callable[[], Any]]:
        """Return functions that read the changed objects, by name. They outlast a restore."""
        names, tensors = {change.name for change in changes}, self._tensors()
        values: dict[str, Callable[[], Any]] = {
            name: partial(tensors.get, name) for name in names & tensors.keys()
        }
        for container, held in ReachableObjects(self._roots).entries:
            for key in held:
                if container.name(key) in names:
                    values.setdefault(container.name(key), partial(container.get, key))
        return values

    def state_and_replayed(self, changes: Sequence[ObjectChange]) -> tuple[set[str], set[str]]:
        """Capture again and replay, to find what changes the same objects again.

        Returns:
            Names of tensors that the graphs use and a second capture leaves alike, such as a KV
            cache: each capture writes the same rows of padding. Then names of what a replay
            changes, too, such as a counter on the device.
        """
        in_place = [change for change in changes if not (change.is_created or change.is_replaced)]
        if not on_any_rank(self._runner, bool(in_place)):
            return set(), set()
        with self._runner.recapture() as graphs:
            again = self._contents(in_place)
            used = _addresses(graphs, "external") - {None}
            self._runner.make_replayer(graphs).pads(max(graphs))
            later = self._contents(in_place)
        state = {
            change.name
            for change in in_place
            if change.after.address in used and again[change.name] == change.after.content
        }
        return state, {name for name in again if later[name] != again[name]} - state

    def constants(self, changes: Sequence[ObjectChange]) -> set[str]:
        """Return the names of new objects that a capture on live batches creates equally."""
        created = [change for change in changes if change.is_created]
        if not on_any_rank(self._runner, bool(created)):
            return set()
        self.before.restore()
        with self._runner.recapture(self._live_batch):
            again = self._contents(created)
        return {change.name for change in created if again[change.name] == change.after.content}

    def set_from_inputs(self, changes: Sequence[ObjectChange]) -> set[str]:
        """Return the names of host values that each forward sets from its inputs.

        As in a context object: a run of another size leaves another value, and one of the first
        size the same value again. A counter and a flag do not behave so.
        """
        held = [change for change in changes if change.after.address is None]
        runner = self._runner
        if not on_any_rank(runner, bool(held)):
            return set()
        largest, smallest = runner.table.largest, runner.table.sizes[0]
        run_other = runner.run_padded if smallest < largest else runner.fall_back
        runs = (runner.run_padded, largest), (run_other, 1), (runner.run_padded, largest)
        left = []
        self.before.restore()
        with restored(runner):
            for run, size in runs:
                run(self._live_batch(size))
                left.append(self._contents(held))
        first, other, again = left
        return {name for name in first if first[name] == again[name] != other[name]}

    def _live_batch(self, size: int) -> Any:
        live = min(size, self._target.sizes.max_batch_size)
        return self._target.batch(self._runner.mode, live, SEED)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**(self._target.mutable_state or {}), **named_tensors(self._target.weights)}

    def _snapshot(self) -> ObjectSnapshot:
        return ObjectSnapshot(self._roots, self._tensors())

    def _contents(self, changes: Sequence[ObjectChange]) -> dict[str, Any]:
        summaries = self._snapshot().summaries
        return {change.name: summaries.get(change.name, ABSENT).content for change in changes}


def _lines(runner: Runner[Any, Any], values: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the lines that change the objects in a capture, by name."""
    if not on_any_rank(runner, bool(values)):
        return {}

    def capture() -> None:
        with runner.recapture():
            pass

    return changing_lines(capture, values)


def _addresses(graphs: Mapping[int, CapturedGraph], memory: str) -> set[int | None]:
    """Return the addresses in one kind of memory that the nodes of graphs use."""
    nodes = (node for graph in graphs.values() for node in inspect_graph(graph).nodes)
    pointers = (p for node in nodes for argument in node.arguments for p in argument.pointers)
    return {pointer.address for pointer in pointers if pointer.memory == memory}


def _finding(change: ObjectChange, *, is_state: bool, is_replayed: bool) -> tuple[FindingKind, str]:
    """Return kind and text of a change: to state that graphs use, or which a replay makes, too."""
    name, before, after = f"`{change.name}`", change.before.text, change.after.text
    if is_state:
        text = f"capture changed the contents of {name} ({after}), which the graph uses and the "
        text += "target does not declare: it keeps what pad rows wrote."
        return FindingKind.UNDECLARED_STATE, text
    if change.is_created:
        text = f"capture created {name} ({after}) from pad rows: every replay reads these values, "
        return FindingKind.LAZY_CACHE, f"{text}but a live batch would give others."
    if change.is_replaced:
        text = f"capture replaced {name}, {before}, with {after}: a graph keeps the "
        return FindingKind.REPLACED_BUFFER, f"{text}address that it was captured with."
    if after == RANDOM_STATE:
        text = f"capture drew random numbers from {name}"
    elif before == after:
        text = f"capture changed the contents of {name} ({after})"
    else:
        text = f"capture changed {name} from {before} to {after}"
    if is_replayed:
        text += ", and each replay changes it further: it starts from what pad rows left."
        return FindingKind.WARM_UP_LEAK, text
    return FindingKind.WARM_UP_LEAK, f"{text}: replays do not."
