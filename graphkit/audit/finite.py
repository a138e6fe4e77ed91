"""Search for outputs that are not finite.

A replay of NaN equals the same NaN without a graph, so no comparison of runs finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphkit.audit.audit_log import AuditLog
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.places import row_text
from graphkit.audit.ranks import on_any_rank
from graphkit.audit.runs import EqualStateRuns
from graphkit.records import count_of
from graphkit.records.audit import Audit
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

    def hook(name: str) -> Any:
        def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
            if not names and any(
                len(not_finite_rows(tensor)) for tensor in tensors if tensor.dim()
            ):
                names.append(name)

        return check

    seen: set[int] = set()
    with ExitStack() as stack:
        for root in _modules(roots):
            for name, module in root.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    handle = module.register_forward_hook(hook(name or type(root).__name__))
                    stack.callback(handle.remove)
        yield names


def _modules(roots: Any) -> Iterator[nn.Module]:
    for root in roots:
        for value in root if isinstance(root, (list, tuple)) else (root,):
            if isinstance(value, nn.Module):
                yield value
