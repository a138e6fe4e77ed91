"""Raises at the first operation that a capture refuses, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.graphs.failures import CaptureFailure, refusal_of
from graphkit.graphs.places import caller_place


class RefusingMode(TorchDispatchMode):
    """A dispatch mode under which everything runs that may run inside a capture."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse or run one operation."""
        cause = refusal_of(func, args, kwargs or {})
        if cause is not None:
            raise CaptureFailure(cause, f"{func.name()} at {caller_place()}")
        return self.ran(func, args, kwargs or {})

    def ran(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation that was not refused."""
        return func(*args, **kwargs)
