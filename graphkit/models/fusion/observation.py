"""Calls of modules in a forward over random tokens, and whether a replacement computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from graphkit.models.running import AttentionCall, Intercepted, attending, hooked

_LIMITS = {torch.float32: 32.0, torch.float64: 32.0}
_LIMIT_OF_HALF = 1.0
"""Largest root mean square error of a row over that of the row, as a multiple of the dtype's eps.

In two bytes, rounding at three places gives about 0.5: products add in float32. In float32 the
order of the sum matters, with an error that grows with the square root of its length.
"""
_MAGNITUDES = (-3.0, 1.5)
"""Decimal exponents of the smallest and the largest random row.

Small rows show the epsilon of a norm, large ones a clamp.
"""

_DECIDE: ContextVar[Callable[[bool], bool]] = ContextVar("graphkit_decide", default=bool)


@contextmanager
def deciding_by(decide: Callable[[bool], bool]) -> Iterator[None]:
    """Let ``agree`` return ``decide`` of its result, such as whether it is true on all ranks.

    Ranks of a split model compare different numbers. If one of them replaced a module alone, their
    collectives would no longer match.
    """
    token = _DECIDE.set(decide)
    try:
        yield
    finally:
        _DECIDE.reset(token)


def random_rows(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return normal numbers of the shape, dtype and device of a tensor [..., H].

    Rows have different magnitudes.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = like.shape[:-1]
    sizes = torch.logspace(*_MAGNITUDES, rows.numel()).view(*rows, 1)
    return (torch.randn(like.shape, generator=generator) * sizes).to(like.device, like.dtype)


def agree(expected: Any, got: Any) -> bool:
    """Return whether two nested results have the same form, and equal tensors but for rounding."""
    (one, form), (other, other_form) = tree_flatten(expected), tree_flatten(got)
    return _DECIDE.get()(form == other_form and all(map(_equal, one, other)))


def _equal(expected: Any, got: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return bool(expected is got or expected == got)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    size = expected.shape[-1] if expected.dim() else 1
    one, other = expected.double().reshape(-1, size), got.double().reshape(-1, size)
    same = (one == other) | (one.isnan() & other.isnan())
    error = torch.where(same, 0.0, one - other).square().mean(-1).sqrt()
    limit = _LIMITS.get(expected.dtype, _LIMIT_OF_HALF) * torch.finfo(expected.dtype).eps
    finite = torch.where(one.isfinite(), one, 0.0)
    return bool((error <= limit * finite.square().mean(-1).sqrt()).all())


ROWS = 6
"""Rows of the observed forward."""
MULTIPLYING = {
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d",
    "_grouped_mm", "grouped_mm",
}  # fmt: skip
"""Names of functions of torch that add up products, as a library chooses by the number of rows."""
Run = Callable[[torch.Tensor], Any]
"""Runs a model over random tokens at positions, [ROWS], and returns what its modules compute."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        module, args, kwargs: What was called, and with what.
        output: What it returned; ``None`` while it runs.
        calls: Calls that its forward made, in order.
        attention: Calls of the attention that its forward made.
        products: Functions of torch that multiply, which its forward called, in order.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    products: list[str] = field(default_factory=list)

    def walk(self) -> Iterator[ModuleCall]:
        """Yield this call and all below it, callers first."""
        yield self
        for call in self.calls:
            yield from call.walk()

    def by_module(self) -> dict[nn.Module, ModuleCall]:
        """Return the last call of each module."""
        return {call.module: call for call in self.walk()}

    def only_input(self) -> torch.Tensor | None:
        """Return the tensor that is the only argument, or ``None``."""
        values = [*self.args, *self.kwargs.values()]
        is_one = len(values) == 1 and isinstance(values[0], torch.Tensor)
        return values[0] if is_one else None

    def place(self, tensor: torch.Tensor) -> int | str | None:
        """Return the index or the name of the argument that is a tensor, or ``None``."""
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return next((place for place, value in places if value is tensor), None)

    def repeats(self, positions: torch.Tensor) -> bool:
        """Return whether the module computes the same again, as it is now."""
        try:
            output, _ = run_at(positions, self.module, *self.args, **self.kwargs)
        except RuntimeError:  # such as a view of a tensor that has become strided
            return False
        return agree(self.output, output)


def observe(model: nn.Module, run: Run, positions: torch.Tensor) -> ModuleCall:
    """Run a model over random tokens at positions, [ROWS], and return its calls.

    Attention returns random numbers.

    Returns:
        The call of the model. Where ``run`` calls other modules, too, it has no output and the
        calls that ``run`` makes.
    """
    root = ModuleCall(model, (), {})
    stack = [root]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, args, kwargs)
        stack[-1].calls.append(call)
        stack.append(call)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        stack.pop().output = output

    def attend(call: AttentionCall) -> torch.Tensor:
        stack[-1].attention.append(call)
        return random_attention(call)

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in MULTIPLYING and args[0] is not None:
            # A product of one input, as of positions and frequencies, adds nothing.
            shape = args[0].shape if isinstance(args[0], torch.Tensor) else ()
            if tuple(shape[-1:]) != (1,):
                stack[-1].products.append(name)
        return function(*args, **kwargs)

    hooks = hooked(model.modules(), enter, leave)
    with hooks, attending(attend, positions), torch.no_grad(), Intercepted(note):
        run(positions)
    return root.calls[0] if len(root.calls) == 1 else root


def random_logits(model: PreTrainedModel, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits of a language model for random tokens at positions: a ``Run``."""
    ids = torch.randint(
        model.config.get_text_config(decoder=True).vocab_size,
        (1, len(positions)),
        generator=torch.Generator().manual_seed(0),
    ).to(positions.device)
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions[None], use_cache=False
    ).logits
    return logits


def run_at(
    positions: torch.Tensor, function: Any, *args: Any, **kwargs: Any
) -> tuple[Any, list[AttentionCall]]:
    """Call a module or its replacement; return its output and its calls of the attention."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return random_attention(call)

    with attending(attend, positions), torch.no_grad():
        return function(*args, **kwargs), calls


def random_attention(call: AttentionCall) -> torch.Tensor:
    """Return random attended values, [1, T, N, E]: the same for all calls of a shape."""
    _, heads, rows, _ = call.query.shape
    shape = 1, rows, heads, call.value.shape[-1]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return values.to(call.query.device, call.query.dtype)
