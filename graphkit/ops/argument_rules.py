"""Rules for the arguments and results of an op, read from the annotations of its signature.

A tensor's rule is its shape, its dtypes and ``contiguous`` where the op needs that::

    Annotated[torch.Tensor, "[B, W - 1] int32 or int64"]
    Annotated[torch.Tensor, "[B] or [B, K] int64"]         one of two shapes
    Annotated[torch.Tensor, "[slots, ...], contiguous"]    any further dimensions, any dtype
    Annotated[torch.Tensor, "[T, H] floating-point"]       float16, bfloat16, float32 or float64
    Annotated[torch.Tensor, "[N, K] x.dtype"]              the dtype of the argument x
    Annotated[torch.Tensor, "[words] int64, on any device"]

A dimension is a size, a size with a bound as in ``W >= 1`` or ``A <= W``, or an expression over
sizes. A number's rule names the size that it gives and bounds it: ``Annotated[int, "1 <= K <= V"]``
or ``Annotated[float, "eps >= 0"]``. A size is the number that gives it, else the dimension of the
first tensor that has it. All tensors are on one device, unless a rule says otherwise. Arguments
without a rule, and optional tensors that are None, are not checked.

Annotations of results have the same form. An op whose results have rules needs no fake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import CodeType
from typing import Annotated, Any, get_args, get_origin

import torch

from graphkit.errors import AttentionError, ConfigError, InputError, short_repr

ArgumentError = type[InputError] | type[ConfigError] | type[AttentionError]

FLOATING_POINT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of the rule ``floating-point``."""
TENSOR_RULE = re.compile(
    r"(\[.*\])(?: ([a-z0-9_-]+(?: or [a-z0-9_]+)*|\w+\.dtype))?(, contiguous)?(, on any device)?"
)
"""Shapes, dtypes, layout and device in the rule of a tensor."""

_NUMBER = re.compile(r"(?:(?P<low>\d+) <= )?(?P<size>\w+)(?: >= (?P<least>\d+)| <= (?P<high>.+))?")
_DIMENSION = re.compile(r"(.+?)(?: (>=|<=) (.+))?")
_BUILTINS = {"__builtins__": {"max": max}}


class ArgumentRules:
    """The rules of one op's arguments.

    Args:
        op: Name of the op, for messages.
        hints: Annotations by parameter, in the order of the signature.
        sizes_from: Tensors that give the sizes, if not the first ones of the signature.
        errors: Raised for a tensor and for a number.
    """

    def __init__(
        self,
        op: str,
        hints: Mapping[str, Any],
        *,
        sizes_from: Sequence[str] = (),
        errors: tuple[ArgumentError, ArgumentError] = (InputError, InputError),
    ) -> None:
        self._op = op
        self._error, self._number_error = errors
        self._tensors: list[tuple[int, str, _TensorRule]] = []
        numbers: list[tuple[int, str, _NumberRule]] = []
        for index, (name, hint) in enumerate(hints.items()):
            if get_origin(hint) is Annotated:
                rule = get_args(hint)[1]
                if rule.startswith("["):
                    self._tensors.append((index, name, _TensorRule(rule, list(hints))))
                else:
                    numbers.append((index, name, _NumberRule(rule)))
        self._tensors.sort(key=lambda rule: rule[1] not in sizes_from)
        self._sizes = [(index, number.size) for index, _, number in numbers]
        known = {number.size for _, _, number in numbers}
        # A bound over sizes of tensors is checked once these are known.
        self._numbers = [rule for rule in numbers if rule[2].names <= known]
        self._later_numbers = [rule for rule in numbers if not rule[2].names <= known]
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
        sizes = {size: arguments[index] for index, size in self._sizes}
        self._check_numbers(self._numbers, arguments, sizes)
        device = None
        for index, name, rule in self._tensors:
            tensor = arguments[index]
            if tensor is None:
                continue
            device = device or tensor.device
            is_here = tensor.device == device or rule.is_on_any_device
            if not (rule.fits(tensor, sizes, arguments) and is_here):
                text = f"{self._op}: {name} is {describe(tensor)}, expected "
                place = "" if rule.is_on_any_device else f" on {device}"
                text += f"{rule.expected(tensor, sizes, arguments)}{place}."
                refuse(self._error, text, name)
            if rule.is_contiguous and not tensor.is_contiguous():
                refuse(
                    self._error,
                    f"{self._op}: {name} has strides {list(tensor.stride())}, expected contiguous "
                    "memory, which the op writes in place. Pass the memory itself, not a view.",
                    name,
                )
        self._check_numbers(self._later_numbers, arguments, sizes)

    def _check_numbers(
        self,
        rules: Sequence[tuple[int, str, _NumberRule]],
        arguments: Sequence[Any],
        sizes: dict[str, Any],
    ) -> None:
        for index, name, number in rules:
            if not number.fits(arguments[index], sizes):
                text = f"{self._op}: {name} is {arguments[index]}, expected "
                refuse(self._number_error, f"{text}{number.expected(sizes)}.", name)

    def sizes(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], torch.device]:
        """Return the sizes of one call, which is not checked, and the device of its tensors."""
        sizes = {size: arguments[index] for index, size in self._sizes}
        device = None
        for index, _, rule in self._tensors:
            tensor = arguments[index]
            if tensor is not None:
                device = device or tensor.device
                rule.note_sizes(tensor, sizes)
        assert device is not None, f"{self._op}: no rule for a tensor"
        return sizes, device


class ResultRules:
    """The rules of what an op returns, by which its results are allocated.

    Args:
        hint: Annotation of the result: a tensor with its rule, or a tuple of such.
        arguments: Names of the arguments, in the order of the signature.
    """

    def __init__(self, hint: Any, arguments: Sequence[str]) -> None:
        self._is_tuple = get_origin(hint) is tuple
        hints = get_args(hint) if self._is_tuple else (hint,)
        self._rules = [_TensorRule(get_args(each)[1], arguments) for each in hints]

    def allocate(
        self, arguments: Sequence[Any], sizes: dict[str, Any], device: torch.device
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return empty results for the sizes of a call."""
        results = tuple(rule.empty(arguments, sizes, device) for rule in self._rules)
        return results if self._is_tuple else results[0]


class _TensorRule:
    """Shapes, dtypes, layout and device of a tensor."""

    def __init__(self, text: str, arguments: Sequence[str]) -> None:
        match = TENSOR_RULE.fullmatch(text)
        assert match, f"no rule for a tensor: {text!r}"
        shapes, dtypes, contiguous, anywhere = match.groups()
        self._shapes = tuple(_Shape(shape) for shape in shapes.split(" or "))
        self._first, self._others = self._shapes[0], self._shapes[1:]
        self._dtype_text = f" {dtypes}" if dtypes else ""
        self._dtypes: Collection[torch.dtype] | None = None
        self._dtype_of: int | None = None
        if dtypes == "floating-point":
            self._dtypes = FLOATING_POINT
        elif dtypes and dtypes.endswith(".dtype"):
            self._dtype_of = arguments.index(dtypes.removesuffix(".dtype"))
        elif dtypes:
            self._dtypes = [getattr(torch, dtype) for dtype in dtypes.split(" or ")]
        self.is_contiguous, self.is_on_any_device = bool(contiguous), bool(anywhere)

    def note_known(self, known: set[str], is_optional: bool) -> set[str]:
        """Note the sizes that are known before this tensor; return those known after it."""
        for shape in self._shapes:
            shape.is_known = shape.names <= known
        return set() if is_optional or self._others else self._first.names

    def fits(self, tensor: torch.Tensor, sizes: dict[str, Any], arguments: Sequence[Any]) -> bool:
        """Return whether the tensor has one of the shapes and dtypes; note sizes not yet known."""
        if self._dtypes is not None and tensor.dtype not in self._dtypes:
            return False
        if self._dtype_of is not None and tensor.dtype != arguments[self._dtype_of].dtype:
            return False
        shape = tensor.shape
        if self._first.fits(shape, sizes):
            return True
        return any(other.fits(shape, sizes) for other in self._others)

    def note_sizes(self, tensor: torch.Tensor, sizes: dict[str, Any]) -> None:
        """Note the sizes that the tensor gives, if they are not known yet."""
        for shape in self._shapes:
            if shape.fits_rank(tensor.dim()):
                shape.note_sizes(tensor.shape, sizes)
                return

    def empty(
        self, arguments: Sequence[Any], sizes: dict[str, Any], device: torch.device
    ) -> torch.Tensor:
        """Allocate a tensor of the shape and dtype."""
        if self._dtype_of is not None:
            dtype = arguments[self._dtype_of].dtype
        else:
            (dtype,) = self._dtypes or ()
        return torch.empty(self._first.of(sizes), dtype=dtype, device=device)

    def expected(
        self, tensor: torch.Tensor, sizes: dict[str, Any], arguments: Sequence[Any]
    ) -> str:
        """Describe the shape and dtypes, with numbers where the number of dimensions is right."""
        fitting = [shape for shape in self._shapes if shape.fits_rank(tensor.dim())]
        numbers = f" = {fitting[0].value(sizes)}" if fitting else ""
        shape, dtype = (fitting or self._shapes)[0], ""
        if self._dtype_of is not None:
            dtype = f" = {str(arguments[self._dtype_of].dtype).removeprefix('torch.')}"
        return f"{shape.text}{numbers}{self._dtype_text}{dtype}"


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
        self._dims: list[tuple[str, CodeType | None]] = []
        self._bounds: list[tuple[int, bool, CodeType]] = []  # dimension, whether least, bound
        for place, bounded in enumerate(dims[:-1] if self._is_open else dims):
            match = _DIMENSION.fullmatch(bounded)
            assert match, f"no rule for a dimension: {bounded!r}"
            dim, sign, bound = match.groups()
            self._dims.append((dim, None if dim.isidentifier() else compile(dim, text, "eval")))
            if bound:
                self._bounds.append((place, sign == ">=", compile(bound, text, "eval")))
        self._value = compile(f"({''.join(f'{dim},' for dim, _ in self._dims)})", text, "eval")
        self.names = set(self._value.co_names) - _BUILTINS["__builtins__"].keys()
        self.is_known = False
        self._is_plain = not self._is_open and not self._bounds

    def fits(self, shape: torch.Size, sizes: dict[str, Any]) -> bool:
        """Return whether ``shape`` is this shape; note sizes not yet known."""
        if self.is_known and self._is_plain:  # the fast path: one comparison
            return bool(shape == self.of(sizes))
        if not self.fits_rank(len(shape)):
            return False
        for (dim, code), size in zip(self._dims, shape, strict=False):
            known = _value_of(code, sizes) if code else sizes.setdefault(dim, size)
            if size != known:
                return False
        for place, is_least, code in self._bounds:
            bound = _value_of(code, sizes)
            if shape[place] < bound if is_least else shape[place] > bound:
                return False
        return True

    def note_sizes(self, shape: torch.Size, sizes: dict[str, Any]) -> None:
        """Note the sizes that ``shape`` gives, if they are not known yet."""
        for (dim, code), size in zip(self._dims, shape, strict=False):
            if code is None:
                sizes.setdefault(dim, size)

    def of(self, sizes: dict[str, Any]) -> Any:
        """Return the dimensions in numbers, all of which are known."""
        return _value_of(self._value, sizes)

    def fits_rank(self, dims: int) -> bool:
        """Return whether a tensor of so many dimensions may have this shape."""
        return dims == len(self._dims) or (self._is_open and dims > len(self._dims))

    def value(self, sizes: dict[str, Any]) -> str:
        """Describe the dimensions in numbers, with names for sizes not yet known."""
        dims = [_value_of(code, sizes) if code else sizes.get(dim, dim) for dim, code in self._dims]
        for place, is_least, code in self._bounds:
            if isinstance(dims[place], int):
                dims[place] = (max if is_least else min)(dims[place], _value_of(code, sizes))
        return f"[{', '.join(map(str, [*dims, '...'] if self._is_open else dims))}]"


class _NumberRule:
    """The size that a number gives, and its bounds.

    Attributes:
        size: The size.
        names: Sizes in its bound.
    """

    def __init__(self, text: str) -> None:
        match = _NUMBER.fullmatch(text)
        assert match, f"no rule for a number: {text!r}"
        self.size = match["size"]
        self._least = int(match["low"] or match["least"])
        self._high = match["high"]
        self._most = compile(self._high, text, "eval") if self._high else None
        names = self._most.co_names if self._most else ()
        self.names = set(names) - _BUILTINS["__builtins__"].keys()

    def fits(self, value: float, sizes: dict[str, Any]) -> bool:
        """Return whether the number is in its range; NaN is not."""
        return value >= self._least and (
            self._most is None or value <= _value_of(self._most, sizes)
        )

    def expected(self, sizes: dict[str, Any]) -> str:
        """Describe the range."""
        if self._most is None:
            return f"at least {self._least}"
        bound = _value_of(self._most, sizes)
        formula = "" if self._high == str(bound) else f" = {self._high}"
        return f"{self._least} to {bound}{formula}"


def _value_of(code: CodeType, sizes: dict[str, Any]) -> Any:
    """Return the value of an expression over sizes."""
    return eval(code, _BUILTINS, sizes)


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
