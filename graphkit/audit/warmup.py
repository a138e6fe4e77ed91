"""Search for what capturing a forward changes on the host, and for what a forward leaves there.

A capture runs the forward a few times on pad rows; replays run no Python. Declared state is
restored, but other effects of those runs stay: a counted step, a flag, a replaced buffer, or a
cache that was built from pads and that every replay reads.

A side output is a tensor that a forward leaves in an object, such as hidden states: after a replay
the object has the tensor of the last capture or eager step. The forward runs without a graph on two
batches. A place that has another tensor with other content after the second run is a side output.
The same tensor after both runs is a cache or a buffer that is written in place, and equal content
is a constant. A tensor of the inputs is no side output: each replay refreshes it. One that the
forward reads itself, as layers read a context object, is reported as a note: others may read it,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.bits import same_bits
from graphkit.audit.changing_lines import changing_lines
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.forward_objects import reads
from graphkit.audit.host_objects.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots
from graphkit.audit.object_snapshot import ABSENT, RANDOM_STATE, ObjectChange, ObjectSnapshot
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs.equal_state_runs import restored
from graphkit.audit.runs.teacher_forcing import wrapped_forward
from graphkit.graphs import CapturedGraph, inspect_graph, named_tensors
from graphkit.graphs.operations import storage_id
from graphkit.records import count_of, tensor_text
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.known_memory import attribute_tensors
from graphkit.runners.targets import CaptureTarget

_PLAIN = torch.Tensor, nn.Parameter
_Held = dict[str, tuple[Container, Any, torch.Tensor]]
"""Tensors by name, each with the container and the key that hold it."""


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
            is_state, is_replayed = change.name in state, change.name in replayed
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
    """Captures of a runner, compared with what the host held ``before`` them."""

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


class _Left(NamedTuple):
    """What a run of a forward has left, its inputs by storage, and the walk over the forward."""

    tensors: _Held
    inputs: dict[int, torch.Tensor]
    objects: ReachableObjects


def report_side_outputs(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report the tensors that the forward leaves in objects and that replays do not set.

    Restores declared state, and what the forward holds on the host.
    """
    sizes = {runner.table.largest, runner.table.sizes[0]}
    batches = [target.batch(runner.mode, size, SEED + size) for size in sorted(sizes, reverse=True)]
    batches += [target.batch(runner.mode, runner.table.largest, SEED + 1000)][: 2 - len(batches)]
    roots = walk_roots(runner.step.forward)
    before = ReachableObjects(roots, SEARCH_DEPTH)
    try:
        with restored(runner):
            first, second = (_left_by(runner, roots, batch) for batch in batches)
            outputs = _side_outputs(first, second)
            before.restore()
            lines = _lines_of_outputs(runner, batches, outputs)
    finally:
        before.restore()
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, (container, key, _) in outputs.items():
        is_read = reads(second.objects.functions, container, key)
        groups.setdefault((lines.get(name, ""), is_read), []).append(name)
    if not groups:
        return
    with log.check(Audit.WARMUP, runner.mode.name) as check:
        check.text = f"ran the forward on two batches: it leaves {len(outputs)} tensors in objects"
        for (line, is_read), names in groups.items():
            tensor = outputs[names[0]][2]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            text = (
                f"each call of the forward leaves a tensor in `{names[0]}` "
                f"({tensor_text(tensor.dtype, tensor.shape)}){more}. Replays run no Python: what "
                "it holds after them is of the last capture or eager step."
            )
            if is_read:
                text += " The forward reads it itself, so it may be for its own use alone."
            check.report(
                FindingKind.SIDE_OUTPUT,
                text,
                severity="note" if is_read else "error",
                names=tuple(names),
                source=line,
                cause=line or names[0],
            )


def _left_by(runner: Runner[Any, Any], roots: dict[str, Any], batch: Any) -> _Left:
    """Run the padded step without a graph, and return the tensors that the forward then holds."""
    inputs: dict[int, torch.Tensor] = {}  # kept, so that no other storage gets their ids

    def call(forward: Any, given: Any) -> Any:
        inputs.update((storage_id(tensor), tensor) for _, tensor in attribute_tensors(given, 3))
        return forward(given)

    with runner.step.wrapped(lambda forward: wrapped_forward(forward, call)):
        runner.run_padded(batch)
    objects = ReachableObjects(roots, SEARCH_DEPTH)
    tensors = {
        container.name(key): (container, key, tensor)
        for container, key, tensor in objects.values_of(torch.Tensor)
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    }
    return _Left(tensors, inputs, objects)


def _side_outputs(first: _Left, second: _Left) -> _Held:
    """Return what the second run left and the first did not, except constants and inputs."""
    held = {id(tensor) for _, _, tensor in first.tensors.values()}
    outputs: _Held = {}
    for name, (container, key, tensor) in second.tensors.items():
        if id(tensor) in held or storage_id(tensor) in second.inputs:
            continue
        _, _, other = first.tensors.get(name, (None, None, None))
        if other is None or not same_bits(tensor, other):
            outputs[name] = container, key, tensor
    return outputs


def _lines_of_outputs(
    runner: Runner[Any, Any], batches: Sequence[Any], outputs: _Held
) -> dict[str, str]:
    """Return the lines that leave tensors in the second of two runs without a graph, by name."""
    if not outputs:
        return {}
    last: dict[str, Any] = {}

    def read(name: str, container: Container, key: Any) -> Any:
        now = container.find(key)
        if now is not None:  # a list that is emptied first holds nothing: that is not the line
            last[name] = now
        return last.get(name)

    values = {name: partial(read, name, *place[:2]) for name, place in outputs.items()}
    runner.run_padded(batches[0])
    return changing_lines(lambda: runner.run_padded(batches[1]), values)
