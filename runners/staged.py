"""A mailbox entry that the scheduler writes directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from graphkit.errors import GraphkitError, InputError, ReplayError
from graphkit.runners.dispatch import require_count
from graphkit.runners.outputs import Output
from graphkit.runners.replayer import Replayer, ReplayPlan

OutputT = TypeVar("OutputT", bound=Output)


class StagedBatch(Generic[OutputT]):
    """Live rows of a batch as numpy views of a mailbox entry: ``staged.seq_lens[:] = lens``.

    Each captured field is an attribute. Its view has the live rows, filled with pads. A field that
    the graph reads through its address, such as hidden states, has no view and is assigned:
    ``staged.hidden_states = tensor``. Assigning any other field copies the value into its view.
    Compute into the views (``np.add(a, b, out=staged.positions)``) to save a copy per field.

    Life: until ``replay``, or until another batch of the same runner claims the entry. A view that
    is written later changes another batch.
    """

    def __init__(self, attributes: Mapping[str, Any], claim: int) -> None:
        own = vars(self)  # an assignment would pass through __setattr__
        own.update(attributes)
        own["_claim"], own["_in_flight"] = claim, []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._writer.fields:
            raise InputError(
                f"field {name!r} has no numpy view: the graph reads it through its address, or "
                "numpy lacks its dtype. Assign a tensor.",
                field=name,
            )
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        writer = own["_writer"]
        field = writer.fields.get(name)
        if field is None:
            raise self._unknown(name)
        if own["_claim"] != writer.mailbox.claims:
            raise _invalid()
        rows = own.get(name)
        if (
            rows is not None
            and type(value) is np.ndarray
            and value.dtype is rows.dtype
            and value.shape == rows.shape
        ):
            rows[...] = value
            return
        kept = field.write(value)
        if kept is not None:  # the graph reads the tensor, not the view
            own["_in_flight"].append(kept)
            own["_unassigned"] -= {name}
            own.pop(name, None)
        elif field.rows is not None:
            own[name] = field.rows

    def replay(self, *, clone: bool = False) -> OutputT:
        """Replay the batch. The output lives as long as one of ``Runner.replay``.

        Args:
            clone: Whether to copy the output out of graph memory.

        Raises:
            InputError: A field that is read through its address was not assigned.
            ReplayError: The batch was replayed before, or another batch claimed the entry.
        """
        if self._claim != self._writer.mailbox.claims:
            self._refuse(_invalid())
        if self._unassigned:
            missing = min(self._unassigned)
            self._refuse(
                InputError(
                    f"field {missing!r} was not assigned. Assign a device tensor.", field=missing
                )
            )
        replay: Callable[..., OutputT] = self._replay
        output = replay(vars(self), self._in_flight)
        return output.clone() if clone else output

    def _unknown(self, name: str) -> InputError:
        names = ", ".join(self._writer.fields)
        return InputError(f"field {name!r} was not captured. Captured are {names}.", field=name)


def stage(
    replayer: Replayer[OutputT], batch_size: int, num_tokens: int | None
) -> StagedBatch[OutputT]:
    """Claim an entry and return its views; see ``Runner.stage``."""
    if replayer.plan_on_host is not None:
        raise ReplayError(
            "stage() is not available: the attention backend plans each batch on the host and "
            "needs the whole batch. Use replay(batch)."
        )
    buffers = replayer.buffers
    if buffers.value_checks is not None:
        buffers.value_checks.report()
    try:
        plan = replayer.plans.get((batch_size, None)) or replayer.make_plan(batch_size, None)
    except TypeError:  # it has no hash
        require_count("batch_size", batch_size)
        raise
    if replayer.frozen is not None:
        replayer.frozen.check(plan.padded_batch_size)
    tokens = plan.tokens
    if num_tokens is not None:
        require_count("num_tokens", num_tokens)
        buffers.checks.check_width(plan.requests, num_tokens)
        tokens = num_tokens
    entry = buffers.mailbox.claim()
    buffers.pad_entry(entry)
    attributes = plan.staged[entry] if tokens == plan.tokens else None
    if attributes is None:
        attributes = _attributes(replayer, plan, entry, tokens)
        if tokens == plan.tokens:
            plan.staged[entry] = attributes
    return StagedBatch(attributes, buffers.mailbox.claims)


def _attributes(
    replayer: Replayer[OutputT], plan: ReplayPlan, entry: int, tokens: int
) -> dict[str, Any]:
    """Return the attributes that all staged batches of a size and an entry have."""
    buffers, writer = replayer.buffers, replayer.writer(plan, entry, tokens)

    def check(rows: Mapping[str, Any]) -> None:
        if replayer.compares_fields:
            buffers.checks.compare_fields(SimpleNamespace(**rows), tokens)
        if buffers.value_checks is not None:
            buffers.value_checks.check(SimpleNamespace(**rows))

    def launch(chosen: ReplayPlan, in_flight: list[Any]) -> OutputT:
        buffers.mailbox.claims += 1  # the batch is replayed once, also if the launch fails
        return replayer.launch(chosen, entry, tokens, in_flight)

    def replay(rows: Mapping[str, Any], in_flight: list[Any]) -> OutputT:
        check(rows)
        return launch(plan, in_flight)

    attributes = {
        **writer.views, "_writer": writer, "_replay": replay, "_unassigned": writer.by_address,
        "_refuse": _raise,
    }  # fmt: skip
    if (consensus := replayer.consensus) is not None:

        def replay_on_ranks(rows: Mapping[str, Any], in_flight: list[Any]) -> OutputT:
            requests = plan.requests
            size = consensus.agree_on_staged(requests, plan.padded_batch_size, partial(check, rows))
            agreed = replayer.plans.get((requests, size)) or replayer.make_plan(requests, size)
            return launch(agreed, in_flight)

        attributes["_replay"] = partial(consensus.run, replay_on_ranks)
        attributes["_refuse"] = partial(consensus.run, consensus.refuse)
    return attributes


def _raise(error: GraphkitError) -> NoReturn:
    raise error


def _invalid() -> ReplayError:
    return ReplayError(
        "this staged batch is no longer valid: it was replayed, another batch claimed its entry, "
        "or the runner was closed. Call stage() again."
    )
