"""A mailbox entry that the scheduler writes directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from graphkit.errors import InputError, ReplayError
from graphkit.runners.outputs import Output

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
        """Replay the batch. The output and its lifetime are those of ``Runner.replay``.

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
        launch: Callable[..., OutputT] = self._launch
        output = launch(vars(self), self._in_flight)
        return output.clone() if clone else output

    def _unknown(self, name: str) -> InputError:
        names = ", ".join(self._writer.fields)
        return InputError(f"field {name!r} was not captured. Captured are {names}.", field=name)


def _invalid() -> ReplayError:
    return ReplayError(
        "this staged batch is no longer valid: it was replayed, another batch claimed its entry, "
        "or the runner was closed. Call stage() again."
    )
