"""Kinds of findings, with their usual advice. One cause has one kind, whichever audit finds it."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

# ruff: noqa: ISC004 - a member is its text and its advice

_LOCK = "If the change is intended, write the lock file again with --lock."


class FindingKind(StrEnum):
    """A kind of finding. The text is the one that reports show, such as ``leaking pad row``.

    Attributes:
        advice: What to do, unless the finding says something more precise.
        severity: ``error``, ``warning`` or ``note``, unless the finding has another one.
    """

    advice: str
    severity: str

    def __new__(cls, text: str, advice: str, severity: str = "error") -> Self:
        """Return a member whose text is its value."""
        kind = str.__new__(cls, text)
        kind._value_, kind.advice, kind.severity = text, advice, severity
        return kind

    # What a capture changes on the host.
    LAZY_CACHE = (
        "lazy cache",
        "Compute it from the inputs in every forward, or cache only constants.",
    )
    REPLACED_BUFFER = (
        "replaced buffer",
        "Allocate the largest size before capture, and write the buffer in place.",
    )
    WARM_UP_LEAK = (
        "warm-up leak",
        "Move it out of the forward, or keep it in a tensor declared as mutable_state.",
    )
    SIDE_OUTPUT = (
        "side output",
        "Return it in the output, such as hidden_states or a field of your own, or allocate it "
        "before capture and write it in place, as `self.states.copy_(hidden)` does.",
    )
    UNDECLARED_STATE = (
        "undeclared state",
        "Declare it as mutable_state: captures and audits then restore its contents.",
        "warning",
    )
    # What a graph keeps of the host.
    FROZEN_VALUE = (
        "frozen value",
        "Read it from a tensor that every replay refreshes, or capture again after each change.",
    )
    ARCHITECTURE_CONSTANTS = (
        "architecture constants",
        "Capture again after one of them has changed.",
        "note",
    )
    NONDETERMINISTIC_CAPTURE = (
        "capture is not deterministic",
        "Keep random numbers, clocks and counters out of the host side of the forward.",
    )
    MISSING_HOST_WORK = (
        "missing host work",
        "Move what the host does between launches into the step.",
    )
    # Side effects of a forward.
    WRITTEN_INPUT = (
        "written input",
        "Write the result to a new tensor, such as `positions + 1`. The inputs belong to the "
        "runner: later stages of the step read them, and other graphs.",
    )
    RANDOM_DRAW = (
        "random draw",
        "Call eval() on the model if it is dropout. If the forward samples tokens, put the sampler "
        'into `with graphkit.scope("sampler")`.',
        "note",
    )
    # What the addresses in a graph point to.
    FREED_MEMORY = (
        "freed memory",
        "Keep a reference to it for as long as the graph lives, or capture again after replacing "
        "it.",
    )
    OTHER_POOL = (
        "memory of another graph's pool",
        "Keep a reference to the tensor, or clone it out of the other graph's pool before the "
        "capture.",
    )
    UNOWNED_HOST_MEMORY = (
        "unowned host memory",
        "Keep a reference to the pinned tensor for as long as the graph is replayed.",
        "warning",
    )
    PAGEABLE_HOST_MEMORY = (
        "pageable host memory",
        "Pin the memory (pin_memory) and keep the tensor for as long as the graph.",
        "warning",
    )
    UNDECLARED_MEMORY = (
        "undeclared memory",
        "Declare it as weights, as mutable_state or as an input field to name it in records. If "
        "the host changes it between replays, write it in place: a graph keeps its address.",
        "note",
    )
    DEAD_INPUT = (
        "dead input",
        "Read the field in the forward, not a copy of it, or capture without the field.",
        "warning",
    )
    UNREADABLE_ARGUMENT = (
        "unreadable argument",
        "Check the memory that this kernel uses by hand.",
        "warning",
    )
    STALE_POOL_MEMORY = (
        "stale pool memory",
        "Write the memory before it is read, for example with zeros instead of empty, or allocate "
        "and fill it before the capture and keep a reference to it.",
    )
    STATE_NOT_RESTORED = (
        "state not restored",
        "Audit this program without --every, and report the graph.",
    )
    # What the content of memory and nodes was and is: digests around a sleep or an update.
    WEIGHT_DIFFERS = (
        "weight differs",
        "Restore the weights in the memory that the graph reads, before its next replay.",
    )
    TENSOR_DIFFERS = (
        "tensor differs",
        "Fill the tensor again before the next replay, or capture again.",
    )
    POOL_DIFFERS = (
        "pool differs",
        "Keep the graph's memory pool through the sleep, or capture again.",
    )
    TEMPLATE_DIFFERS = "template differs", "Capture again, and keep what the arguments point to."
    FAULT = (
        "fault",
        "Check the indices and sizes that the node reads: they were valid at the capture, or at "
        "the replay before.",
    )
    # What runs of a step on different batches show.
    NOT_FINITE_OUTPUT = (
        "not finite output",
        "Check the weights and the sample batches, then the module. A mask may leave -inf in a "
        "part of a row only: every row needs a finite number, and softmax over a row of -inf is "
        "NaN.",
    )
    LEAKING_PAD_ROW = (
        "leaking pad row",
        "Compute every row from that row alone: no mean, maximum, norm or scale over the batch. "
        "Mask scores, not products: 0 * NaN is NaN.",
    )
    DEPENDENCE_ON_THE_BATCH_SIZE = (
        "dependence on the batch size",
        "Let a row compute the same at every batch size: no branch on the number of rows, and no "
        "mean or count over all of them. If kernels of another size round more than expected, pass "
        "a tolerance.",
    )
    METADATA_OF_ANOTHER_SIZE = (
        "metadata of another size",
        "Compute it from the inputs in every forward, or keep one for each batch size.",
    )
    WRITE_OUTSIDE_LIVE_SLOTS = (
        "write outside live slots",
        "Write only to the slots of inputs.out_cache_loc, which is 0 in pad rows. Set page_size in "
        "BufferSizes if the tensor is split into pages, as [pages, slots of a page, ...].",
    )
    STALE_ROWS_OF_A_LARGER_BATCH = (
        "stale rows of a larger batch",
        "A value outlives its replay. Fill the tail of your own buffers, or declare them as input "
        "fields, which every replay pads.",
    )
    ROWS_DEPEND_ON_BATCH_ORDER = (
        "rows depend on batch order",
        "Compute a row from its inputs, not from its index in the batch.",
    )
    SIZES_INTERFERE = (
        "sizes interfere",
        "Graphs of two sizes share memory that one of them reads before it writes, such as a "
        "workspace or a counter. Initialise it inside the graph.",
    )
    NONDETERMINISTIC_STEP = (
        "nondeterministic step",
        "Declare everything that a step changes as mutable_state, and use deterministic kernels. "
        "Replays of a nondeterministic step cannot be checked.",
    )
    NONDETERMINISTIC_ROUNDING = (
        "nondeterministic rounding",
        "Nothing to change if outputs need not be equal bit for bit: the step adds in changing "
        "order, as atomic additions do. Use deterministic kernels if they must.",
        "note",
    )
    ROUNDING_DEPENDS_ON_OTHER_ROWS = (
        "rounding depends on other rows",
        "Nothing to change if outputs need not be equal bit for bit: kernels that split their work "
        "by the rows of the batch, such as grouped matrix products, round differently. Use a "
        "batch-invariant kernel if they must.",
        "note",
    )
    GRAPH_BUG = (
        "graph bug",
        "The graph kept a value or an address that has changed since. Watch with bisect=True, or "
        "run the other audits.",
    )
    SHADOW_FAILED = (
        "shadow failed",
        "Run the batch with runner.fall_back, and fix the error that it raises.",
        "warning",
    )
    WRAPPER_DIFFERS = "wrapper differs from model", "Fix the wrapper."
    # Batches, sizes and launches.
    LATE_COMPILE = (
        "compiled while serving",
        "Run this shape once before the first request, or keep the numbers that it depends on out "
        "of the kernel's constants.",
        "warning",
    )
    SLOW_LAUNCH = (
        "slow launch",
        "graphkit inspect lists the launch attributes and arguments of the kernels.",
        "note",
    )
    WRONG_GRAPH = (
        "wrong graph",
        "Select a graph by everything that its capture depended on, or run the batch without one.",
    )
    BATCH_FALLS_BACK = "batch falls back", "", "warning"
    BATCH_IS_REFUSED = "batch is refused", ""
    UNREACHABLE_SIZE = (
        "unreachable size",
        "Leave the size out of batch_sizes, or let the request pool and the sample batches reach "
        "max_batch_size requests.",
        "warning",
    )
    PADDING_WASTE = "padding waste", "Capture more sizes.", "warning"
    MODE_WITHOUT_A_GRAPH = (
        "mode without a graph",
        "Add the forward, or remove the mode from served_modes.",
        "warning",
    )
    # Graphs against a lock file.
    GRAPH_IS_NEW = "graph is new", _LOCK
    GRAPH_CHANGED = "graph changed", _LOCK
    GRAPH_IS_GONE = "graph is gone", _LOCK

    @property
    def within_rounding(self) -> FindingKind:
        """The kind of a difference that rounding explains."""
        if self is FindingKind.NONDETERMINISTIC_STEP:
            return FindingKind.NONDETERMINISTIC_ROUNDING
        return FindingKind.ROUNDING_DEPENDS_ON_OTHER_ROWS
