"""Tensors that a run may change but must not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def preserved(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put the tensors back as they were, whatever happens. Holds a copy of each meanwhile."""
    saved = {name: tensor.clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        for name, tensor in state.items():
            tensor.copy_(saved[name])
