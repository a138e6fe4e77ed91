"""What a program tells of a graph that the graph alone does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from graphkit.config import require_type
from graphkit.errors import ConfigError, short_repr

if TYPE_CHECKING:
    import torch

_ATTRIBUTE = "_graphkit_registration"
Rows = Callable[[], Any]
"""Returns rows of a tensor: indices in a tensor or a list, or a slice."""


@dataclass(frozen=True, slots=True)
class Registration:
    """See ``register`` for the attributes."""

    name: str
    body: Callable[[], Any] | None
    inputs: Mapping[str, tuple[torch.Tensor, int, Any]]
    outputs: Any
    live_rows: Callable[[], int] | None
    key: Callable[[], Any] | None
    captured_key: Any
    state: Mapping[str, tuple[torch.Tensor, int, Rows]] | None

    @property
    def size(self) -> int:
        """Rows of the graph, in the unit of ``live_rows``; 0 without inputs."""
        return min((tensor.shape[axis] for tensor, axis, _ in self.inputs.values()), default=0)

    def live(self) -> int:
        """Return the live rows of the replay at hand."""
        return self.size if self.live_rows is None else int(self.live_rows())

    def written(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and memory of inputs and outputs."""
        for name, (tensor, _, _) in self.inputs.items():
            yield name, tensor
        for name, tensor in named_outputs(self.outputs).items():
            yield name, tensor


def register(
    graph: Any,
    *,
    body: Callable[[], Any] | None = None,
    inputs: Mapping[str, tuple[torch.Tensor, int, Any]] | None = None,
    outputs: Any = None,
    live_rows: Callable[[], int] | None = None,
    key: Callable[[], Any] | None = None,
    state: Mapping[str, tuple[torch.Tensor, int, Rows]] | None = None,
    name: str = "",
) -> None:
    """Tell the audit of this process what a captured graph does.

    Costs nothing where no audit runs, so that an engine may call it after every capture. What is
    passed lives as long as the graph object. With ``body``, replays are compared with a run of it
    (audit ``shadow``); with ``inputs``, rows past the live ones are overwritten in repeated replays
    (``pads``); with ``key`` or ``live_rows``, the graph is checked to be the one for the batch
    (``misses``).

    Args:
        graph: The ``torch.cuda.CUDAGraph``, captured.
        body: The function that was captured. Called without arguments, it computes from the same
            memory as the graph, and returns what the graph computes.
        inputs: Static inputs by name: tensor, axis of its rows, and the value of pad rows, or
            ``None`` if they may hold anything: checks then fill them with two patterns. An input
            may have several rows for each row of the smallest one.
        outputs: The static outputs of the graph, in the structure that ``body`` returns.
        live_rows: Returns the number of live rows of the replay at hand, in rows of the smallest
            input. ``None``: all are live.
        key: Returns what the graph must be right for, such as mode and length. Called now, and at
            checks before replays.
        state: State that replays write, by name: tensor, axis, and a function that returns the rows
            that the replay at hand writes, in the order of the rows of the inputs. A check then
            copies these rows, inputs and outputs alone. The graph must write nothing else that
            lasts.
        name: Name of the graph in reports.

    Raises:
        ConfigError: An argument has a wrong type or form.
    """
    for what, value in {"body": body, "live_rows": live_rows, "key": key}.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{what} must be a function, got {short_repr(value)}.", field=what)
    require_type("register", "name", name, str, "a text")
    for what, entries in {"inputs": inputs, "state": state}.items():
        _check_entries(what, {} if entries is None else entries)
    registration = Registration(
        name, body, dict(inputs or {}), outputs, live_rows, key,
        None if key is None else key(), None if state is None else dict(state),
    )  # fmt: skip
    setattr(graph, _ATTRIBUTE, registration)


def registration_of(graph: Any) -> Registration | None:
    """Return what was registered for a graph."""
    found: Registration | None = getattr(graph, _ATTRIBUTE, None)
    return found


def named_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output: one, or several in a dataclass, lists, tuples and dicts."""
    import torch

    if is_dataclass(outputs):
        outputs = {one.name: getattr(outputs, one.name) for one in fields(outputs)}
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    from torch.utils._pytree import keystr, tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(outputs)
    return {f"output{keystr(p)}": t for p, t in leaves if isinstance(t, torch.Tensor)}


def _check_entries(what: str, entries: Mapping[str, Any]) -> None:
    import torch

    if not isinstance(entries, Mapping):
        raise ConfigError(f"{what} must be a dict, got {short_repr(entries)}.", field=what)
    for name, entry in entries.items():
        is_triple = isinstance(entry, tuple) and len(entry) == 3
        tensor = entry[0] if is_triple else None
        if not isinstance(tensor, torch.Tensor) or entry[1] not in range(tensor.dim()):
            third = "rows" if what == "state" else "pad"
            raise ConfigError(
                f"{what}[{name!r}] must be (tensor, axis, {third}) with an axis of the tensor, got "
                f"{short_repr(entry)}.",
                field=what,
            )
