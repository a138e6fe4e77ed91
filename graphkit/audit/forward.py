"""Search for side effects of a forward: writes into its inputs and random draws.

The audit watches a padded run without a graph: writes into the inputs by operations of torch or by
other kernels, and random draws. The graph is captured from the same code, so that operation and
line identify its node. A kernel that no operation launched is found by replaying the first nodes of
the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, NotChecked, row_facts
from graphkit.audit.bits import checksum
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.node_switches import ReplayGraph, first_node_after
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.forward_trace import ForwardWatch, InputWrite
from graphkit.graphs import NodeOrigin
from graphkit.records import GraphRecord, Node, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.targets import CaptureTarget


def audit_forward(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report writes of a forward into its inputs, and random draws outside of a sampler."""
    for size in runner.table:
        batch = target.batch(runner.mode, min(size, runner.table.max_batch_size), SEED)
        with (
            log.check(Audit.FORWARD, runner.mode.name, size) as check,
            EqualStateRuns(runner, batch, size) as runs,
        ):
            watch = ForwardWatch(runner.step, runner.device, target.weights)
            with watch.watching():
                runs.padded()
            check.text = (
                f"{count_of(watch.num_ops, 'operation')}: "
                f"{count_of(len(watch.writes), 'input')} written, "
                f"{count_of(len(watch.draws), 'random draw')}"
            )
            if watch.writes or watch.draws:
                record = runner.inspect(size, weights=target.weights)
                for write in watch.writes:
                    _report_write(check, write, _writing_node(runs, record, write))
                _report_draws(check, watch.draws, record)


def _report_write(check: Check, write: InputWrite, node: Node | None) -> None:
    origin, change = write.origin, write.change
    facts: dict[str, Any] = {"field": write.field, "names": (write.field,), "cause": write.field}
    if origin is not None:
        facts |= {"module": origin.module, "source": origin.source, "cause": origin.source}
    effect = "It left the values of this batch as they were."
    if change is not None:
        facts |= row_facts(change)
        effect = (
            f"Row {change.row} (request {change.request}) is {facts['after']} after the forward "
            f"and {facts['before']} before it."
        )
    check.report(
        FindingKind.WRITTEN_INPUT,
        f"{_name(node, origin)} writes into the input field `{write.field}`. {effect}",
        node=node,
        **facts,
    )


def _report_draws(check: Check, draws: Sequence[NodeOrigin], record: GraphRecord) -> None:
    """Report one note per operation and line, which many layers may share."""
    for (op, source), count in Counter((draw.op, draw.source) for draw in draws).items():
        first = next(draw for draw in draws if (draw.op, draw.source) == (op, source))
        node = _find_node(first, record)
        more = f" It does so {count} times." if count > 1 else ""
        check.report(
            FindingKind.RANDOM_DRAW,
            f"{_name(node, first)} draws random numbers outside of a sampler: replays of a batch "
            f"give different results.{more}",
            node=node,
            module=first.module,
            source=source,
            cause=f"{op} {source}",
        )


def _name(node: Node | None, origin: NodeOrigin | None) -> str:
    if node is not None:
        return f"`{node.short_name}` (node {node.index})"
    return "the forward" if origin is None else f"`{origin.op.partition('::')[2]}`"


def _writing_node(runs: EqualStateRuns, record: GraphRecord, write: InputWrite) -> Node | None:
    """Return the node that writes an input field; ``None`` if it cannot be found."""
    runner = runs.runner
    if write.origin is not None:
        return _find_node(write.origin, record)
    is_stored = any(layout.name == write.field for layout in runner.buffers.layouts)
    if not is_stored or runner.group is not None:  # ranks would replay other parts of their graphs
        return None
    size, wait = runs.padded_batch_size, runner.backend.wait_for_device

    def look(run: Callable[[ReplayGraph], object]) -> int:
        run(runs.replay)
        return checksum(runner.buffers.live_rows(write.field, size))

    try:
        return first_node_after(runner.graphs[size], record.nodes, wait, look)
    except NotChecked:
        return None


def _find_node(origin: NodeOrigin, record: GraphRecord) -> Node | None:
    """Return the first node that an operation created; compiled functions have other nodes."""
    facts = origin.op, origin.module, origin.source
    return next((n for n in record.nodes if (n.op, n.module, n.source) == facts), None)
