"""State of requests that a step writes and the runner does not declare, such as a KV cache.

Runs of a batch can be compared only if they begin from the same state, so what is not declared
makes every comparison fail. Audits find it first, report it, and restore it like declared state.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.changing_lines import changing_lines
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.reachable_objects import ReachableObjects, walk_roots
from graphkit.audit.row_axes import row_axes, rows_of_batch
from graphkit.audit.runs.equal_state_runs import EqualStateRuns, restored
from graphkit.audit.runs.forward_trace import Weights
from graphkit.graphs.operations import storage_id
from graphkit.graphs.snapshot import restore_problem
from graphkit.records import tensor_text
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget

COPY_BUDGET = 1 << 30
"""Bytes of undeclared tensors that are copied, smallest first. Weights that are plain tensors look
like state until a replay has run, and a model may have many times as many."""


def undeclared_state(
    runner: Runner[Any, Any], batch: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors by name in which a replay changes the rows of its requests.

    Only tensors that the forward reaches and the runner does not declare. A tensor with other
    changes, such as a counter or a maximum over all steps, is not state of requests. Restores what
    the replay changes.

    Returns:
        The state, and the names of the tensors that were not searched, see ``undeclared_tensors``.
    """
    searched, left = undeclared_tensors(runner)
    size, page_size = runner.table.fit(batch.batch_size), runner.sizes.page_size
    with restored(runner, searched) as start:

        def shift() -> None:
            for name, tensor in searched.items():
                tensor.copy_(_shifted(start.saved[name]))

        EqualStateRuns(runner, batch, size, start, prepare=shift).replay()
        state = {
            name: tensor
            for name, tensor in searched.items()
            if _is_state_of_requests(tensor, _shifted(start.saved[name]), batch, page_size)
        }
    return state, left


def declare_for_audits(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Extend the state of a captured runner by undeclared state, and report what is new."""
    batch = target.batch(runner.mode, runner.table.largest, SEED)
    state, left = undeclared_state(runner, batch)
    runner.mutable_state |= state
    known = (finding for finding in log.findings if finding.kind == FindingKind.UNDECLARED_STATE)
    reported = {name for finding in known for name in finding.names}
    new = {name: tensor for name, tensor in state.items() if name not in reported}
    if not new and not left:
        return
    values = {name: partial(new.get, name) for name in new}
    with restored(runner):
        lines = changing_lines(lambda: runner.run_padded(batch), values)
    with log.check(Audit.WARMUP, runner.mode.name) as check:
        check.text = "compared the state of requests before and after a replay"
        if left:
            check.text += (
                f"; not searched, beyond {COPY_BUDGET >> 20} MiB of copies: {', '.join(left)}"
            )
        for name, tensor in new.items():
            text = (
                f"a replay changes the rows of its requests in `{name}` "
                f"({tensor_text(tensor.dtype, tensor.shape)}), which the target does not declare."
            )
            check.report(
                FindingKind.UNDECLARED_STATE,
                text,
                names=(name,),
                source=lines.get(name, ""),
                cause=FindingKind.UNDECLARED_STATE.value,
            )


def undeclared_tensors(
    runner: Runner[Any, Any], weights: Weights = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors by name that the forward reaches, except parameters and declared ones.

    Returns:
        The smallest tensors, ``COPY_BUDGET`` bytes together, and the names of the others.
    """
    names = runner.memory_names(weights)
    known = {storage_id(tensor) for kind in names.values() for tensor in kind.values()}
    by_place: dict[Any, tuple[str, torch.Tensor]] = {}
    objects = ReachableObjects(walk_roots(runner.step.forward))
    for container, key, value in objects.values_of(torch.Tensor):
        is_weight = isinstance(value, nn.Parameter)
        is_dense = not is_weight and value.layout is torch.strided and not value.is_meta
        if is_dense and storage_id(value) not in known and not restore_problem(value):
            place = value.data_ptr(), value.shape, value.stride()
            by_place.setdefault(place, (container.name(key), value))
    tensors = dict(by_place.values())
    by_size = sorted(tensors, key=lambda name: tensors[name].nbytes)
    ends = accumulate(tensors[name].nbytes for name in by_size)
    left = [name for name, end in zip(by_size, ends, strict=True) if end > COPY_BUDGET]
    return {name: tensors[name] for name in tensors if name not in left}, left


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return other numbers, so that a step that writes the same rows again changes them."""
    return (tensor.float() + 1).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _is_state_of_requests(
    now: torch.Tensor, before: torch.Tensor, batch: Any, page_size: int
) -> bool:
    rows = rows_of_batch(batch, page_size)
    axes = [axis for axis in row_axes(now, page_size, rows) if axis.kind != "batch"]
    if not axes or not bool(axes[0].changed_rows(now, before).any()):
        return False
    return any(not bool(axis.stray_rows(now, before, rows).any()) for axis in axes)
