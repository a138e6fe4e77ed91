"""A mailbox entry that the scheduler writes directly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from graphkit.buffers import BatchWriter
from graphkit.errors import InputError, ReplayError
from graphkit.runners.fit import Fit
from graphkit.runners.outputs import Output

OutputT = TypeVar("OutputT", bound=Output)


class StagedBatch(SimpleNamespace, Generic[OutputT]):
    """Live rows of a batch as numpy views of a mailbox entry: ``staged.seq_lens[:] = lens``.

    Each field that numpy can represent is an attribute. Rows that are not written hold pads. A
    field that the graph reads through its address, such as hidden states, must be assigned:
    ``staged.hidden_states = tensor``. Assigning any other field copies the value into its view.

    Life: until ``replay``, or until another batch of the same runner claims the entry. A view that
    is written later changes another batch.
    """

    def __init__(
        self,
        writer: BatchWriter,
        replay: Callable[..., OutputT],
        fit: Fit,
        entry: int,
        tokens: int,
    ) -> None:
        super().__init__(
            **writer.rows,
            _writer=writer,
            _replay=replay,
            _fit=fit,
            _entry=entry,
            _tokens=tokens,
            _claim=writer.mailbox.claims,
            _unassigned=writer.by_address,
            _in_flight=[],
        )

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
        writer = self._writer.fields.get(name)
        if writer is None:
            raise self._unknown(name)
        self._check_claim()
        kept = writer.write(value)
        if kept is not None:  # the graph reads the tensor, not the view
            self._in_flight.append(kept)
            if name in self.__dict__:
                object.__delattr__(self, name)
        elif writer.rows is not None:
            object.__setattr__(self, name, writer.rows)
        if name in self._unassigned:
            object.__setattr__(self, "_unassigned", self._unassigned - {name})

    def replay(self, *, clone: bool = False) -> OutputT:
        """Replay the batch. The output and its lifetime are those of ``Runner.replay``.

        Args:
            clone: Whether to copy the output out of graph memory.

        Raises:
            InputError: A field that is read through its address was not assigned.
            ReplayError: The batch was replayed before, or another batch claimed the entry.
        """
        self._check_claim()
        if self._unassigned:
            missing = min(self._unassigned)
            raise InputError(
                f"field {missing!r} was not assigned. Assign a device tensor.", field=missing
            )
        output: OutputT = self._replay(
            self.__dict__, self._fit, self._entry, self._tokens, self._in_flight
        )
        return output.clone() if clone else output

    def _check_claim(self) -> None:
        if self._claim != self._writer.mailbox.claims:
            raise ReplayError(
                "this staged batch is no longer valid: it was replayed, another batch claimed its "
                "entry, or the runner was closed. Call stage() again."
            )

    def _unknown(self, name: str) -> InputError:
        names = ", ".join(self._writer.fields)
        return InputError(f"field {name!r} was not captured. Captured are {names}.", field=name)
