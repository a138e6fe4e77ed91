"""Choices of a model's modules, such as the experts of a row and the keys that it attends to.

Scores that differ by rounding may select others, and all later values of the row then differ by
more than rounding. So a comparison lets the second run take the choices of the first one. What
still differs is rounding or an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphkit.models.running import SelectedKeys
from graphkit.models.wrapper.module_rows import rows_of_tensor


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

    Args:
        modules: Path of each module.
        num_rows: Number of rows of the run (T).
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
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield
