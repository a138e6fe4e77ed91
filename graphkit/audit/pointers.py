"""Check what memory the nodes of a graph point to.

The walk names every address in every argument: a weight, an input field, declared state, or the
graph's own pool. Other memory was either freed, so that a replay reads what was allocated there
since, or a live Python object holds it. The latter is not an error: a note lists where the objects
are found. A declared input that no node reads is the opposite mistake: replays ignore it.

Memory that no tensor holds is a library's workspace and is not reported, see ``live_tensors``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphkit.audit.audit_log import AuditLog, Check, argument_text
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.reachable_objects import walk_roots
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.replayable_graph import Reference, distinct, references
from graphkit.buffers import fields_of
from graphkit.graphs import Stage, named_tensors
from graphkit.records import GraphRecord, count_of
from graphkit.records.audit import Audit
from graphkit.runners import Runner
from graphkit.runners.targets import CaptureTarget

_FOR_ATTENTION = ("seq_lens", "positions", "out_cache_loc")
"""Fields without a meaning for a model of recurrent layers alone."""


def audit_pointers(target: CaptureTarget, runner: Runner[Any, Any], log: AuditLog) -> None:
    """Report undeclared and freed memory, and unread inputs, of every graph of a runner.

    Takes milliseconds per graph, so it can be repeated before serving.
    """
    live = LiveTensors(walk_roots(target.forwards[runner.mode]))
    for size in runner.table:
        with log.check(Audit.POINTERS, runner.mode.name, size) as check:
            declared = {**named_tensors(target.weights), **target.resolved_persistent_tensors()}
            record = runner.inspect(size, weights=declared)
            check_pointers(record, check, live)
            _check_inputs(record, runner, check)


def check_pointers(record: GraphRecord, check: Check, live: LiveTensors) -> None:
    """Report the memory that a graph points to and should not; count all by kind."""
    undeclared: list[Reference] = []

    def look(reference: Reference) -> Seen:
        memory = _memory_kind(reference, live)
        # Attribution clears the stack before each operation, so leftovers are its own.
        is_relevant = reference.is_set or bool(reference.node.op)
        if memory == "external" and is_relevant:
            undeclared.append(reference)
        is_wrong = memory in ("freed", "host") and is_relevant
        return memory if reference.is_set else "", _error(reference) if is_wrong else None

    report_pointers(record, distinct(references(record)), look, check)
    if undeclared:
        addresses = [reference.pointer.address for reference in undeclared]
        undeclared[0].report(
            check,
            FindingKind.UNDECLARED_MEMORY,
            "points to memory that the target does not declare. Live Python objects hold it.",
            names=tuple(filter(None, dict.fromkeys(live.names(addresses)))),
            cause="memory of live objects",
        )


Error = tuple[FindingKind, str, Mapping[str, Any]]
"""Kind and text of a finding about an address, and other attributes of it."""
Seen = tuple[str, Error | None]
"""Kind of the memory at an address, empty if it does not count, and what is wrong with it."""


def report_pointers(
    record: GraphRecord,
    addresses: Sequence[Reference],
    look: Callable[[Reference], Seen],
    check: Check,
    where: str = "",
) -> None:
    """Report what is wrong with addresses of a graph, and arguments that cannot be checked.

    The text of the check becomes the number of addresses by kind of memory, and ``where`` they are.
    """
    counts: Counter[str] = Counter()
    for reference in addresses:
        kind, error = look(reference)
        counts[kind] += 1
        if error is not None:
            reference.report(check, *error[:2], **error[2])
    for node in record.nodes:
        for index, argument in enumerate(node.arguments):
            is_copied = node.kind == "memcpy" and argument.name in ("target", "source")
            text = argument_text(node, index)
            if argument.kind == "unreadable":
                text = f"the driver does not return {text}: its pointers are not checked."
                check.report(FindingKind.UNREADABLE_ARGUMENT, text, node=node)
                break
            if is_copied and not argument.pointers:  # the walk finds no known memory there
                text += " is host memory that is not pinned: every replay copies what is there at "
                text += "that time, and waits for the host."
                kind = FindingKind.PAGEABLE_HOST_MEMORY
                check.report(kind, text, node=node, argument=index)
    del counts[""]
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    total = count_of(counts.total(), "address")
    check.text = f"{total}{where}{': ' if kinds else ''}{kinds}"


def _memory_kind(reference: Reference, live: LiveTensors) -> str:
    """Return the kind of memory; ``workspace`` and ``number`` need no declaration."""
    pointer, argument = reference.pointer, reference.node.arguments[reference.argument]
    if pointer.memory not in ("external", "host"):
        return pointer.memory
    if not live.contain(pointer.address):
        return "workspace" if pointer.memory == "external" else "host"
    if live.contain_unrecorded(pointer.address):
        return "external"
    # The recorder keeps a Python number, as in rows[:, 3] = 0.5, as a 0-dim tensor of its own.
    # Other tensors that it alone keeps would be freed without it.
    is_scalar = argument.kind == "tensor" and argument.text.partition(" at ")[0].endswith(" []")
    return "number" if is_scalar else "freed"


def _error(reference: Reference) -> Error:
    """Return what is wrong with memory that was freed, or that the device cannot rely on."""
    pointer = reference.pointer
    block = pointer.name.partition("+")[0]  # without addresses, which differ from run to run
    kind, state = FindingKind.FREED_MEMORY, f"was freed ({block})"
    if pointer.memory == "external":
        state = "was freed: only the recorded graph still holds it"
    elif pointer.memory == "host":
        kind, state = FindingKind.UNOWNED_HOST_MEMORY, f"no tensor of the target holds ({block})"
    severity = "error" if reference.is_set else "warning"
    advice = FindingKind.FREED_MEMORY.advice
    return kind, f"points to memory that {state}.", {"severity": severity, "advice": advice}


def _check_inputs(record: GraphRecord, runner: Runner[Any, Any], check: Check) -> None:
    """Report captured input fields that no node reads."""
    read = {
        reference.pointer.name.partition("+")[0]
        for reference in references(record)
        if reference.pointer.memory == "input" and reference.node.module != Stage.REFRESH
    }
    is_recurrent = runner.spec.linear_attention and runner.attention is None
    without_meaning = {*runner.buffers.checks.absent, *(_FOR_ATTENTION if is_recurrent else ())}
    unread = [
        field.name
        for field in fields_of(runner.buffers.inputs)
        if field.name not in without_meaning and not field.optional_read and field.name not in read
    ]
    if unread:
        noun = "field" if len(unread) == 1 else "fields"
        fields = f"{noun} {', '.join(f'`{name}`' for name in unread)}"
        check.report(
            FindingKind.DEAD_INPUT,
            f"no node reads the input {fields}: replays ignore the values.",
            field=unread[0],
        )
