"""A mailbox slot that the scheduler writes into directly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphkit.errors import InputError
from graphkit.runners.fit import Fit
from graphkit.runners.outputs import Output

if TYPE_CHECKING:
    from graphkit.buffers import FieldWriter
    from graphkit.runners.replayer import Replayer

OutputT = TypeVar("OutputT", bound=Output)


class StagedBatch(Generic[OutputT]):
    """The next slot, with its live rows as numpy views: ``staged.seq_lens[:] = lens``.

    Rows that nobody writes hold pads. A field that travels by address, such as hidden states, is
    assigned: ``staged.hidden_states = tensor``; assigning any other field copies it.

    Life: until its ``replay``, or until another batch of the same runner is replayed.
    """

    __slots__ = ("_due", "_fit", "_in_flight", "_replayer", "_sequence", "_slot", "_writers")

    def __init__(self, replayer: Replayer[OutputT], fit: Fit, slot: int, sequence: int) -> None:
        keep = object.__setattr__
        keep(self, "_replayer", replayer)
        keep(self, "_fit", fit)
        keep(self, "_slot", slot)
        keep(self, "_sequence", sequence)
        keep(self, "_in_flight", [])
        writers = fit.writer(slot).fields
        keep(self, "_writers", writers)
        keep(self, "_due", {writer.name for writer in writers if writer.rows is None})

    def __getattr__(self, name: str) -> Any:
        rows = self._writer(name).rows
        if rows is None:
            raise InputError(
                f"field {name!r} travels by address and has no rows to read. Assign a tensor.",
                field=name,
            )
        return rows

    def __setattr__(self, name: str, value: Any) -> None:
        kept = self._writer(name).write(value)
        if kept is not None:
            self._in_flight.append(kept)
        self._due.discard(name)

    def replay(self, *, clone: bool = False) -> OutputT:
        """Replay what was written. Output and its lifetime as in ``Runner.replay``.

        Raises:
            InputError: A field that travels by address was not assigned.
            ReplayError: The slot was replayed already, or another batch took it.
        """
        if self._due:
            missing = sorted(self._due)
            raise InputError(
                f"field {missing[0]!r} was not assigned. Assign a device tensor.", field=missing[0]
            )
        output: OutputT = self._replayer.replay_staged(
            self._fit, self._slot, self._sequence, self._in_flight
        )
        return output.clone() if clone else output

    def _writer(self, name: str) -> FieldWriter:
        for writer in self._writers:
            if writer.name == name:
                return writer  # type: ignore[no-any-return]
        names = ", ".join(writer.name for writer in self._writers)
        raise InputError(f"no field {name!r} was captured; there are {names}.", field=name)
