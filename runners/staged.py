"""A mailbox entry that the scheduler writes into directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphkit.errors import InputError, ReplayError
from graphkit.runners.fit import Fit
from graphkit.runners.outputs import Output

if TYPE_CHECKING:
    from graphkit.buffers import BatchWriter
    from graphkit.runners.replayer import Replayer

OutputT = TypeVar("OutputT", bound=Output)


class StagedBatch(Generic[OutputT]):
    """The next entry, with its live rows as numpy views: ``staged.seq_lens[:] = lens``.

    Rows that nobody writes hold pads. A field that travels by address, such as hidden states, is
    assigned: ``staged.hidden_states = tensor``; assigning any other field copies it.

    Life: until its ``replay``, or until another batch of the same runner takes the entry. Views
    that outlive it would write into that batch.
    """

    def __init__(
        self, replayer: Replayer[OutputT], fit: Fit, writer: BatchWriter, entry: int, tokens: int
    ) -> None:
        # Written past __setattr__, which is for fields; a field's rows are then found at once.
        facts = self.__dict__
        facts.update(writer.rows)
        facts["_replayer"], facts["_fit"], facts["_fields"] = replayer, fit, writer.fields
        facts["_entry"], facts["_tokens"] = entry, tokens
        facts["_mailbox"], facts["_claim"] = replayer.mailbox, replayer.mailbox.claims
        facts["_due"], facts["_in_flight"] = set(writer.by_address), []

    def __getattr__(self, name: str) -> Any:
        if name in self._fields:
            raise InputError(
                f"field {name!r} travels by address, or numpy lacks its dtype: it has no rows to "
                "write. Assign a tensor.",
                field=name,
            )
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise self._unknown(name)
        if self._claim != self._mailbox.claims:
            raise self._over()
        writer = self._fields[name]
        kept = writer.write(value)
        if kept is not None:
            self._in_flight.append(kept)
            self.__dict__.pop(name, None)  # rows in the entry would not be read any more
        elif writer.rows is not None:
            self.__dict__[name] = writer.rows
        self._due.discard(name)

    def replay(self, *, clone: bool = False) -> OutputT:
        """Replay what was written. Output and its lifetime as in ``Runner.replay``.

        Raises:
            InputError: A field that travels by address was not assigned.
            ReplayError: The entry was replayed already, or another batch took it.
        """
        if self._claim != self._mailbox.claims:
            raise self._over()
        if self._due:
            missing = min(self._due)
            raise InputError(
                f"field {missing!r} was not assigned. Assign a device tensor.", field=missing
            )
        replayer = self._replayer
        if replayer.ragged:
            replayer.check({name: self.__dict__.get(name) for name in self._fields}, self._tokens)
        output: OutputT = replayer.launch(self._fit, self._entry, self._tokens, self._in_flight)
        return output.clone() if clone else output

    def _over(self) -> ReplayError:
        return ReplayError(
            "this staged batch is over: its entry was replayed or taken by another batch, or the "
            "runner was closed. Call stage() again."
        )

    def _unknown(self, name: str) -> InputError:
        names = ", ".join(self._fields)
        return InputError(f"no field {name!r} was captured; there are {names}.", field=name)
