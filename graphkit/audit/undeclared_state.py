"""State of requests that a step writes and the runner does not declare, such as a KV cache.

Runs of a batch can be compared only if they begin from the same state, so what is not declared
makes every comparison fail. Audits find it first, report it, and restore it like declared state.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.changing_lines import changing_lines
from graphkit.audit.padding_cause import Weights
from graphkit.audit.row_axes import row_axes, rows_of_batch
from graphkit.graphs import StateSnapshot
from graphkit.graphs.recorded_op import storage_id
from graphkit.graphs.snapshot import restore_problem
from graphkit.runners import Runner
from graphkit.runners.reachable_objects import ReachableObjects, walk_roots
from graphkit.targets import CaptureTarget
from graphkit.verify.comparison import restorable_state

KIND = "undeclared state"
ADVICE = "Declare it as mutable_state: captures and audits then restore its contents."
_SEED = 60


def undeclared_state(runner: Runner[Any, Any], batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name in which a replay changes the rows of its requests.

    Only tensors that the forward reaches and the runner does not declare. A tensor with other
    changes, such as a counter or a maximum over all steps, is not state of requests. Restores what
    the replay changes.

    Args:
        runner: Captured.
        batch: Inputs of the runner's mode.
    """
    reached = undeclared_tensors(runner)
    restorable = restorable_state(runner) | reached
    with torch.no_grad(), runner.without_stats(), StateSnapshot(restorable, runner.device) as start:
        for name, tensor in reached.items():
            tensor.copy_(_shifted(start.saved[name]))
        runner.replay(batch)
        return {
            name: tensor
            for name, tensor in reached.items()
            if _is_state_of_requests(
                tensor, _shifted(start.saved[name]), batch, runner.sizes.page_size
            )
        }


def declare_for_audits(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Add undeclared state to that of a captured runner, and report it unless it was reported.

    Args:
        target: Makes the batch.
        runner: Its ``mutable_state`` is extended.
        log: Receives the finding.
    """
    batch = target.batch(runner.mode, runner.table.largest, _SEED)
    found = undeclared_state(runner, batch)
    runner.mutable_state |= found
    reported = {name for each in log.findings if each.kind == KIND for name in each.names}
    new = {name: found[name] for name in found if name not in reported}
    if new:
        lines = _lines(runner, batch, new)
        with log.check("warmup", runner.mode.name) as check:
            check.text = "compared the state of requests before and after a replay"
            for name in new:
                dtype = str(found[name].dtype).removeprefix("torch.")
                text = (
                    f"a replay changes the rows of its requests in `{name}` ({dtype} "
                    f"{list(found[name].shape)}), which the target does not declare."
                )
                check.report(
                    KIND,
                    text,
                    advice=ADVICE,
                    severity="warning",
                    names=(name,),
                    source=lines.get(name, ""),
                    cause=KIND,
                )


def undeclared_tensors(
    runner: Runner[Any, Any], weights: Weights = None
) -> dict[str, torch.Tensor]:
    """Return the tensors by name that the forward reaches, except parameters and declared ones.

    Args:
        runner: Captured.
        weights: Tensors to leave out: the model, or its weights by name.
    """
    names = runner.memory_names(weights)
    known = {storage_id(each) for kind in names.values() for each in kind.values()}
    found: dict[Any, tuple[str, torch.Tensor]] = {}
    for container, values in ReachableObjects(walk_roots(runner.step.forward)).entries:
        for key, value in values.items():
            is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            is_dense = is_tensor and value.layout is torch.strided and not value.is_meta
            if is_dense and storage_id(value) not in known and not restore_problem(value):
                place = value.data_ptr(), value.shape, value.stride()
                found.setdefault(place, (container.name(key), value))
    return dict(found.values())


def _lines(
    runner: Runner[Any, Any], batch: Any, tensors: dict[str, torch.Tensor]
) -> dict[str, str]:
    """Return the lines that write tensors in a run without a graph, by name. Restores them."""
    values = {name: partial(tensors.get, name) for name in tensors}
    state = restorable_state(runner)
    with torch.no_grad(), runner.without_stats(), StateSnapshot(state, runner.device):
        return changing_lines(lambda: runner.run_padded(batch), values)


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
