"""Arguments of a captured function: names, dtypes and row shapes, learnt from an example."""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from graphkit.buffers import (
    Axis,
    DraftInputs,
    MultiLayerDraftExtendInputs,
    StepInputs,
    TargetVerifyInputs,
    declare,
    fields_of,
)
from graphkit.errors import ConfigError, InputError, short_repr
from graphkit.graphs.capture_failure import describe_exception
from graphkit.records import count_of
from graphkit.runners import StagedBatch


class Arguments:
    """Arguments of a function, which are passed as in an example.

    Args:
        fn: The function.
        name: Its name, for messages.
        example: A tensor or a sequence of tensors (positional arguments), tensors by name (keyword
            arguments), or a dataclass of tensors (the only argument).
        pad_values: See ``graphkit.capture``.

    Attributes:
        fields: Name of the input field of each argument.
        inputs_type: Inputs of the step, a field per argument.
        example: The tensor of each argument in the example.
        pads: Number that fills the pad rows of each argument.
        dtypes: Dtypes of the arguments.
        num_rows: Rows of the example.
        device: Device of the example; the CPU if all of it is there.

    Raises:
        ConfigError: The example has a value that is not a tensor, or that has no row per request,
            or a pad value is no number of its argument.
    """

    def __init__(self, fn: Callable[..., Any], name: str, example: Any, pad_values: Any) -> None:
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
        self.example = {key: _checked(key, value, name) for key, value in values.items()}
        self.dtypes = {tensor.dtype for tensor in self.example.values()}
        self.pads = {key: _pad(tensor) for key, tensor in self.example.items()}
        self.pads |= checked_pads(name, self.example, pad_values)
        self.num_rows = self._count_rows()
        self.device = self._find_device()
        self._rows = {key: tuple(tensor.shape[1:]) for key, tensor in self.example.items()}
        names = field_names(self.example, _reserved())
        self.fields = dict(zip(self.example, names, strict=True))
        declared = [(field, Any, self._declared(key)) for key, field in self.fields.items()]
        self.inputs_type: type[StepInputs] = make_dataclass(
            f"{identifier(name)}Inputs", declared, bases=(StepInputs,), kw_only=True, eq=False
        )

    def sample(self, indices: Sequence[int]) -> StepInputs:
        """Return a batch of rows of the example."""
        return self.inputs(self.example_rows(indices))

    def example_rows(self, indices: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return rows of the example by argument."""
        picked = list(indices)
        return {key: rows[picked] for key, rows in self.example.items()}

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
            is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
            if is_dense:  # of a view, a graph would read the wrong elements
                values[key] = value.contiguous()
        return self.inputs(values)

    def run(self, rows: Mapping[str, torch.Tensor], device: torch.device) -> Any:
        """Call the function on copies of rows, by argument, without gradients.

        Raises:
            ConfigError: The function raised an error.
        """
        try:
            with torch.no_grad():
                copies = {key: tensor.to(device, copy=True) for key, tensor in rows.items()}
                return self.call(self.inputs(copies))
        except Exception as error:
            count = count_of(len(next(iter(rows.values()))), "row")
            raise ConfigError(
                f"{self.name} raised an error for {count} of the example: "
                f"{describe_exception(error)}.",
                field="fn",
            ) from error

    def call(self, inputs: StepInputs) -> Any:
        """Call the function on the rows of a batch."""
        values = {key: getattr(inputs, field) for key, field in self.fields.items()}
        if self._wrap is not None:
            return self._fn(self._wrap(**values))
        return self._fn(*values.values()) if self._is_positional else self._fn(**values)

    def inputs(self, values: Mapping[str, Any]) -> StepInputs:
        """Return the rows of each argument as a batch."""
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
        tensor = self.example[key]
        return declare(
            Axis.REQUEST,
            tensor.dtype,
            f"argument `{key}` of {self.name}",
            pad=self.pads[key],
            row=tuple(tensor.shape[1:]),
            by_address=tensor.device.type != "cpu",
        )

    def _count_rows(self) -> int:
        counts = {key: len(rows) for key, rows in self.example.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            passed = ", ".join(f"{key} {count}" for key, count in counts.items()) or "no argument"
            raise ConfigError(
                f"the example of {self.name} must have as many rows in each argument, at least "
                f"one: it has {passed}. The first dimension is the batch.",
                field="example",
            )
        return next(iter(counts.values()))

    def _find_device(self) -> torch.device:
        used = {rows.device for rows in self.example.values() if rows.device.type != "cpu"}
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
    """Return a distinct name for a dataclass field for each text, none in ``reserved``."""
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
    if not value.is_nested and not value.ndim:
        raise ConfigError(
            f"{about} has no dimension. The first dimension of every tensor is the batch: pass one "
            "number per row, or bind it with functools.partial.",
            field="example",
        )
    bytes_of = f"its bytes, {key}.view(torch.uint8), and view them again in {fn_name}"
    for is_refused, fact, remedy in (
        (value.is_nested, "a nested tensor", "rows of one shape, and their lengths"),
        (value.layout is not torch.strided, "sparse", "a dense tensor"),
        (value.is_quantized, str(value.dtype), "its integers (int_repr)"),
        (value.is_floating_point() and value.itemsize == 1, str(value.dtype), bytes_of),
        (value.is_complex(), str(value.dtype), "its real and imaginary parts (torch.view_as_real)"),
        (value.device.type not in ("cpu", "cuda"), f"on {value.device}", "it on the CPU or CUDA"),
    ):
        if is_refused:
            raise ConfigError(f"{about} is {fact}. Pass {remedy}.", field="example")
    if 0 in value.shape[1:]:
        raise ConfigError(
            f"{about} has shape {list(value.shape)}, rows without numbers. Leave it out, or create "
            f"it in {fn_name}.",
            field="example",
        )
    return value.detach()


def _pad(tensor: torch.Tensor) -> float:
    """Return the number that fills pad rows: the smallest number in the example.

    A pad row must not fail. Where 0 may, as a length or as an index that starts at 1, it is not in
    the example, and the smallest index is valid in every column.
    """
    numbers = tensor.double() if tensor.is_floating_point() else tensor.long()
    finite = numbers[numbers.isfinite()]
    return finite.min().item() if finite.numel() else 0


def checked_pads(
    name: str, example: Mapping[str, torch.Tensor], pad_values: Any
) -> dict[str, float]:
    """Return the pad value of each argument that has one.

    Args:
        name: Name of the function.
        example: The tensor of each argument.
        pad_values: See ``graphkit.capture``.

    Raises:
        ConfigError: A value is no number of its argument, or there is no such argument.
    """
    values = pad_values
    if is_dataclass(values) and not isinstance(values, type):
        values = {field.name: getattr(values, field.name) for field in fields(values)}
    elif isinstance(values, (tuple, list)):
        values = dict(zip([*example, *range(len(example), len(values))], values, strict=False))
    elif values is not None and not isinstance(values, Mapping):
        values = {next(iter(example), ""): values} if len(example) == 1 else {repr(values): values}
    pads: dict[str, float] = {}
    for key, value in (values or {}).items():
        if key not in example:
            raise ConfigError(
                f"pad_values of {name} names {key!r}, but the example has the arguments "
                f"{', '.join(example)}. Pass a number for each argument by its name.",
                field="pad_values",
            )
        if value is not None:  # selects the default
            pads[key] = _checked_pad(f"pad_values[{key!r}] of {name}", value, example[key].dtype)
    return pads


def _checked_pad(about: str, value: Any, dtype: torch.dtype) -> float:
    """Return a pad value as a number, if a dtype has it."""
    is_array = isinstance(value, (torch.Tensor, np.ndarray, np.generic))
    number = value.item() if is_array and math.prod(value.shape) == 1 else value
    if dtype.is_floating_point:
        expected, is_valid = f"a number of {dtype}", isinstance(number, (int, float))
        most = torch.finfo(dtype).max
        is_valid = is_valid and (abs(number) <= most or abs(number) == math.inf)
    else:
        low, high = (0, 1) if dtype == torch.bool else (int_range(dtype))
        expected, is_valid = f"an int from {low} to {high}", isinstance(number, int)
        is_valid = is_valid and low <= number <= high
    if not is_valid:
        raise ConfigError(
            f"{about} is {short_repr(value)}, expected {expected}, which fills a row.",
            field="pad_values",
        )
    return bool(number) if dtype == torch.bool else number


def int_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer dtype."""
    limits = torch.iinfo(dtype)
    return int(limits.min), int(limits.max)


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
    modes = TargetVerifyInputs, DraftInputs, MultiLayerDraftExtendInputs
    known = {field.name for inputs in modes for field in fields_of(inputs)}
    return {*known, *dir(StepInputs), *dir(StagedBatch)}
