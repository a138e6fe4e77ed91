"""Registration of an op: its torch reference, its CUDA launcher, its fake and its checks at once.

The decorated function is the reference, and its signature is the op's: parameters, rules
(``argument_rules``) and documentation. On CUDA the op calls ``launch_NAME`` of the module of the
same name in ``graphkit.ops.kernels``, which is imported at the first call. Launcher, fake and
extra check take the arguments of a call as one named tuple. If the results have rules, they are
allocated before, and the launcher takes them as its second argument.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import ArgumentError, ArgumentRules, ResultRules
from graphkit.ops.docstrings import complete_docstring
from graphkit.ops.kernel_requests import kernel_requests

make_tuple_type: Callable[..., type[Any]] = namedtuple  # noqa: PYI024 - fields known at run time
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OPS: dict[str, RegisteredOp] = {}
"""Every registered op by name."""

LIBRARY = torch.library.Library("graphkit", "FRAGMENT")
"""Defines the ops; they exist as long as it does. ``custom_op`` adds 8 us to each call
(https://github.com/pytorch/pytorch/issues/177109)."""

without_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd
"""Context in which a call skips its autograd kernel, which ``register_autograd`` writes in Python.

A private name of torch without a public equivalent, checked on 2.11 and 2.13
(``tests/unit/test_private_names.py``).
"""


@dataclass(frozen=True)
class RegisteredOp:
    """One op, behind the dispatcher.

    Attributes:
        name: The op is ``torch.ops.graphkit.NAME``.
        reference: The torch implementation, without checks.
        arguments: Named tuple of the arguments of a call.
        rules: Rules of the arguments.
        check: Further check, after the rules.
        results: Rules of the results; None if there are none, or ``fake`` makes them.
        fake: Makes empty results that no rules describe.
        is_costly, own_stand_in: See ``register_op``, where it is ``stand_in``.
    """

    name: str
    reference: Callable[..., Any]
    arguments: type[Any]
    rules: ArgumentRules
    check: Callable[[Any], None] | None
    results: ResultRules | None
    fake: Callable[[Any], Any] | None
    is_costly: bool = False
    own_stand_in: Callable[[Any], Any] | None = None

    @cached_property
    def launcher(self) -> Callable[..., Any]:
        """``launch_NAME``; importing it imports Triton."""
        package, _, module = self.reference.__module__.rpartition(".")
        kernels = importlib.import_module(f"{package}.kernels.{module}")
        return cast("Callable[..., Any]", getattr(kernels, f"launch_{self.name}"))

    def empty(self, arguments: Any) -> Any:
        """Return empty results of the right shapes and dtypes; None for an op without results."""
        if self.results is None:
            return self.fake(arguments) if self.fake else None
        return self.results.allocate(arguments, *self.rules.sizes(arguments))

    def launch(self, arguments: Any, *args: Any, **options: Any) -> Any:
        """Launch the kernels for arguments that are checked, and return the results."""
        if self.results is None:
            return self.launcher(arguments, *args, **options)
        results = self.empty(arguments)
        self.launcher(arguments, results, *args, **options)
        return results

    def run_reference(self, *args: Any) -> Any:
        """Check the arguments and run the torch reference."""
        self._checked(args)
        return self.reference(*args)

    def run_cuda(self, *args: Any) -> Any:
        """Check the arguments and launch the kernels on the device of the first CUDA tensor."""
        arguments = self._checked(args)
        devices = (arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda)
        with torch.cuda.device(next(devices)):
            requests = kernel_requests.get()
            return self.launch(arguments) if requests is None else requests.run(self, arguments)

    def stand_in(self, arguments: Any) -> Any:
        """Return results for a pass that compiles the kernels of the op; see ``KernelRequests``."""
        if self.own_stand_in is not None:
            return self.own_stand_in(arguments)
        if not self.is_costly:
            return self.reference(*arguments)
        results = self.empty(arguments)
        for result in results if isinstance(results, tuple) else (results,):
            result.zero_()
        return results

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        """Return empty results of the right shapes and dtypes, for tracers."""
        return self.empty(self.arguments(*args, **kwargs))

    def backward(self, context: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the arguments: run the reference again and differentiate it."""
        with torch.enable_grad():
            args = [
                arg.detach().requires_grad_(arg.is_floating_point())
                if isinstance(arg, torch.Tensor)
                else arg
                for arg in context.inputs
            ]
            results = self.reference(*args)
        results = results if isinstance(results, tuple) else (results,)
        pairs = zip(results, gradients, strict=True)
        used = [(result, gradient) for result, gradient in pairs if gradient is not None]
        is_variable = [isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args]
        computed = iter(
            torch.autograd.grad(
                [result for result, _ in used],
                [arg for arg, is_one in zip(args, is_variable, strict=True) if is_one],
                [gradient for _, gradient in used],
                allow_unused=True,
            )
        )
        return tuple(next(computed) if is_one else None for is_one in is_variable)

    def refuse_backward(self, *_: Any) -> None:
        """Refuse to differentiate an op without gradients."""
        raise InputError(
            f"{self.name} has no gradient: call it under torch.no_grad() or detach its results."
        )

    def _checked(self, args: tuple[Any, ...]) -> Any:
        arguments = self.arguments(*args)
        self.rules.check(arguments)
        if self.check:
            self.check(arguments)
        return arguments


def register_op(
    *,
    mutates_args: Sequence[str] = (),
    fake: Callable[[Any], Any] | None = None,
    check: Callable[[Any], None] | None = None,
    sizes_from: Sequence[str] = (),
    error: ArgumentError = InputError,
    number_error: ArgumentError | None = None,
    differentiable: bool = False,
    is_costly: bool = False,
    stand_in: Callable[[Any], Any] | None = None,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Register the decorated torch reference as the op ``graphkit::NAME``.

    Args:
        mutates_args: Parameters that the op writes in place.
        fake: Makes empty results from the arguments; leave it out if the annotations of the results
            have rules, or if the op returns None.
        check: Check of the arguments beyond their rules.
        sizes_from: See ``ArgumentRules``, like the next two.
        error: Raised for a tensor that does not fit.
        number_error: Raised for a number that does not fit.
        differentiable: Whether gradients flow through the op. They are the gradients of the
            reference, which runs again for them.
        is_costly: Whether the reference takes too long, or too much memory, to stand in for kernels
            that are being compiled. All results are floating-point: zeros stand in for them, and
            the op writes nothing.
        stand_in: Computes the results meanwhile from the arguments, where the reference returns
            others than the kernels.

    Returns:
        A decorator. The public function has the reference's signature, and its documentation with
        the types and rules of the arguments. It calls the op through the dispatcher, where tracers,
        captures and recorders see one op.
    """

    def register(reference: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        function = cast("FunctionType", reference)
        name = function.__name__
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        errors = (error, number_error or error)
        rules = ArgumentRules(name, hints, sizes_from=sizes_from, errors=errors)
        results = None
        if fake is None and returned is not type(None):
            results = ResultRules(returned, list(hints))
        arguments = make_tuple_type(name, hints, defaults=function.__defaults__)
        op = RegisteredOp(
            name, reference, arguments, rules, check, results, fake, is_costly, stand_in
        )
        schema = torch.library.infer_schema(_plain(function), mutates_args=mutates_args)
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key, kernel in (("CPU", op.run_reference), ("CUDA", op.run_cuda)):
            # A write must not make its target part of an autograd graph.
            LIBRARY.impl(name, torch.no_grad()(kernel) if mutates_args else kernel, key)
        qualified = f"graphkit::{name}"
        torch.library.register_fake(qualified, op.run_fake, lib=LIBRARY)
        if differentiable:
            torch.library.register_autograd(
                qualified, op.backward, setup_context=_keep_inputs, lib=LIBRARY
            )
        elif not mutates_args:
            torch.library.register_autograd(qualified, op.refuse_backward, lib=LIBRARY)
        OPS[name] = op
        overload = getattr(torch.ops.graphkit, name).default

        @wraps(reference)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            result: Result
            if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
                result = overload(*args, **kwargs)
            else:
                with without_autograd():
                    result = overload(*args, **kwargs)
            return result

        call.__doc__ = complete_docstring(
            function, hints, mutates_args=mutates_args, errors=errors, differentiable=differentiable
        )
        return call

    return register


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments of a call for its backward."""
    del output
    ctx.inputs = inputs


def _plain(function: FunctionType) -> FunctionType:
    """Copy a function with its annotations but for the rules, which a schema cannot hold."""
    plain = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    hints = get_type_hints(function)
    returns = None if hints["return"] is type(None) else hints["return"]
    plain.__annotations__ = hints | {"return": returns}
    return plain
