"""What a runner asks of the machinery that captures and replays.

A captured graph's life: ``capture`` -> ``replay`` any number of times -> ``close``. Captures
happen inside one ``session``, which prepares the process for them and puts everything back, also
when one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graphkit.graphs.attribution import Attribution, Place
from graphkit.graphs.failures import CaptureFailure


class CapturedGraph(Protocol):
    """One captured step.

    Attributes:
        output: What the captured function returned; its tensors alias graph memory.
        num_nodes: Nodes (CUDA) or recorded operations (recorder).
        pool_bytes: Bytes by which the backend's pool grew for it.
        places: What made each node, if attribution was on; in their order.
    """

    output: Any
    num_nodes: int
    pool_bytes: int
    places: tuple[Place, ...]

    def replay(self) -> None:
        """Run the step again, at the addresses of its capture.

        Enqueues on the current stream, after earlier replays of the backend on any stream.
        """
        ...

    def close(self) -> None:
        """Give the graph back. Its output must not be used afterwards."""
        ...


class Backend(Protocol):
    """A way to capture a function and run it again.

    Attributes:
        name: ``cuda`` or ``recorder``.
        device: Where captured functions work.
    """

    name: str
    device: torch.device

    def session(self) -> AbstractContextManager[None]:
        """Prepare the process for captures; everything is put back at the end."""
        ...

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function as capture will, but for real, and wait for it."""
        ...

    def capture(
        self, function: Callable[[], Any], attribution: Attribution | None = None
    ) -> CapturedGraph:
        """Capture the function and run it once. Inside a ``session`` only.

        Args:
            function: Takes nothing.
            attribution: Notes what makes each node.

        Raises:
            CaptureFailure: It cannot be captured; nothing of the attempt remains.
        """
        ...

    def diagnose(self, function: Callable[[], Any]) -> CaptureFailure | None:
        """Run a function whose capture failed once more, for real, to name the operation."""
        ...

    def order(self) -> None:
        """Make the current stream wait for replays that this backend issued on another one.

        Replays do so themselves.
        """
        ...

    def is_alive(self) -> None:
        """Raise if the device reports an error that no later work will outlive."""
        ...
