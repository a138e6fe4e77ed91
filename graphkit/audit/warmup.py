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
from graphkit.graphs import CapturedGraph, StateSnapshot, inspect_graph, named_tensors
from graphkit.records import count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED, restorable_state
from graphkit.runners.targets import CaptureTarget


def audit_warmup(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report what capturing a runner's graphs changes.

    Restores what the forward holds on the host. Lazy caches are found only if the forward has not
    run before.

    Raises:
        CaptureError: The forward cannot be captured.
    """
    with log.check(Audit.WARMUP, runner.mode.name) as check:
        before = _snapshot(target, runner)
        try:
            changes = _changes(target, runner, before)
            values = _values(target, runner, changes)
            state, replayed = _state_and_replayed(target, runner, changes)
            constant = _constant_caches(target, runner, before, changes)
            followed = _filled_from_inputs(target, runner, before, changes)
            changes = [change for change in changes if change.name not in constant | followed]
            before.restore()
            names = [change.name for change in changes if change.name in values]
            lines = _lines(runner, {name: values[name] for name in names})
        finally:
            before.restore()
        for change in changes:
            is_state = change.name in state
            is_replayed = change.name in replayed
            kind, text = _state_finding(change) if is_state else _finding(change, is_replayed)
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


def _snapshot(target: CaptureTarget, runner: Runner[Any, Any]) -> ObjectSnapshot:
    tensors = {**(target.mutable_state or {}), **named_tensors(target.weights)}
    return ObjectSnapshot(walk_roots(target.forwards[runner.mode]), tensors)


def _changes(
    target: CaptureTarget, runner: Runner[Any, Any], before: ObjectSnapshot
) -> list[ObjectChange]:
    """Return what a capture on pads changes.

    Tensors in the graphs' own memory are left out, which each call makes anew, and tensors of the
    inputs and others that the runner knows: a graph may read those at the address that they have.
    So are tensors that are held no more and that no graph reads.
    """
    with runner.recapture() as graphs:
        changes = list(before.changes(_snapshot(target, runner)))
        written = _addresses(graphs, "pool") if changes else set()
        read = _addresses(graphs, "external") if changes else set()
    known = [
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for tensors in runner.memory_names().values()
        for tensor in tensors.values()
    ]

    def is_known(change: ObjectChange) -> bool:
        if change.is_replaced and change.after is ABSENT:  # its object was replaced
            return change.before.address not in read
        address = change.after.address or 0
        is_other = change.is_created or change.is_replaced
        return is_other and any(begin <= address < begin + size for begin, size in known)

    return [
        change for change in changes if change.after.address not in written and not is_known(change)
    ]


def _values(
    target: CaptureTarget, runner: Runner[Any, Any], changes: Sequence[ObjectChange]
) -> dict[str, Callable[[], Any]]:
    """Return functions that read the changed objects, by name. They outlast a restore."""
    names = {change.name for change in changes}
    tensors = {**(target.mutable_state or {}), **named_tensors(target.weights)}
    values: dict[str, Callable[[], Any]] = {
        name: partial(tensors.get, name) for name in names & tensors.keys()
    }
    for container, held in ReachableObjects(walk_roots(target.forwards[runner.mode])).entries:
        for key in held:
            if container.name(key) in names:
                values.setdefault(container.name(key), partial(container.get, key))
    return values


def _lines(runner: Runner[Any, Any], values: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the lines that change the objects in a capture, by name."""
    if not on_any_rank(runner, bool(values)):
        return {}

    def capture() -> None:
        with runner.recapture():
            pass

    return changing_lines(capture, values)


def _state_and_replayed(
    target: CaptureTarget, runner: Runner[Any, Any], changes: Sequence[ObjectChange]
) -> tuple[set[str], set[str]]:
    """Capture again and replay, to find what changes the same objects again.

    Returns:
        Names of tensors that the graphs use and a second capture leaves alike, such as a KV cache:
        each capture writes the same rows of padding. Then names of what a replay changes, too, such
        as a counter on the device.
    """
    in_place = [change for change in changes if not (change.is_created or change.is_replaced)]
    if not on_any_rank(runner, bool(in_place)):
        return set(), set()
    with runner.recapture() as graphs:
        again = _snapshot(target, runner).summaries
        used = _addresses(graphs, "external") - {None}
        runner.make_replayer(graphs).pads(max(graphs))
        later = _snapshot(target, runner).summaries
    contents = {change.name: again.get(change.name, ABSENT).content for change in in_place}
    state = {
        change.name
        for change in in_place
        if change.after.address in used and contents[change.name] == change.after.content
    }
    return state, {n for n in contents if later.get(n, ABSENT).content != contents[n]} - state


def _constant_caches(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    before: ObjectSnapshot,
    changes: Sequence[ObjectChange],
) -> set[str]:
    """Return the names of new objects that a capture on live batches creates equally."""
    created = [change for change in changes if change.is_created]
    if not on_any_rank(runner, bool(created)):
        return set()

    def live_batch(size: int) -> Any:
        return target.batch(runner.mode, min(size, target.sizes.max_batch_size), SEED)

    before.restore()
    with runner.recapture(live_batch):
        again = _snapshot(target, runner).summaries
    return {
        change.name
        for change in created
        if again.get(change.name, ABSENT).content == change.after.content
    }


def _filled_from_inputs(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    before: ObjectSnapshot,
    changes: Sequence[ObjectChange],
) -> set[str]:
    """Return the names of host values that each forward sets from its inputs, whatever they were.

    As in a context object: a run of another size leaves another value, and one of the first size
    the same value again. A counter and a flag do not behave so.
    """
    candidates = [change.name for change in changes if change.after.address is None]
    if not on_any_rank(runner, bool(candidates)):
        return set()
    largest, smallest = runner.table.largest, runner.table.sizes[0]
    run_other = runner.run_padded if smallest < largest else runner.fall_back
    runs = (runner.run_padded, largest), (run_other, 1), (runner.run_padded, largest)
    state, left = restorable_state(runner), list[dict[str, Any]]()
    before.restore()
    with torch.no_grad(), runner.without_stats(), StateSnapshot(state, runner.device):
        for run, size in runs:
            run(target.batch(runner.mode, min(size, target.sizes.max_batch_size), SEED))
            summaries = _snapshot(target, runner).summaries
            left.append({name: summaries.get(name, ABSENT).content for name in candidates})
    first, other, again = left
    return {name for name in candidates if first[name] == again[name] != other[name]}


def _addresses(graphs: Mapping[int, CapturedGraph], memory: str) -> set[int | None]:
    """Return the addresses in one kind of memory that the nodes of graphs use."""
    nodes = (node for graph in graphs.values() for node in inspect_graph(graph).nodes)
    pointers = (p for node in nodes for argument in node.arguments for p in argument.pointers)
    return {pointer.address for pointer in pointers if pointer.memory == memory}


def _state_finding(change: ObjectChange) -> tuple[FindingKind, str]:
    """Return kind and text of a change to a tensor that the graph uses, too."""
    text = (
        f"capture changed the contents of `{change.name}` ({change.after.text}), which the graph "
        "uses and the target does not declare: it keeps what pad rows wrote."
    )
    return FindingKind.UNDECLARED_STATE, text


def _finding(change: ObjectChange, is_replayed: bool) -> tuple[FindingKind, str]:
    """Return kind and text of a change, which a replay may make as well."""
    name, before, after = f"`{change.name}`", change.before.text, change.after.text
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
