"""Tensors that a run may change but must not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from graphkit.errors import ConfigError


def checked(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as a dict, if every tensor can be put back as it was.

    Raises:
        ConfigError: One is no tensor, was made under inference_mode, or is expanded.
    """
    for name, tensor in state.items():
        problem = _problem(tensor)
        if problem:
            raise ConfigError(f"mutable_state {name!r} {problem}", field="mutable_state")
    return dict(state)


def _problem(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"is of type {type(tensor).__name__}. Declare tensors."
    if tensor.is_inference():
        return "was made under torch.inference_mode and cannot be put back. Make it outside."
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: its rows share memory. Declare the tensor that it is a view of."
    return ""


@contextmanager
def preserved(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put the tensors back as they were, whatever happens. Holds a copy of each meanwhile."""
    saved = {name: tensor.clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        for name, tensor in state.items():
            tensor.copy_(saved[name])
