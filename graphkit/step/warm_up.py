"""Runs before or between captures, which compile kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from graphkit.graphs import Backend, CaptureFailure
from graphkit.runners.capture import capture_error
from graphkit.spec import ForwardMode


def warm_up(backend: Backend, mode: ForwardMode, functions: Iterable[Callable[[], None]]) -> None:
    """Run functions without a graph, one after the other, and wait for each.

    Args:
        backend: Backend of the graphs.
        mode: Mode that an error names.
        functions: What to run.

    Raises:
        CaptureError: A function raised an exception.
    """
    try:
        with backend.session(), torch.no_grad():
            for function in functions:
                backend.warm_up(function)
    except CaptureFailure as failure:
        raise capture_error(mode, 1, failure) from failure.__cause__
