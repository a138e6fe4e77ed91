"""A pass that requests the kernels of ops instead of launching them, so that they are compiled.

A kernel is compiled when it is first launched, and the next launch waits for it. A pass over a
forward learns which kernels it needs, and compiles all of them in parallel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Op(Protocol):
    """What a pass needs of an op; see ``RegisteredOp``."""

    def launch(self, arguments: Any) -> Any:
        """Launch the kernels and return the results."""

    def stand_in(self, arguments: Any) -> Any:
        """Return results without kernels."""


class KernelRequests:
    """Runs ops whose kernels may not be compiled yet.

    An op runs twice. First its launcher requests kernels and launches none. If all of them are
    compiled, it runs again and launches them. If not, torch computes the results, so that the
    forward that called the op goes on with valid numbers, and state is written as by the kernels.

    Args:
        request: Takes a kernel, its grid, its arguments and the options of its launch. Begins to
            compile it, and returns whether it is compiled already.

    Attributes:
        is_requesting: Whether an op requests kernels, so that none may be launched.
    """

    def __init__(
        self, request: Callable[[Any, tuple[int, ...], list[Any], dict[str, Any]], bool]
    ) -> None:
        self._request = request
        self.is_requesting = False
        self._is_ready: list[bool] = []

    def run(self, op: Op, arguments: Any) -> Any:
        """Return the results of an op, and request its kernels."""
        # A reference computes on one device. Kernels that read memory of the host launch as usual,
        # and so does an op that another one calls, which is requesting.
        devices = {tensor.device for tensor in _tensors(arguments)}
        if self.is_requesting or len(devices) > 1:
            return op.launch(arguments)
        self._is_ready = []
        self.is_requesting = True
        try:
            results = op.launch(arguments)
        finally:
            self.is_requesting = False
        if not self._is_ready:  # of torch alone
            return results
        if all(self._is_ready):
            return op.launch(arguments)
        try:
            # A reference may create tensors without naming a device.
            with devices.pop() if devices else nullcontext():
                return op.stand_in(arguments)
        except Exception as error:  # such as too little memory
            logger.debug("%s waits for its kernels: %r", type(arguments).__name__, error)
            return op.launch(arguments)

    def add(
        self, kernel: Any, grid: tuple[int, ...], args: list[Any], options: dict[str, Any]
    ) -> None:
        """Request a kernel of the op that is running."""
        self._is_ready.append(self._request(kernel, grid, args, options))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Let the ops that this thread runs in a block request their kernels."""
        token = kernel_requests.set(self)
        try:
            yield
        finally:
            kernel_requests.reset(token)


kernel_requests: ContextVar[KernelRequests | None] = ContextVar("kernel_requests", default=None)
"""The requests of the pass that runs; ``None`` outside of one."""


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        for value in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(value, torch.Tensor):
                yield value
