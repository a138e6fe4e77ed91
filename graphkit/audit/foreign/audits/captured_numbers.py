"""Find where the numbers come from that the operations of a capture get.

The call of an operation is an expression in the source of a running function. Its parts that are
numbers are computed again, without running code of the program. A part that equals an argument of
the operation is where that argument comes from, and the numbers in it are followed: to the objects
that hold them, through variables to what was assigned, and through parameters to the callers.
"""

from __future__ import annotations

import ast
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import CodeType, FrameType
from typing import Any

from graphkit.audit.foreign.audits.held_numbers import (
    MISSING,
    NUMBERS,
    HeldNumber,
    Steps,
    attribute,
    follow,
    object_path,
    variable_path,
)
from graphkit.graphs.operations import schema
from graphkit.graphs.source_lines import line_in, user_frames

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "int": int, "float": float, "abs": abs, "round": round,
}  # fmt: skip
_LARGEST = 1 << 62
"""Numbers beyond are no arguments of operations, and powers of them take long."""
_DEEPEST = 12
"""Callers and assignments that a number is followed through."""


Calls = Sequence[tuple[str, tuple[Any, ...]]]
"""Name and numbers of each operation, in their order."""
Derive = Callable[[Any], Any]
"""Computes a number from another one; ``MISSING`` if that is no number."""


@dataclass(frozen=True, slots=True)
class CapturedNumber:
    """A number that an operation of a graph got, and where the program holds it.

    Attributes:
        held: Where the program holds it.
        op: Name of the operation, such as ``mul``, or of a kernel of Triton.
        argument: Name of its argument; ``grid`` for the launch size of a kernel.
        value: The argument, which may be computed from the number.
        derive: Computes the argument from the number.
        node: Index of the operation's node, or of the next one if it is a view.
        source: The line of the call.
    """

    held: HeldNumber
    op: str
    argument: str
    value: Any
    derive: Derive
    node: int
    source: str


class NumberSearch:
    """Finds the numbers that the operations of one capture get.

    Attributes:
        calls: All operations.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, Steps], CapturedNumber] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._outer = set(map(id, user_frames()))

    @property
    def numbers(self) -> tuple[CapturedNumber, ...]:
        """Each held number once."""
        return tuple(self._found.values())

    def note(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], node: int) -> None:
        """Search the numbers among the arguments of an operation that is about to run."""
        with suppress(Exception):  # the program must not see an error of the search
            self.calls.append(noted_call(op, args, kwargs))
            self._search(self.calls[-1][0], list(_numbers_in(op, args, kwargs)), node)

    def note_launch(self, kernel: str, arguments: Mapping[str, Any], node: int) -> None:
        """Search the numbers that a kernel of Triton is about to be launched with."""
        with suppress(Exception):
            self._search(kernel, list(_named_numbers(arguments.items())), node)

    def _search(self, op: str, given: Sequence[tuple[str, Any]], node: int) -> None:
        if not given:
            return
        frames = user_frames()
        call = _call_at(frames[0]) if frames and not _is_compiled(frames[0]) else None
        if call is None:
            return
        stack = [_Variables(frame, id(frame) in self._outer) for frame in frames]
        for part, value in _numeric_parts(call, stack[0]):
            argument = next((key for key, one in given if _is_equal(one, value)), None)
            if argument is None:
                continue
            for held, derive in _Sources(stack).of(part, 0):
                source = line_in([(frames[0], frames[0].f_lineno)])
                number = CapturedNumber(held, op, argument, value, derive, node, source)
                self._found.setdefault((id(held.root), held.steps), number)


class _Variables:
    """The variables of a frame; an outer one ran before the capture began, and may run after it."""

    def __init__(self, frame: FrameType, is_outer: bool) -> None:
        self.frame, self.is_outer = frame, is_outer

    @cached_property
    def local(self) -> Mapping[str, Any]:
        return self.frame.f_locals

    def get(self, name: str) -> Any:
        found = self.local.get(name, MISSING)
        return self.frame.f_globals.get(name, MISSING) if found is MISSING else found

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression of constants, variables and arithmetic."""
        function, operands = _operation(node)
        if function is not None:
            return _computed(function, map(self.value, operands))
        path = self.path(node)
        if path is not None:
            return follow(self.get(path[0]), path[1])
        match node:
            case ast.Constant():
                return node.value
            case ast.Subscript():
                return follow(self.value(node.value), (("item", self.value(node.slice)),))
            case ast.Call(func=ast.Attribute(attr="size", value=held), args=[axis]):
                return follow(attribute(self.value(held), "shape"), (("item", self.value(axis)),))
        return MISSING

    def of_part(self, node: ast.AST, part: ast.AST) -> Derive:
        """Return a function that computes an expression from the value of one of its parts."""
        function, operands = _operation(node)
        known = [None if one is part else self.value(one) for one in operands]
        return lambda value: _computed(function, [value if k is None else k for k in known])

    def path(self, node: ast.AST) -> tuple[str, Steps] | None:
        """Return the variable and the steps of an expression such as ``self.sizes[0]``."""
        step: tuple[str, Any]
        match node:
            case ast.Name():
                return node.id, ()
            case ast.Attribute(value=held, attr=name):
                step = "attribute", name
            case ast.Subscript(value=held, slice=index):
                step = "item", self.value(index)
            case ast.Call(func=ast.Name(id="len"), args=[held]):
                step = "length", None
            case _:
                return None
        before = self.path(held)
        if before is None or type(step[1]) not in (int, str, type(None)):
            return None
        return before[0], (*before[1], step)


def _operation(node: ast.AST) -> tuple[Callable[..., Any] | None, Sequence[ast.AST]]:
    """Return the function and the operands of arithmetic; ``None`` for another expression."""
    match node:
        case ast.UnaryOp():
            return _OPERATORS.get(type(node.op)), [node.operand]
        case ast.BinOp():
            return _OPERATORS.get(type(node.op)), [node.left, node.right]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name], node.args
    return None, []


class _Sources:
    """Follows an expression to the numbers that the program holds."""

    def __init__(self, stack: Sequence[_Variables]) -> None:
        self._stack = stack
        self._seen: set[tuple[int, str, Steps]] = set()

    def of(
        self, node: ast.AST, depth: int, steps: Steps = ()
    ) -> Iterator[tuple[HeldNumber, Derive]]:
        """Yield the held numbers in an expression of a frame, or at a path from its value.

        Each comes with a function that computes the expression from it.
        """
        path = self._stack[depth].path(node)
        if path is not None:
            yield from self._at(depth, path[0], (*path[1], *steps))
        elif not steps:
            for child in ast.iter_child_nodes(node):
                outer = self._stack[depth].of_part(node, child)
                for held, inner in self.of(child, depth):
                    yield held, partial(_composed, outer, inner)

    def _at(self, depth: int, name: str, steps: Steps) -> Iterator[tuple[HeldNumber, Derive]]:
        variables = self._stack[depth]
        root, key = variables.get(name), (depth, name, steps)
        number = follow(root, steps)
        if type(number) not in NUMBERS or key in self._seen or len(self._seen) > _DEEPEST:
            return
        self._seen.add(key)
        held = object_path(root, steps, number) if steps else None
        if held is not None:
            yield held, _same
        elif name not in variables.local or variables.local is variables.frame.f_globals:
            yield from self._global(variables, name, steps, number)
        elif name in variables.frame.f_code.co_freevars:
            for outer in range(depth + 1, len(self._stack)):
                if name in self._stack[outer].frame.f_code.co_cellvars:
                    yield from self._at(outer, name, steps)
                    return
        else:
            if variables.is_outer:
                yield variable_path(variables.frame.f_code, name, steps, number), _same
            yield from self._assigned(depth, name, steps, number)

    def _global(
        self, variables: _Variables, name: str, steps: Steps, number: Any
    ) -> Iterator[tuple[HeldNumber, Derive]]:
        values = variables.frame.f_globals
        module = sys.modules.get(str(values.get("__name__")))
        if module is not None and vars(module) is values:
            held = object_path(module, (("attribute", name), *steps), number)
            if held is not None:
                yield held, _same
            return
        for other in self._stack:  # a script that ``runpy`` runs is no module
            if other.local is values or other.frame.f_locals is values:
                yield variable_path(other.frame.f_code, name, steps, number), _same
                return

    def _assigned(
        self, depth: int, name: str, steps: Steps, number: Any
    ) -> Iterator[tuple[HeldNumber, Derive]]:
        """Follow what was assigned to a variable, or passed for a parameter, if it is equal."""
        frame = self._stack[depth].frame
        code = frame.f_code
        function = _source(code.co_filename)[1].get((code.co_firstlineno, code.co_name))
        if function is None:
            return
        sources = [(depth, value, steps) for value in _assigned_to(function, name)]
        if depth + 1 < len(self._stack):
            call = _call_at(self._stack[depth + 1].frame)
            if isinstance(call, ast.Call):
                passed = _passed_for(function.args, call, name, steps)
                sources += [(depth + 1, value, left) for value, left in passed]
        for at, node, left in sources:
            value = follow(self._stack[at].value(node), left)
            if _is_equal(value, number):
                yield from self.of(node, at, left)


def noted_call(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...]]:
    """Return the name of an operation and the numbers that it gets."""
    return op.overloadpacket.__name__, tuple(value for _, value in _numbers_in(op, args, kwargs))


def _numbers_in(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    names = [argument.name for argument in schema(op).arguments]
    return _named_numbers((*zip(names, args, strict=False), *kwargs.items()))


def _named_numbers(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments:
        for one in value if type(value) in (list, tuple) else (value,):
            if type(one) in NUMBERS:
                yield name, one


def _numeric_parts(node: ast.AST, variables: _Variables) -> Iterator[tuple[ast.AST, Any]]:
    """Yield the largest parts of an expression that are numbers and no constants."""
    if isinstance(node, (ast.Constant, ast.Lambda, ast.Compare)):
        return
    value = variables.value(node) if isinstance(node, ast.expr) else MISSING
    if type(value) in NUMBERS:
        yield node, value
        return
    for child in ast.iter_child_nodes(node):
        yield from _numeric_parts(child, variables)


def _same(value: Any) -> Any:
    return value


def _composed(outer: Derive, inner: Derive, value: Any) -> Any:
    return outer(inner(value))


def _is_compiled(user_frame: FrameType) -> bool:
    """Return whether the user's frame called what torch.compile made: its calls are not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not user_frame:
        if str(frame.f_globals.get("__name__")).startswith("torch._inductor"):
            return True
        frame = frame.f_back
    return False


def _computed(function: Callable[..., Any] | None, values: Iterable[Any]) -> Any:
    given = list(values)
    if function is None or any(
        type(one) not in NUMBERS or not -_LARGEST < one < _LARGEST for one in given
    ):
        return MISSING
    if function is operator.pow and abs(given[1]) > 64:
        return MISSING
    try:
        return function(*given)
    except (ArithmeticError, TypeError, ValueError):
        return MISSING


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two numbers are one number; a flag equals flags alone."""
    if type(one) not in NUMBERS or type(other) not in NUMBERS:
        return False
    return (type(one) is bool) == (type(other) is bool) and bool(one == other)


# The source of a running frame.


def _call_at(frame: FrameType) -> ast.AST | None:
    """Return the expression that a frame is computing; ``None`` without its source."""
    positions = _positions(frame.f_code)
    index = frame.f_lasti // 2
    position = positions[index] if 0 <= index < len(positions) else None
    return _source(frame.f_code.co_filename)[0].get(position) if position else None


@cache
def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


@cache
def _source(filename: str) -> tuple[dict[Any, ast.AST], dict[tuple[int, str], Any]]:
    """Return the expressions of a file by their position, and its functions by line and name."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}, {}
    expressions: dict[Any, ast.AST] = {}
    functions: dict[tuple[int, str], Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.AugAssign)):
            expressions.setdefault(_position(node), node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            functions[first, node.name] = node
        if isinstance(node, ast.Assign):  # `x[:n] = value` has the position of its target
            expressions |= {
                _position(target): node
                for target in node.targets
                if isinstance(target, ast.Subscript)
            }
    return expressions, functions


def _position(node: Any) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _assigned_to(function: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the expressions that a function assigns to a variable."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _matched(target, node.value, name)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield from _matched(node.target, node.value, name)


def _matched(target: ast.AST, value: ast.AST, name: str) -> Iterator[ast.AST]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _matched(one, its, name)


def _passed_for(
    parameters: ast.arguments, call: ast.Call, name: str, steps: Steps
) -> Iterator[tuple[ast.AST, Steps]]:
    """Yield what a call may pass for a parameter, with the path from it to the number.

    ``**values`` pass a parameter as an item, and a parameter ``**values`` takes keywords as items.
    """
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    if parameters.kwarg is not None and parameters.kwarg.arg == name and steps:
        name, steps = str(steps[0][1]), steps[1:]
    elif name in names:
        # The object of a method is no argument of its call, nor are those that torch's modules add.
        offsets = {0, 1} if names[:1] in (["self"], ["cls"]) else {0}
        for offset in offsets:
            index = names.index(name) - offset
            if 0 <= index < len(call.args):
                yield call.args[index], steps
    for keyword in call.keywords:
        if keyword.arg == name:
            yield keyword.value, steps
        elif keyword.arg is None:
            yield keyword.value, (("item", name), *steps)


def is_same(before: Any, now: Any) -> bool:
    """Return whether a held value is the number that it was; NaN equals NaN."""
    both_nan = before != before and now != now
    return now is MISSING or both_nan or (type(now) in NUMBERS and bool(now == before))
