"""Results of a captured function: the tensors in what it returns, learnt from runs of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import torch

from graphkit.buffers import Axis
from graphkit.errors import OutputError
from graphkit.runners import Output, declare_output
from graphkit.runners.functions.arguments import field_names, identifier

_Path = tuple[Any, ...]
"""Keys that lead to a tensor, such as ``("hidden_states", 0)``; empty if it is the result."""
_Tensors = Mapping[_Path, torch.Tensor]


class Results:
    """Tensors that a function returns, alone or in tuples, lists, dicts and dataclasses.

    Args:
        name: Name of the function, for messages.
        returned: What it returned for two or more numbers of rows.

    Attributes:
        output_type: Output of the step, a field per tensor.
        dtypes: Dtypes of the tensors.

    Raises:
        OutputError: The function returned something else, or a tensor without a row per row of its
            arguments.
    """

    def __init__(self, name: str, returned: Mapping[int, Any]) -> None:
        self._name = name
        by_rows = {rows: dict(self._tensors(value)) for rows, value in returned.items()}
        first = next(iter(by_rows.values()))
        for rows, tensors in by_rows.items():
            self._check(rows, tensors, first)
        names = field_names(map(_text, first), dir(Output))
        self._names = dict(zip(first, names, strict=True))
        self.dtypes = {tensor.dtype for tensor in first.values()}
        self._build = self._builder(next(iter(returned.values())))
        declared = [
            (field, torch.Tensor, declare_output(Axis.REQUEST, tensor.dtype, row=_row(tensor)))
            for field, tensor in zip(names, first.values(), strict=True)
        ]
        self.output_type: type[Output] = make_dataclass(
            f"{identifier(name)}Output", declared, bases=(Output,), kw_only=True, eq=False
        )

    def output(self, returned: Any) -> Output:
        """Return what the function returned as the output of the step.

        Raises:
            OutputError: It has other tensors than before.
        """
        tensors = dict(self._tensors(returned))
        if tensors.keys() != self._names.keys():
            raise self._changed(tensors, self._names)
        values: dict[str, Any] = {self._names[path]: tensor for path, tensor in tensors.items()}
        return self.output_type(**values)

    def returned(self, output: Output) -> Any:
        """Return the output of the step as the function returns it."""
        return self._build(vars(output))

    def _check(self, rows: int, tensors: _Tensors, first: _Tensors) -> None:
        if tensors.keys() != first.keys():
            raise self._changed(tensors, first)
        if not tensors:
            raise OutputError(f"{self._name} returned no tensor. Return at least one.")
        for path, tensor in tensors.items():
            self._check_kind(path, tensor)
            what = f"{self._name} returned {_text(path) or 'a tensor'} as {list(tensor.shape)}"
            if tensor.shape[:1] != (rows,):
                raise OutputError(
                    f"{what} for {rows} rows. Return tensors whose first dimension is the batch. A "
                    "sum over the batch would include pad rows: apply it after the call."
                )
            if (_row(tensor), tensor.dtype) != (_row(first[path]), first[path].dtype):
                raise OutputError(
                    f"{what} {tensor.dtype} for {rows} rows, and as {list(first[path].shape)} "
                    f"{first[path].dtype} for {len(first[path])}. Rows must have one shape and one "
                    "dtype for every batch size."
                )

    def _check_kind(self, path: _Path, tensor: torch.Tensor) -> None:
        what = f"{self._name} returned {_text(path) or 'its result'} as"
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            raise OutputError(f"{what} a {kind} tensor. Return dense tensors, rows of one shape.")
        if 0 in tensor.shape[1:]:
            raise OutputError(
                f"{what} {list(tensor.shape)}, rows without numbers. Leave it out, or return None "
                "in its place."
            )
        if tensor.is_quantized or (tensor.is_floating_point() and tensor.itemsize == 1):
            raise OutputError(
                f"{what} {tensor.dtype}, in which results cannot be compared. Return its bytes "
                "(.view(torch.uint8)), or convert it."
            )

    def _changed(self, tensors: Collection[_Path], first: Collection[_Path]) -> OutputError:
        return OutputError(
            f"{self._name} returned {_listed(tensors)}, and for another batch {_listed(first)}. "
            "Return the same tensors for every batch."
        )

    def _tensors(
        self, value: Any, path: _Path = (), owners: tuple[int, ...] = ()
    ) -> Iterator[tuple[_Path, torch.Tensor]]:
        """Yield the tensors in a value, which is in the containers ``owners``, with their paths."""
        if id(value) in owners:
            raise OutputError(
                f"{self._name} returned {_text(path)} as a {type(value).__name__} that contains "
                "itself. Return tensors in containers that end."
            )
        if isinstance(value, torch.Tensor):
            yield path, value
        elif value is not None:
            parts = _parts(value)
            if parts is None:
                what, kind = _text(path) or "its result", type(value).__name__
                raise OutputError(
                    f"{self._name} returned {what} as a {kind}. Return tensors, alone or in "
                    "tuples, lists, dicts or dataclasses."
                )
            for key, part in parts.items():
                yield from self._tensors(part, (*path, key), (*owners, id(value)))

    def _builder(self, value: Any, path: _Path = ()) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function from the fields of an output to a value like this one."""
        if value is None:
            return lambda _tensors: None
        if isinstance(value, torch.Tensor):
            name = self._names[path]
            return lambda tensors: tensors[name]
        kind, parts = type(value), _parts(value) or {}
        builders = {key: self._builder(part, (*path, key)) for key, part in parts.items()}
        if is_dataclass(value):
            return lambda tensors: kind(**{key: build(tensors) for key, build in builders.items()})
        if isinstance(value, dict):
            return lambda tensors: kind((key, build(tensors)) for key, build in builders.items())
        if hasattr(value, "_fields"):  # a named tuple
            return lambda tensors: kind(*(build(tensors) for build in builders.values()))
        return lambda tensors: kind(build(tensors) for build in builders.values())


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key; ``None`` for any other value."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    if type(value) in (dict, OrderedDict):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return None


def _row(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _text(path: _Path) -> str:
    return ".".join(map(str, path))


def _listed(paths: Collection[_Path]) -> str:
    return ", ".join(_text(path) or "one tensor" for path in paths) or "no tensor"
