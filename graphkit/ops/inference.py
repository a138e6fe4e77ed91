"""Tensors that live longer than a call, made under ``torch.inference_mode``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def allocates(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Run a function that allocates buffers outside of the caller's inference mode.

    A tensor that is made under ``torch.inference_mode`` cannot be written outside of it.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # the former turns gradients on
            return function(*args, **kwargs)

    return run
