"""Searches for outputs that are wrong with the graph and without it.

A replay of NaN equals the same NaN without a graph, and a replay of a wrapper that drops a window
equals the same wrapper, so no comparison of runs finds either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphkit.audit.audit_log import AuditLog, row_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.models.wrapper import compare_wrapper
from graphkit.records import count_of
from graphkit.records.audit import NOT_CHECKED, Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import even_owner, first_not_finite, not_finite_rows
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget


def audit_finite(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report live rows of sample batches with NaN, infinity, or nothing but -infinity."""
    for size in runner.table:
        live = min(size, runner.table.max_batch_size)
        batch = target.batch(runner.mode, live, SEED)
        with (
            log.check(Audit.FINITE, runner.mode.name, size) as check,
            EqualStateRuns(runner, batch, size) as runs,
        ):
            check.text = f"output of {count_of(live, 'request')}"
            mismatch = first_not_finite(runs.replay(), even_owner(live))
            if not on_any_rank(runner, mismatch is not None):
                continue
            with _first_modules(target.weights, runner.step.forward) as modules:
                runs.unpadded()
            if mismatch is None:
                continue
            where = f", first in the output of module `{modules[0]}`" if modules else ""
            check.report(
                FindingKind.NOT_FINITE_OUTPUT,
                f"{row_text(mismatch, live)} has {mismatch.got} instead of a finite number{where}.",
                cause=mismatch.field,
                field=mismatch.field,
                row=mismatch.row,
                request=mismatch.request,
                module=modules[0] if modules else "",
                after=str(mismatch.got),
            )


@contextmanager
def _first_modules(*roots: Any) -> Iterator[list[str]]:
    """Yield a list that receives the first module whose output is not finite in the block."""
    names: list[str] = []

    def check(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
        if not names and any(len(not_finite_rows(tensor)) for tensor in tensors if tensor.dim()):
            names.append(name)

    seen: set[nn.Module] = set()
    with ExitStack() as stack:
        for root in _modules(roots):
            for name, module in root.named_modules(seen):
                hook = partial(check, name or type(root).__name__)
                stack.callback(module.register_forward_hook(hook).remove)
        yield names


def _modules(roots: Any) -> Iterator[nn.Module]:
    for root in roots:
        for value in root if isinstance(root, (list, tuple)) else (root,):
            if isinstance(value, nn.Module):
                yield value


def audit_wrapper(target: CaptureTarget, log: AuditLog, *, device: str = "auto") -> None:
    """Report the first row whose logits differ from the logits of ``target.model``.

    Raises:
        TargetError: The target or its model cannot be compared, see ``compare_wrapper``.
    """
    with log.check(Audit.WRAPPER) as check:
        if target.model is None:
            check.text = f"{NOT_CHECKED}the target declares no model to compare it with"
            return
        record = compare_wrapper(target, target.model, device=device, tolerance=log.tolerance)
        if record.skipped:
            check.text = NOT_CHECKED + record.skipped
            return
        check.text = f"{count_of(record.rows, 'row')} compared with the model"
        if record.not_reached:
            check.text += f"; no prompt is longer than {', '.join(record.not_reached)}"
        difference = record.difference
        if difference is not None:
            check.report(
                FindingKind.WRAPPER_DIFFERS,
                difference.text,
                advice=difference.advice,
                mode=difference.mode,
                cause="wrapper",
                field="next_token_logits",
                row=difference.row,
                request=difference.request,
                module=difference.module,
                source=difference.source,
                before=str(difference.expected_token),
                after=str(difference.token),
            )
