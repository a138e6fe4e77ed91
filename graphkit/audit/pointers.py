"""What memory a graph holds on to.

Every address in every argument is named: a weight, an input field, declared state, the graph's own
pool. What is left over was either freed, so that a replay reads what somebody else put there, or
is memory that nobody declared, which a replay reads as it was when it was captured. A declared
input that no node reads is the same mistake seen from the other side: a replay ignores it.

Not left over is memory that no tensor holds: a library keeps it for its own work, see ``live``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.unset_bytes import may_be_unset
from graphkit.buffers import fields_of
from graphkit.graphs import Stage
from graphkit.records import Argument, GraphRecord, Node, Pointer
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

_STRAY = ("freed", "external", "host")
_UNDECLARED = (
    "Declare it: as a weight, as state, or as an input field. If the host rewrites it between "
    "replays, it must be written in place."
)
_FREED = (
    "Keep a reference to it for as long as the graph lives, or capture again after replacing it."
)
_DEAD = "Read it in the forward instead of a copy made elsewhere, or capture without the field."


def audit_pointers(target: CaptureTarget, runner: Runner[Any], log: AuditLog) -> None:
    """Check at what every graph of a runner points to. Cheap enough to do again before serving.

    Args:
        target: Says what is declared.
        runner: One of the target's, captured.
        log: Takes what is found.
    """
    live = LiveTensors()
    for size in runner.table:
        with log.check("pointers", runner.mode.name, size) as check:
            record = runner.inspect(size, weights=target.weights)
            judge_pointers(record, check, live)
            _judge_inputs(record, runner, check)


def judge_pointers(record: GraphRecord, check: Check, live: LiveTensors) -> None:
    """Write down what a graph points to and should not."""
    counts: Counter[str] = Counter()
    told: set[int] = set()
    for node, argument, pointer in _pointers(record):
        memory = _memory(argument, pointer, live)
        is_sure = not may_be_unset(node, argument, pointer.offset)
        if is_sure:
            counts[memory] += 1
        # Attribution clears the stack before each operation: what is left over is its own then.
        is_meant = is_sure or bool(node.op)
        if memory in _STRAY and is_meant and pointer.address not in told:
            told.add(pointer.address)
            _found(check, node, argument, pointer, "error" if is_sure else "warning")
    _judge_unreadable(record, check)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    check.text = f"{counts.total()} addresses: {kinds}" if kinds else "no address"


def _memory(argument: Argument, pointer: Pointer, live: LiveTensors) -> str:
    """The kind of memory; some that nobody declared is nobody's."""
    if pointer.memory != "external":
        return pointer.memory
    if not live.contain(pointer.address):
        return "workspace"
    # The recorder's 0-dim tensor that nobody else holds is Python's number, as in rows[:, 3] = 0.5.
    is_scalar = argument.kind == "tensor" and argument.text.partition(" at ")[0].endswith(" []")
    is_number = is_scalar and not live.contain_unrecorded(pointer.address)
    return "number" if is_number else "external"


def _judge_unreadable(record: GraphRecord, check: Check) -> None:
    for node in record.nodes:
        if any(argument.kind == "unreadable" for argument in node.arguments):
            check.report("unreadable argument", "the driver does not give an argument.", node=node)


def _pointers(record: GraphRecord) -> Iterator[tuple[Node, Argument, Pointer]]:
    for node in record.nodes:
        for argument in node.arguments:
            for pointer in argument.pointers:
                yield node, argument, pointer


def _found(check: Check, node: Node, argument: Argument, pointer: Pointer, severity: str) -> None:
    where = f"node {node.index} ({node.short_name})"
    freed = pointer.memory == "freed"
    check.report(
        "freed memory" if freed else "undeclared memory",
        f"{where} points to {_what(pointer)}" + (", which was freed." if freed else "."),
        node=node,
        argument=node.arguments.index(argument),
        offset=pointer.offset,
        advice=_FREED if freed else _UNDECLARED,
        severity=severity,
    )


def _what(pointer: Pointer) -> str:
    """The memory, without its address: reports are the same from run to run."""
    block = pointer.name.partition("+")[0]
    return f"{block} that nobody declared" if pointer.memory != "freed" else block


def _judge_inputs(record: GraphRecord, runner: Runner[Any], check: Check) -> None:
    """A field that batches must bring and no node reads."""
    read = {
        pointer.name.partition("+")[0]
        for node, _, pointer in _pointers(record)
        if pointer.memory == "input" and node.module != Stage.REFRESH
    }
    for field in fields_of(runner.buffers.inputs):
        is_captured = field.name not in runner.buffers.absent
        if is_captured and not field.may_go_unread and field.name not in read:
            check.report(
                "dead input",
                f"no node reads the input {field.name!r}: a replay ignores it.",
                advice=_DEAD,
                field=field.name,
                severity="warning",
            )
