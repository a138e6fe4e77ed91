"""The first module in which a row of a wrapper and the same row of its model differ.

A wrapper calls the modules of its model. So the tensors that enter and leave each module can be
compared by the path of the module, one row of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphkit.graphs import caller_line
from graphkit.models.running import SelectedKeys, hooked

OUTPUT = "the output"
_LEVELS = 2
"""How deep a wrapper may hold its model, such as ``self.runner.model``."""
Key = tuple[str, str, int]
"""Path of a module, what it received or returned, and how often that happened before."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """The first difference.

    Attributes:
        module: Path of the module that computed it.
        source: Line that calls the module which received or returned it.
        text: What differs, as a sentence.
    """

    module: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class RowValue:
    """A row of a tensor that a module received or returned.

    Attributes:
        row: The row, flat.
        caller: Path of the module that called; empty outside of all modules.
        source: Line of the call.
    """

    row: torch.Tensor
    caller: str
    source: str


@contextmanager
def recorded_rows(
    modules: Mapping[nn.Module, str], row: int, num_rows: int
) -> Iterator[dict[Key, RowValue]]:
    """Record one row of what each module receives and returns in the block, in order."""
    recorded: dict[Key, RowValue] = {}
    counts: Counter[tuple[str, str]] = Counter()
    calls = [("", "")]  # path and source of each call that runs

    def record(path: str, what: str, value: Any, caller: str, source: str) -> None:
        for tensor in tree_leaves(value):
            rows = rows_of_tensor(tensor, num_rows)
            if rows is not None:
                values = rows[row].detach().flatten().clone()
                recorded[path, what, counts[path, what]] = RowValue(values, caller, source)
                counts[path, what] += 1

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path, source, (caller, _) = modules[module], caller_line(), calls[-1]
        for name, value in [*enumerate(args), *kwargs.items()]:
            record(path, f"argument {name}", value, caller, source)
        calls.append((path, source))

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        path, source = calls.pop()
        record(path, OUTPUT, output, calls[-1][0], source)

    with hooked(modules, before, after):
        yield recorded


def first_module_difference(
    expected: Mapping[Key, RowValue], got: Mapping[Key, RowValue], ulps: float, dtype: torch.dtype
) -> ModuleDifference | None:
    """Return the first recorded row that differs.

    Args:
        expected: Rows of the model.
        got: Rows of the wrapper.
        ulps: Largest difference, in units in the last place of ``dtype`` relative to the row's
            largest number.
        dtype: Dtype that the step computes in.
    """
    for key, value in got.items():
        other = expected.get(key)
        if other is None or _agree(other.row, value.row, ulps, dtype):
            continue
        path, what, _ = key
        if what == OUTPUT:
            text = f"The first difference is the output of `{path}`."
            return ModuleDifference(path, value.source, text)
        caller = f" in `{value.caller}`" if value.caller else ""
        text = f"The first difference is {what} of `{path}`, computed{caller}."
        return ModuleDifference(value.caller or path, value.source, text)
    return None


def outer_modules(run: Callable[[], object]) -> list[nn.Module]:
    """Return the modules that a run calls outside of all other modules."""
    outer: list[nn.Module] = []
    running: list[nn.Module] = []

    def before(module: nn.Module, _args: Any) -> None:
        if not running:
            outer.append(module)
        running.append(module)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()

    with register_module_forward_pre_hook(before), register_module_forward_hook(after):
        run()
    return outer


def module_paths(roots: Iterable[object], known: Mapping[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the path of each module below some roots, so that paths agree with known ones.

    A root may contain the model as a submodule: paths then begin there.
    """
    paths: dict[nn.Module, str] = {}
    modules = [root for root in roots if isinstance(root, nn.Module)]
    shared = set(known.values())
    for root in [*(_counterpart(module, shared) for module in modules), *modules]:
        for path, module in root.named_modules():
            paths.setdefault(module, known.get(module, path or type(module).__name__))
    return paths


def _counterpart(root: nn.Module, known: Collection[str]) -> nn.Module:
    """Return the module below a root, or the root, with the most known paths below it."""

    def shared(module: nn.Module) -> int:
        return sum(path in known for path, _ in module.named_modules())

    candidates = (module for path, module in root.named_modules() if path.count(".") < _LEVELS)
    best: nn.Module = max(candidates, key=shared)
    return best


def rows_of_tensor(tensor: object, num_rows: int) -> torch.Tensor | None:
    """Return [T, ...] or [1, T, ...] as a view of T rows, and ``None`` for anything else."""
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.dim() > 1 and tensor.shape[:2] == (1, num_rows):
        return tensor[0]
    return tensor if tensor.dim() and len(tensor) == num_rows else None


def _agree(expected: torch.Tensor, got: torch.Tensor, ulps: float, dtype: torch.dtype) -> bool:
    """Return whether two rows agree; rows of different length cannot be compared."""
    if expected.shape != got.shape:
        return True
    if not (expected.is_floating_point() and got.is_floating_point()):
        return torch.equal(expected, got)
    eps = max(torch.finfo(kind).eps for kind in (dtype, expected.dtype, got.dtype))
    one, other = expected.double(), got.double()
    return torch.allclose(
        one, other, rtol=0, atol=ulps * eps * float(one.abs().max()), equal_nan=True
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """What a module chose in one call.

    Attributes:
        tensors: Rows of the tensors that belong to the choice, [T, ...], by their index in the
            module's output.
        reads_integers: Whether the module receives integers for each row, such as positions. It may
            then compute its result from them instead of choosing.
    """

    tensors: dict[int, torch.Tensor]
    reads_integers: bool


Choices = dict[tuple[str, int], Choice]
"""Choices by the path of the module and how often it made one before."""


@contextmanager
def recorded_choices(modules: Mapping[nn.Module, str], num_rows: int) -> Iterator[Choices]:
    """Record the choices that modules make in the block.

    A module chooses if it returns integers for each row. Tensors of the same shape that it returns
    beside them, such as the weights of the experts, belong to the choice.
    """
    choices: Choices = {}
    counts: Counter[str] = Counter()

    def record(module: nn.Module, received: object, output: object) -> None:
        leaves = [rows_of_tensor(leaf, num_rows) for leaf in tree_leaves(output)]
        chosen = next((rows for rows in leaves if _is_index(rows)), None)
        if chosen is None:
            return
        path = modules[module]
        tensors = {
            index: rows.detach().clone()
            for index, rows in enumerate(leaves)
            if rows is not None and rows.shape == chosen.shape
        }
        arguments = (rows_of_tensor(leaf, num_rows) for leaf in tree_leaves(received))
        choices[path, counts[path]] = Choice(tensors, any(map(_is_index, arguments)))
        counts[path] += 1

    with _after_calls(modules, record):
        yield choices


@contextmanager
def taking_choices(
    modules: Mapping[nn.Module, str],
    choices: Choices,
    num_rows: int,
    keys: torch.Tensor | None = None,
    least_agreement: float = 1.0,
) -> Iterator[None]:
    """Let modules return choices of another run in the block.

    Args:
        modules: Path of each module.
        choices: The choices, of as many rows.
        num_rows: Number of rows of the run (T).
        keys: Index of each token of a row's sequence among the keys of its request, int64 [T, N],
            -1 behind the row's own. ``None`` for a run of the same model, which also takes choices
            of modules that receive integers: it has no wrong integers that this could hide.
        least_agreement: Share of the keys that a module selects that must be among those of the
            other run. With less in common, its selection is left as it is, so that logits differ.
    """
    counts: Counter[str] = Counter()

    def take(module: nn.Module, _: object, output: object) -> object:
        path = modules[module]
        chosen = choices.get((path, counts[path]))
        if chosen is None:
            return output
        counts[path] += 1
        if isinstance(output, SelectedKeys) and keys is not None:
            (indices,) = chosen.tensors.values()
            selected = keys.to(indices.device).gather(1, indices.long())
            is_rounding = _agreement(output.positions, selected) >= least_agreement
            selected = selected.sort(descending=True).values
            return replace(output, positions=selected) if is_rounding else output
        if chosen.reads_integers and keys is not None:
            return output
        leaves, structure = tree_flatten(output)
        for index, rows in chosen.tensors.items():
            own = rows_of_tensor(leaves[index], num_rows) if index < len(leaves) else None
            if own is None or own.shape != rows.shape:
                return output
            leaves[index] = rows.to(own.dtype).view_as(leaves[index])
        return tree_unflatten(leaves, structure)

    chosen_by = {path for path, _ in choices}
    choosing = {module: path for module, path in modules.items() if path in chosen_by}
    with _after_calls(choosing, take):
        yield


def joined_choices(
    parts: Sequence[tuple[Choices, Sequence[int], Sequence[int]]], num_rows: int
) -> Choices:
    """Return the choices of a batch whose rows were computed in several runs.

    Args:
        parts: Choices of a run, rows of the batch, and the same rows in the run.
        num_rows: Rows of the batch (T).
    """
    joined: Choices = {}
    for choices, rows, places in parts:
        for key, choice in choices.items():
            into = joined.setdefault(key, Choice({}, choice.reads_integers)).tensors
            for index, tensor in choice.tensors.items():
                if index not in into:
                    into[index] = tensor.new_zeros(num_rows, *tensor.shape[1:])
                into[index][list(rows)] = tensor[list(places)]
    return joined


def _agreement(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of the keys of one selection that another has, too. -1 is no key."""
    largest = int(torch.maximum(got.max(), expected.max()))
    is_expected = torch.zeros(len(got), largest + 2, dtype=torch.bool, device=got.device)
    is_expected.scatter_(1, expected + 1, True)
    is_key = got >= 0
    return float((is_expected.gather(1, got + 1) & is_key).sum() / is_key.sum())


def _is_index(rows: torch.Tensor | None) -> bool:
    return rows is not None and rows.dtype in (torch.int32, torch.int64)


@contextmanager
def _after_calls(
    modules: Mapping[nn.Module, str], call: Callable[[nn.Module, object, object], object]
) -> Iterator[None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> object:
        return call(module, (args, kwargs), output)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield
