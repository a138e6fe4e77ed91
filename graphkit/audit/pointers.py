"""Check what memory the nodes of a graph point to.

The walk names every address in every argument: a weight, an input field, declared state, or the
graph's own pool. Other memory was either freed, so that a replay reads what was allocated there
since, or is not declared, so that nothing keeps it in place between replays. A declared input that
no node reads is the opposite mistake: replays ignore it.

Memory that no tensor holds is a library's workspace and is not reported, see ``live_tensors``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check
from graphkit.audit.finding_text import argument_text
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.unset_bytes import may_be_unset
from graphkit.buffers import fields_of
from graphkit.graphs import Stage
from graphkit.records import Argument, GraphRecord, Node, Pointer
from graphkit.runners import Runner
from graphkit.targets import CaptureTarget

_REPORTED = ("freed", "external", "host")
_UNDECLARED_ADVICE = (
    "Declare it as weights, as mutable_state or as an input field. If the host changes it between "
    "replays, write it in place."
)
_FREED_ADVICE = (
    "Keep a reference to it for as long as the graph lives, or capture again after replacing it."
)
_DEAD_ADVICE = "Read the field in the forward, not a copy of it, or capture without the field."
_UNREADABLE_ADVICE = "Check the memory that this kernel uses by hand."


def audit_pointers(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report undeclared and freed memory, and unread inputs, of every graph of a runner.

    Takes milliseconds per graph, so it can be repeated before serving.

    Args:
        target: Declares the memory.
        runner: A runner of the target, captured.
        log: Collects the findings.
    """
    live = LiveTensors()
    for size in runner.table:
        with log.check("pointers", runner.mode.name, size) as check:
            record = runner.inspect(size, weights=target.weights)
            check_pointers(record, check, live)
            _check_inputs(record, runner, check)


def check_pointers(record: GraphRecord, check: Check, live: LiveTensors) -> None:
    """Report the memory that a graph points to and should not; count all by kind."""
    counts: Counter[str] = Counter()
    reported: set[int] = set()
    for node, index, pointer in _pointers(record):
        argument = node.arguments[index]
        memory = _memory_kind(argument, pointer, live)
        is_set = not may_be_unset(node, argument, pointer.offset)
        if is_set:
            counts[memory] += 1
        # Attribution clears the stack before each operation, so leftovers are its own.
        is_relevant = is_set or bool(node.op)
        if memory in _REPORTED and is_relevant and pointer.address not in reported:
            reported.add(pointer.address)
            _report(check, node, index, pointer, "error" if is_set else "warning")
    for node in record.nodes:
        unreadable = [i for i, each in enumerate(node.arguments) if each.kind == "unreadable"]
        if unreadable:
            check.report(
                "unreadable argument",
                f"the driver does not return {argument_text(node, unreadable[0])}: its pointers "
                "are not checked.",
                node=node,
                advice=_UNREADABLE_ADVICE,
            )
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    total = counts.total()
    check.text = f"{total} {'address' if total == 1 else 'addresses'}{': ' if kinds else ''}{kinds}"


def _memory_kind(argument: Argument, pointer: Pointer, live: LiveTensors) -> str:
    """Return the kind of memory; ``workspace`` and ``number`` need no declaration."""
    if pointer.memory != "external":
        return pointer.memory
    if not live.contain(pointer.address):
        return "workspace"
    # The recorder keeps a Python number, as in rows[:, 3] = 0.5, as a 0-dim tensor of its own.
    is_scalar = argument.kind == "tensor" and argument.text.partition(" at ")[0].endswith(" []")
    is_number = is_scalar and not live.contain_unrecorded(pointer.address)
    return "number" if is_number else "external"


def _pointers(record: GraphRecord) -> Iterator[tuple[Node, int, Pointer]]:
    """Yield node, index of the argument, and pointer."""
    for node in record.nodes:
        for index, argument in enumerate(node.arguments):
            for pointer in argument.pointers:
                yield node, index, pointer


def _report(check: Check, node: Node, argument: int, pointer: Pointer, severity: str) -> None:
    is_freed = pointer.memory == "freed"
    place = argument_text(node, argument, pointer.offset)
    block = pointer.name.partition("+")[0]  # without addresses, which differ from run to run
    check.report(
        "freed memory" if is_freed else "undeclared memory",
        f"{place} points to memory that was freed ({block})."
        if is_freed
        else f"{place} points to memory that the target does not declare ({block}).",
        node=node,
        argument=argument,
        offset=pointer.offset,
        advice=_FREED_ADVICE if is_freed else _UNDECLARED_ADVICE,
        severity=severity,
    )


def _check_inputs(record: GraphRecord, runner: Runner[Any, Any], check: Check) -> None:
    """Report captured input fields that no node reads."""
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
                f"no node reads the input field `{field.name}`: replays ignore its values.",
                advice=_DEAD_ADVICE,
                field=field.name,
                severity="warning",
            )
