"""Search for side outputs: tensors that a forward leaves in an object, such as hidden states.

Replays run no Python, so that after a replay the object has the tensor of the last capture or eager
step. The forward runs without a graph on two batches. A place that has another tensor with other
content after the second run is a side output. The same tensor after both runs is a cache or a
buffer that is written in place, and equal content is a constant.

A tensor of the inputs is no side output: each replay refreshes it. One that the forward reads
itself, as layers read a context object, is reported as a note: others may read it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from graphkit.audit.host_objects.host_numbers import read_word
from graphkit.audit.host_objects.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots
from graphkit.audit.runs.equal_state_runs import restored
from graphkit.audit.runs.teacher_forcing import wrapped_forward
from graphkit.graphs.operations import storage_id
from graphkit.records import tensor_text
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.known_memory import attribute_tensors
from graphkit.runners.targets import CaptureTarget

_PLAIN = torch.Tensor, nn.Parameter
_Held = dict[str, tuple[Container, Any, torch.Tensor]]
"""Tensors by name, each with the container and the key that hold it."""


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
            lines = _lines(runner, batches, outputs)
    finally:
        before.restore()
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, (container, key, _) in outputs.items():
        is_read = reads(second.objects.functions, read_word(container, key))
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


def _lines(runner: Runner[Any, Any], batches: Sequence[Any], outputs: _Held) -> dict[str, str]:
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
