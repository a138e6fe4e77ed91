"""Functions of torch whose bits on a CPU do not depend on the other rows of a call.

Kernels of a CPU split sums by the number of rows, and compute the numbers that do not fill a vector
in another way. In float64 what they differ by is far below the rounding of float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from graphkit.engine.attention import paged_backends

_FUNCTIONS = (
    (functional, "linear"),
    (functional, "scaled_dot_product_attention"),
    (functional, "silu"),
    (functional, "softmax"),
    (paged_backends, "scaled_dot_product_attention"),
    (torch, "einsum"),
    (torch.Tensor, "__matmul__"),
    (torch.Tensor, "softmax"),
)
"""What the small models of tests call, by the names under which they call it."""


@contextmanager
def exact_sums() -> Iterator[None]:
    """Let functions give equal bits for equal rows in the block, captures included."""
    with ExitStack() as stack:
        for owner, name in _FUNCTIONS:
            wide = partial(_widely, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, lambda *a, _f=wide, **k: _f(*a, **k)))
        yield


def _widely(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function on float64, and return its result in the dtype of its first tensor."""
    dtypes: list[torch.dtype] = []

    def widened(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float:
            dtypes.append(value.dtype)
        return value.double() if is_float else value

    wide, options = tree_map(widened, args), tree_map(widened, kwargs)
    dtype = options.pop("dtype", None) or dtypes[0]
    return func(*wide, **options).to(dtype)
