"""Docstrings of ops: what the source says, with what the registration knows.

The source says what an op and its arguments mean. Types, shapes, dtypes, bounds, errors and what is
written in place come from the annotations that calls are checked by (``argument_rules``). The
letters of shapes come from the paragraph ``Dimensions`` of the module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from textwrap import fill
from typing import Annotated, Any, get_args, get_origin

from graphkit.ops.argument_rules import TENSOR_RULE, ArgumentError

WIDTH = 96
"""Columns of a line; ``help`` indents it by four more."""

_DIMENSIONS = re.compile(r"^Dimensions: .+?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r" {4}(\w+): (.*)")


def complete_docstring(
    function: Callable[..., Any],
    hints: Mapping[str, Any],
    *,
    mutates_args: Collection[str],
    errors: tuple[ArgumentError, ArgumentError],
    differentiable: bool,
) -> str | None:
    """Return the complete docstring of an op; None under ``python -OO``.

    Args:
        function: The torch reference. The section ``Args`` of its docstring names every parameter.
        hints: Annotations by parameter.
        mutates_args: Parameters that the op writes in place.
        errors: Raised for a tensor and for a number that do not fit.
        differentiable: Whether gradients flow through the op.
    """
    if function.__doc__ is None:
        return None
    about, _, rest = inspect.cleandoc(function.__doc__).partition("\n\nArgs:\n")
    section, *returns = rest.split("\n\n", 1)
    meanings = _entries(section)
    assert meanings.keys() == hints.keys(), f"{function.__name__}: Args are {list(meanings)}"
    arguments = [
        f"{name} ({_kind(hint, name in mutates_args)}): {meanings[name]}"
        for name, hint in hints.items()
    ]
    use = (
        "At most one launch on the current stream, unless stated otherwise above. Never "
        f"synchronises; may be captured{' and differentiated' if differentiable else ''}."
    )
    sections = [about, fill(use, WIDTH), _section("Args", arguments), *returns]
    if any(get_origin(hint) is Annotated for hint in hints.values()):
        sections.append(_section("Raises", _raises(*errors)))
    if dimensions := _DIMENSIONS.search(sys.modules[function.__module__].__doc__ or ""):
        sections.insert(2, fill(dimensions[0], WIDTH))
    return "\n\n".join(sections)


def _entries(section: str) -> dict[str, str]:
    """Return the text of each argument in the lines of a section ``Args``."""
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := _ENTRY.match(line):
            name, texts[match[1]] = match.groups()
        else:
            texts[name] += f" {line.strip()}"
    return texts


def _section(title: str, entries: list[str]) -> str:
    lines = (
        fill(entry, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries
    )
    return "\n".join([f"{title}:", *lines])


def _kind(hint: Any, is_written: bool) -> str:
    """Describe an argument, such as ``Tensor, [B, W] int64, contiguous, written in place``."""
    rule = ""
    if get_origin(hint) is Annotated:
        hint, rule = get_args(hint)
    kind = hint.__name__ if isinstance(hint, type) else str(hint)
    parts = [kind.replace("torch.", "").replace("collections.abc.", "")]
    if match := TENSOR_RULE.fullmatch(rule):
        shapes, dtypes, *others = match.groups()
        if dtypes and dtypes.endswith(".dtype"):
            dtypes = f"of the dtype of {dtypes.removesuffix('.dtype')}"
        parts.append("".join([f"{shapes} {dtypes or 'of any dtype'}", *filter(None, others)]))
    elif rule:
        parts.append(rule)
    return ", ".join([*parts, "written in place"] if is_written else parts)


def _raises(error: ArgumentError, number_error: ArgumentError) -> list[str]:
    tensor = f"{error.__name__}: A tensor has the wrong shape, dtype, device or layout"
    if error is number_error:
        return [f"{tensor}, or an argument is out of range."]
    return [f"{tensor}.", f"{number_error.__name__}: A number is out of range."]
