"""Has every graph of torch's tell of its capture. Nothing in here may make the program fail."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from graphkit.errors import InspectError
from graphkit.recording.following import Following
from graphkit.recording.parts import PartWriter

_failed: list[str] = []


class Follower(Protocol):
    """Follows one capture. Its errors are said on stderr, the first one alone."""

    def beginning(self) -> None:
        """The stream is not capturing yet."""

    def begun(self) -> None:
        """The stream is capturing."""

    def ending(self) -> None:
        """The stream is still capturing."""

    def ended(self, graph: Any) -> None:
        """The graph is as the program will replay it; its template is there, too."""


def hook_into(graph_class: Any) -> None:
    """Record all graphs of a class, ``torch.cuda.CUDAGraph``, if this process is to be recorded.

    Raises:
        InspectError: The class is that of a torch that cannot keep a graph's template.
    """
    writer = PartWriter.of_this_process()
    if writer is None:
        return
    writer.note_torch()
    if not hasattr(graph_class, "raw_cuda_graph"):
        raise InspectError("its torch cannot keep what it captures. Use torch 2.11 or newer.")
    follow_captures(graph_class, lambda: Following(writer))


def follow_captures(graph_class: Any, follow: Callable[[], Follower]) -> None:
    """Have each capture of a class followed. Graphs behave as before, but keep their template."""
    init, begin, end = graph_class.__init__, graph_class.capture_begin, graph_class.capture_end

    @wraps(init)
    def make(self: Any, keep_graph: bool = False) -> None:
        self._graphkit_instantiates = not keep_graph
        self._graphkit_follower = None
        init(self, keep_graph=True)

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        follower = follow()
        _quietly(follower.beginning)
        begin(self, *args, **kwargs)
        _quietly(follower.begun)
        self._graphkit_follower = follower

    @wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> None:
        # Let go of first: a capture that failed may be ended twice, and is never recorded.
        follower, self._graphkit_follower = self._graphkit_follower, None
        if follower is not None:
            _quietly(follower.ending)
        end(self, *args, **kwargs)
        if self._graphkit_instantiates:
            self.instantiate()
        if follower is not None:
            _quietly(follower.ended, self)

    graph_class.__init__ = make
    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end


def _quietly(act: Callable[..., None], *given: Any) -> None:
    try:
        act(*given)
    except Exception as error:
        _failed.append(f"{type(error).__name__}: {error}")
        if len(_failed) == 1:
            _say(f"process {os.getpid()} is not recorded well: {_failed[0]}")


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or a broken pipe
        sys.stderr.write(f"graphkit record: {text}\n")
