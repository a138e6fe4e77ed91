"""Rules for the arguments of an op, read from the annotations of its signature.

A tensor's rule is its shape, its dtypes and ``contiguous`` where the op needs that::

    Annotated[torch.Tensor, "[B, W - 1] int32 or int64"]
    Annotated[torch.Tensor, "[B] or [B, K] int64"]         one of two shapes
    Annotated[torch.Tensor, "[slots, ...], contiguous"]    any further dimensions, any dtype
    Annotated[torch.Tensor, "[T, H] floating-point"]       float16, bfloat16, float32 or float64

A dimension is a size, a size with a bound as in ``W >= 1``, or an expression over sizes. A number's
rule names the size that it gives and bounds it: ``Annotated[int, "W >= 1"]`` or
``Annotated[float, "0 <= threshold <= 1"]``. A size is the number that gives it, else the dimension
of the first tensor that has it. Arguments without a rule, and optional tensors that are None, are
not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Annotated, Any, get_args, get_origin

import torch

from graphkit.errors import AttentionError, ConfigError, InputError, short_repr

ArgumentError = type[InputError] | type[ConfigError] | type[AttentionError]

FLOATING_POINT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of the rule ``floating-point``."""
TENSOR_RULE = re.compile(r"(\[.*\])(?: ([a-z0-9_-]+(?: or [a-z0-9_]+)*))?(, contiguous)?")
"""Shapes, dtypes and layout in the rule of a tensor."""

_NUMBER = re.compile(r"(?:(?P<low>\d+) <= )?(?P<size>\w+)(?: >= (?P<least>\d+)| <= (?P<high>.+))?")
_BUILTINS = {"__builtins__": {"max": max}}


class ArgumentRules:
    """The rules of one op's arguments.

    Args:
        op: Name of the op, for messages.
        hints: Annotations by parameter, in the order of the signature.
        sizes_from: Tensors that give the sizes, if not the first ones of the signature.
        ignored: Names of the arguments not to check in a call, from the call's arguments.
        errors: Raised for a tensor and for a number.
    """

    def __init__(
        self,
        op: str,
        hints: Mapping[str, Any],
        *,
        sizes_from: Sequence[str] = (),
        ignored: Callable[[Any], Collection[str]] | None = None,
        errors: tuple[ArgumentError, ArgumentError] = (InputError, InputError),
    ) -> None:
        self._op = op
        self._ignored = ignored
        self._error, self._number_error = errors
        self._tensors: list[tuple[int, str, _TensorRule]] = []
        self._numbers: list[tuple[int, str, _NumberRule]] = []
        for index, (name, hint) in enumerate(hints.items()):
            if get_origin(hint) is Annotated:
                rule = get_args(hint)[1]
                if rule.startswith("["):
                    self._tensors.append((index, name, _TensorRule(rule)))
                else:
                    self._numbers.append((index, name, _NumberRule(rule)))
        self._tensors.sort(key=lambda rule: rule[1] not in sizes_from)
        known = {number.size for _, _, number in self._numbers}
        for _, name, rule in self._tensors:
            is_optional = type(None) in get_args(get_args(hints[name])[0])
            known |= rule.note_known(known, is_optional)

    def check(self, arguments: Sequence[Any]) -> None:
        """Check the arguments of one call, in the order of the signature.

        Raises:
            InputError: A tensor has the wrong shape, dtype, device or layout, or a number is out
                of range. Ops of attention raise AttentionError; ``number_error`` may be
                ConfigError.
        """
        sizes: dict[str, Any] = {}
        for index, name, number in self._numbers:
            value = arguments[index]
            if not number.fits(value, sizes):
                text = f"{self._op}: {name} is {value}, expected {number.expected(sizes)}."
                refuse(self._number_error, text, name)
        ignored = self._ignored(arguments) if self._ignored else ()
        device = None
        for index, name, rule in self._tensors:
            tensor = arguments[index]
            if tensor is None or name in ignored:
                continue
            device = device or tensor.device
            if not rule.fits(tensor, sizes) or tensor.device != device:
                text = f"{self._op}: {name} is {describe(tensor)}, expected "
                refuse(self._error, f"{text}{rule.expected(tensor, sizes)} on {device}.", name)
            if rule.is_contiguous and not tensor.is_contiguous():
                refuse(
                    self._error,
                    f"{self._op}: {name} has strides {list(tensor.stride())}, expected contiguous "
                    "memory, which the op writes in place. Pass the memory itself, not a view.",
                    name,
                )


class _TensorRule:
    """Shapes, dtypes and layout of a tensor."""

    def __init__(self, text: str) -> None:
        match = TENSOR_RULE.fullmatch(text)
        assert match, f"no rule for a tensor: {text!r}"
        shapes, dtypes, contiguous = match.groups()
        self._shapes = tuple(_Shape(shape) for shape in shapes.split(" or "))
        self._first, self._others = self._shapes[0], self._shapes[1:]
        self._dtype_text = f" {dtypes}" if dtypes else ""
        self._dtypes: Collection[torch.dtype] | None = None
        if dtypes == "floating-point":
            self._dtypes = FLOATING_POINT
        elif dtypes:
            self._dtypes = [getattr(torch, dtype) for dtype in dtypes.split(" or ")]
        self.is_contiguous = bool(contiguous)

    def note_known(self, known: set[str], is_optional: bool) -> set[str]:
        """Note the sizes that are known before this tensor; return those known after it."""
        for shape in self._shapes:
            shape.is_known = shape.names <= known
        return set() if is_optional or self._others else self._first.names

    def fits(self, tensor: torch.Tensor, sizes: dict[str, Any]) -> bool:
        """Return whether the tensor has one of the shapes and dtypes; note sizes not yet known."""
        if self._dtypes is not None and tensor.dtype not in self._dtypes:
            return False
        shape = tensor.shape
        if self._first.fits(shape, sizes):
            return True
        return any(other.fits(shape, sizes) for other in self._others)

    def expected(self, tensor: torch.Tensor, sizes: dict[str, Any]) -> str:
        """Describe the shape and dtypes, with numbers where the number of dimensions is right."""
        fitting = [shape for shape in self._shapes if shape.fits_rank(tensor.dim())]
        numbers = f" = {fitting[0].value(sizes)}" if fitting else ""
        shape = (fitting or self._shapes)[0]
        return f"{shape.text}{numbers}{self._dtype_text}"


class _Shape:
    """One shape: its text, and a size or an expression per dimension.

    Attributes:
        names: Sizes in it.
        is_known: True if earlier arguments give all of them.
    """

    def __init__(self, text: str) -> None:
        dims = [dim for dim in text.strip("[]").split(", ") if dim]
        self.text = text
        self._is_open = dims[-1:] == ["..."]
        self._dims: list[tuple[str, int, CodeType | None]] = []
        for bounded in dims[:-1] if self._is_open else dims:
            dim, _, least = bounded.partition(" >= ")
            code = None if dim.isidentifier() else compile(dim, text, "eval")
            self._dims.append((dim, int(least or 0), code))
        self._value = compile(f"({''.join(f'{dim},' for dim, _, _ in self._dims)})", text, "eval")
        self.names = set(self._value.co_names) - _BUILTINS["__builtins__"].keys()
        self.is_known = False
        self._is_plain = not self._is_open and not any(least for _, least, _ in self._dims)

    def fits(self, shape: torch.Size, sizes: dict[str, Any]) -> bool:
        """Return whether ``shape`` is this shape; note sizes not yet known."""
        if self.is_known and self._is_plain:  # the fast path: one comparison
            return bool(shape == eval(self._value, _BUILTINS, sizes))
        if not self.fits_rank(len(shape)):
            return False
        for (dim, least, code), size in zip(self._dims, shape, strict=False):
            known = eval(code, _BUILTINS, sizes) if code else sizes.setdefault(dim, size)
            if size != known or size < least:
                return False
        return True

    def fits_rank(self, dims: int) -> bool:
        """Return whether a tensor of so many dimensions may have this shape."""
        return dims == len(self._dims) or (self._is_open and dims > len(self._dims))

    def value(self, sizes: dict[str, Any]) -> str:
        """Describe the dimensions in numbers, with names for sizes not yet known."""
        dims = []
        for dim, least, code in self._dims:
            known = eval(code, _BUILTINS, sizes) if code else sizes.get(dim, dim)
            dims.append(str(max(known, least)) if isinstance(known, int) else known)
        return f"[{', '.join([*dims, '...'] if self._is_open else dims)}]"


class _NumberRule:
    """The size that a number gives, and its bounds."""

    def __init__(self, text: str) -> None:
        match = _NUMBER.fullmatch(text)
        assert match, f"no rule for a number: {text!r}"
        self.size = match["size"]
        self._least = int(match["low"] or match["least"])
        self._high = match["high"]
        self._most = compile(self._high, text, "eval") if self._high else None

    def fits(self, value: float, sizes: dict[str, Any]) -> bool:
        """Return whether the number is in its range, and add it to ``sizes``; NaN is not."""
        sizes[self.size] = value
        return value >= self._least and (self._most is None or value <= self._bound(sizes))

    def expected(self, sizes: dict[str, Any]) -> str:
        """Describe the range."""
        if self._most is None:
            return f"at least {self._least}"
        bound = self._bound(sizes)
        formula = "" if self._high == str(bound) else f" = {self._high}"
        return f"{self._least} to {bound}{formula}"

    def _bound(self, sizes: dict[str, Any]) -> Any:
        return eval(self._most, _BUILTINS, sizes) if self._most else None


def check_dtype(owner: str, dtype: object) -> None:
    """Check that an argument is a data type that models compute in.

    Args:
        owner: Name of the function that the argument belongs to.
        dtype: Its value.

    Raises:
        ConfigError: It is not in ``FLOATING_POINT``.
    """
    if dtype not in FLOATING_POINT:
        raise ConfigError(
            f"{owner}.dtype must be torch.float16, bfloat16, float32 or float64, got "
            f"{short_repr(dtype)}.",
            field="dtype",
        )


def refuse(error: ArgumentError, message: str, field: str) -> None:
    """Raise ``error``, naming the argument in ``field`` where the class keeps it."""
    raise error(message) if issubclass(error, AttentionError) else error(message, field=field)


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor for a message, such as ``[2, 4] int64 on cpu``."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
