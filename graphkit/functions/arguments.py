"""Arguments of a captured function: names, dtypes and row shapes, learnt from an example."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import torch
from torch import nn

from graphkit.buffers import Axis, StepInputs, declare, fields_of
from graphkit.errors import ConfigError, InputError
from graphkit.runners import RUNNERS, StagedBatch


class Arguments:
    """Arguments of a function, which are passed as in an example.

    Args:
        fn: The function.
        name: Its name, for messages.
        example: A tensor or a sequence of tensors (positional arguments), tensors by name (keyword
            arguments), or a dataclass of tensors (the only argument).

    Attributes:
        name: As passed.
        fields: Name of the input field of each argument.
        inputs_type: Inputs of the step, a field per argument.
        dtypes: Dtypes of the arguments.
        num_rows: Rows of the example.
        device: Device of the example; the CPU if all of it is there.

    Raises:
        ConfigError: The example has a value that is not a tensor, or that has no row per request.
    """

    def __init__(self, fn: Callable[..., Any], name: str, example: Any) -> None:
        self._fn, self.name = fn, name
        self._is_positional = False
        self._wrap: type[Any] | None = None
        if is_dataclass(example) and not isinstance(example, type):
            self._wrap = type(example)
            values = {field.name: getattr(example, field.name) for field in fields(example)}
        elif isinstance(example, Mapping):
            values = dict(example)
        else:
            self._is_positional = True
            items = example if isinstance(example, (tuple, list)) else (example,)
            values = dict(zip(_positional_names(fn, len(items)), items, strict=True))
        self._example = {key: _checked(key, value, name) for key, value in values.items()}
        self.dtypes = {tensor.dtype for tensor in self._example.values()}
        self.num_rows = self._count_rows()
        self.device = self._find_device()
        self._rows = {key: tuple(tensor.shape[1:]) for key, tensor in self._example.items()}
        names = field_names(self._example, _reserved())
        self.fields = dict(zip(self._example, names, strict=True))
        declared = [(field, Any, self._declared(key)) for key, field in self.fields.items()]
        self.inputs_type: type[StepInputs] = make_dataclass(
            f"{identifier(name)}Inputs", declared, bases=(StepInputs,), kw_only=True, eq=False
        )

    def sample(self, indices: Sequence[int]) -> StepInputs:
        """Return a batch of rows of the example."""
        return self._inputs({key: rows[list(indices)] for key, rows in self._example.items()})

    def batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepInputs:
        """Return the arguments of a call as a batch.

        Raises:
            InputError: An argument is missing, unknown or no array, or has another row shape or
                number of rows; ``field`` names it.
        """
        values, count = self._bound(args, kwargs), None
        for key, row in self._rows.items():
            value = values[key]
            shape = getattr(value, "shape", None)
            if shape is None:
                raise InputError(
                    f"argument {key!r} of {self.name} is a {type(value).__name__}. Pass a tensor "
                    "or a numpy array.",
                    field=key,
                )
            if not shape or shape[1:] != row or (count is not None and shape[0] != count):
                wanted = ", ".join(map(str, ["batch" if count is None else count, *row]))
                raise InputError(
                    f"argument {key!r} of {self.name} has shape {list(shape)}, expected "
                    f"[{wanted}]. Rows have the shape that they have in the example of "
                    "graphkit.capture: pad them to it, or capture the function once per shape.",
                    field=key,
                )
            count = shape[0]
            if isinstance(value, torch.Tensor):  # of a view, a graph would read the wrong elements
                values[key] = value.contiguous()
        return self._inputs(values)

    def call(self, inputs: StepInputs) -> Any:
        """Call the function on the rows of a batch."""
        values = {key: getattr(inputs, field) for key, field in self.fields.items()}
        if self._wrap is not None:
            return self._fn(self._wrap(**values))
        return self._fn(*values.values()) if self._is_positional else self._fn(**values)

    def _inputs(self, values: Mapping[str, Any]) -> StepInputs:
        return self.inputs_type(**{field: values[key] for key, field in self.fields.items()})

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        if self._wrap is not None:
            if len(args) == 1 and not kwargs and isinstance(args[0], self._wrap):
                return {key: getattr(args[0], key) for key in self.fields}
            raise InputError(f"{self.name} takes a {self._wrap.__name__}, as in the example.")
        positional = dict(zip(self.fields, args, strict=False)) if self._is_positional else {}
        values = {**positional, **kwargs}
        if len(args) + len(kwargs) != len(values) or values.keys() != self.fields.keys():
            how = "by position or by name" if self._is_positional else "by name"
            raise InputError(
                f"{self.name} takes {', '.join(self.fields)}, as in the example, {how}; this call "
                f"has {len(args)} by position and {', '.join(kwargs) or 'none'} by name."
            )
        return values

    def _declared(self, key: str) -> Any:
        tensor = self._example[key]
        return declare(
            Axis.REQUEST,
            tensor.dtype,
            f"argument `{key}` of {self.name}",
            pad=_pad(tensor),
            row=tuple(tensor.shape[1:]),
            by_address=tensor.device.type != "cpu",
        )

    def _count_rows(self) -> int:
        counts = {key: len(rows) for key, rows in self._example.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            found = ", ".join(f"{key} {count}" for key, count in counts.items()) or "no argument"
            raise ConfigError(
                f"the example of {self.name} must have as many rows in each argument, at least "
                f"one: it has {found}. The first dimension is the batch.",
                field="example",
            )
        return next(iter(counts.values()))

    def _find_device(self) -> torch.device:
        used = {rows.device for rows in self._example.values() if rows.device.type != "cpu"}
        if len(used) > 1:
            raise ConfigError(
                f"the example of {self.name} is on {', '.join(sorted(map(str, used)))}. Pass "
                "tensors on one device, or on the CPU.",
                field="example",
            )
        return next(iter(used), torch.device("cpu"))


def identifier(text: str) -> str:
    """Return a name with underscores where ``text`` cannot be part of one."""
    name = re.sub(r"\W", "_", text).strip("_")
    return name if name[:1].isalpha() else f"output_{name}".rstrip("_")


def field_names(texts: Iterable[str], reserved: Collection[str]) -> list[str]:
    """Return a distinct name for a dataclass field for each text, none in ``reserved``.

    Args:
        texts: Names of arguments, or paths of results.
        reserved: Names that must not be used.
    """
    names, taken = [], set(reserved)
    for text in texts:
        name = identifier(text)
        while name in taken or keyword.iskeyword(name):
            name += "_"
        taken.add(name)
        names.append(name)
    return names


def _checked(key: Any, value: Any, fn_name: str) -> torch.Tensor:
    """Return a tensor of an example, if it is one that a captured function may take."""
    if not isinstance(key, str):
        raise ConfigError(f"the example of {fn_name} names an argument {key!r}.", field="example")
    about = f"argument {key!r} of the example of {fn_name}"
    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise ConfigError(
            f"{about} is {kind}. Pass tensors alone. Bind other arguments with "
            f"functools.partial({fn_name}, {key}=...), or set them in a function around it.",
            field="example",
        )
    if not value.ndim:
        raise ConfigError(
            f"{about} has no dimension. The first dimension of every tensor is the batch: pass one "
            "number per row, or bind it with functools.partial.",
            field="example",
        )
    for is_refused, fact, remedy in (
        (value.layout is not torch.strided, "sparse", "a dense tensor"),
        (value.is_complex(), str(value.dtype), "its real and imaginary parts (torch.view_as_real)"),
        (value.device.type not in ("cpu", "cuda"), f"on {value.device}", "it on the CPU or CUDA"),
    ):
        if is_refused:
            raise ConfigError(f"{about} is {fact}. Pass {remedy}.", field="example")
    return value.detach()


def _pad(tensor: torch.Tensor) -> float:
    """Return the number that fills pad rows: the smallest number in the example.

    A pad row must not fail. Where 0 may, as a length or as an index that starts at 1, it is not in
    the example, and the smallest index is valid in every column.
    """
    numbers = tensor.double() if tensor.is_floating_point() else tensor.long()
    finite = numbers[numbers.isfinite()]
    return finite.min().item() if finite.numel() else 0


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first arguments; numbers stand for unknown names."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        parameters = {}  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, one in parameters.items() if one.kind in kinds][:count]
    return [*known, *(f"argument_{index}" for index in range(len(known), count))]


def _reserved() -> set[str]:
    """Return the names that fields must not have: tools know the fields of modes by name."""
    modes = (fields_of(kind.inputs_type) for kind in RUNNERS.values())
    known = {field.name for declared in modes for field in declared}
    return {*known, *dir(StepInputs), *dir(StagedBatch)}
