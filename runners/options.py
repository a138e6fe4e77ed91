"""Options of every runner. Constructors that pass them on declare and show them without a list."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict, TypeVar

import torch

from graphkit.distributed import RankGroup
from graphkit.graphs import Backend, BatchSizes

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class RunnerOptions(TypedDict, total=False):
    """Optional arguments of every runner. ``Runner`` documents them and has their defaults."""

    batch_sizes: BatchSizes | None
    device: torch.device | str
    backend: Backend | None
    multiple_of: int
    optional_fields: Collection[str] | None
    bound_fields: Mapping[str, torch.Tensor] | None
    mutable_state: Mapping[str, torch.Tensor] | None
    check: bool | None
    draft_token_map: torch.Tensor | None
    group: RankGroup | None


def show_options(
    base: Callable[..., Any], options_type: type = RunnerOptions
) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator for a function that passes ``**options`` on to ``base``.

    ``help`` and ``inspect.signature`` then list the options, with the defaults of ``base``.

    Args:
        base: Declares the options and their defaults.
        options_type: Typed dictionary of the options that are passed on.
    """
    known = inspect.signature(base).parameters
    options = [known[name] for name in options_type.__annotations__]

    def decorate(constructor: FunctionT) -> FunctionT:
        signature = inspect.signature(constructor)
        own = [kept for kept in signature.parameters.values() if kept.kind is not kept.VAR_KEYWORD]
        shown = signature.replace(parameters=[*own, *options])
        constructor.__signature__ = shown  # type: ignore[attr-defined]  # inspect reads it
        return constructor

    return decorate
