"""Hooks into the captures and replays of ``torch.cuda.CUDAGraph``, and observers of a capture.

An error in a hook never reaches the program: the first one of a process is printed to stderr, the
others are dropped. Imports of torch wait until the program captures, because the hooks are
installed while torch is still being imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from graphkit.audit.foreign.process_files import GraphFileWriter
from graphkit.errors import InspectError

if TYPE_CHECKING:
    from graphkit.graphs.attribution import Attribution

_OFTEN = 8
"""Replays that are all compared with those of other ranks; then every power of two."""
_errors: list[str] = []


class CaptureObserver(ABC):
    """Methods that are called at the steps of one capture, in this order.

    Attributes:
        attribution: Origins of the nodes; ``None`` if the beginning was not observed.
        captured_at: The line that captures; empty if the beginning was not observed.
        observe: Called for each operation, see ``Attribution``; ``None`` for nothing.
    """

    def __init__(self) -> None:
        self.attribution: Attribution | None = None
        self.captured_at = ""
        self.observe: Any = None

    def before_begin(self) -> None:
        """Note the line that captures, before the stream captures."""
        from graphkit.graphs.attribution import Attribution
        from graphkit.graphs.source_lines import caller_line

        self.attribution = Attribution(observe=self.observe)
        self.captured_at = caller_line()

    def after_begin(self) -> None:
        """Start to attribute nodes, as soon as the stream captures."""
        if self.attribution is not None:
            self.attribution.__enter__()

    def before_end(self) -> None:
        """Stop attributing nodes, while the stream still captures."""
        if self.attribution is not None:
            self.attribution.__exit__()

    @abstractmethod
    def after_end(self, graph: Any) -> None:
        """Use the graph, once it can be replayed."""


class RecordedCapture(CaptureObserver):
    """Writes the finished graph, without a replay: replays have effects in the program."""

    def __init__(self, writer: GraphFileWriter) -> None:
        super().__init__()
        self._writer = writer

    def after_end(self, graph: Any) -> None:
        """Inspect and write the graph."""
        from graphkit.graphs.walk import inspect_graph

        place = self.captured_at
        self._writer.write(
            lambda: inspect_graph(
                graph, attribution=self.attribution, name=place, captured_at=place
            )
        )


def observe_captures(graph_class: Any, new_observer: Callable[[], CaptureObserver]) -> None:
    """Observe each capture of a class.

    Graphs behave as before, except that they keep their template.

    Raises:
        InspectError: This torch cannot keep a graph's template.
    """
    if not hasattr(graph_class, "raw_cuda_graph"):
        raise InspectError(
            "this version of torch cannot keep the template of a graph. Use torch 2.11 or newer."
        )
    init, begin, end = graph_class.__init__, graph_class.capture_begin, graph_class.capture_end

    @wraps(init)
    def observed_init(self: Any, keep_graph: bool = False) -> None:
        self._graphkit_instantiates = not keep_graph
        self._graphkit_observer = None
        init(self, keep_graph=True)

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        observer = new_observer()
        call_safely(observer.before_begin)
        begin(self, *args, **kwargs)
        call_safely(observer.after_begin)
        self._graphkit_observer = observer

    @wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> None:
        # Cleared first: a failed capture may be ended twice and must not be recorded.
        observer, self._graphkit_observer = self._graphkit_observer, None
        if observer is not None:
            call_safely(observer.before_end)
        end(self, *args, **kwargs)
        if self._graphkit_instantiates:
            self.instantiate()
        if observer is not None:
            call_safely(observer.after_end, self)

    graph_class.__init__ = observed_init
    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end


def observe_replays(graph_class: Any, audit: Callable[[], Any]) -> None:
    """Count the replays of the followed graphs of a class, and let the audit run those to check.

    Between checks a replay costs one Python call more than without the audit. A graph that is reset
    is not followed any more.
    """
    replay, reset = graph_class.replay, graph_class.reset
    register = getattr(graph_class, "register_generator_state", None)  # none without CUDA
    graph_class._graphkit_followed = None
    order = [0, 1]  # replays of this process so far, and the next one to compare with other ranks

    @wraps(replay)
    def counted_replay(self: Any) -> None:
        followed = self._graphkit_followed
        if followed is not None:
            followed.replays = number = followed.replays + 1
            order[0] += 1
            if order[0] == order[1]:
                order[1] += order[0] if order[0] >= _OFTEN else 1
                call_safely(audit().compare_ranks, order[0], followed)
            if number >= followed.next_check:
                audit().replay(followed, self, replay)
                return
        replay(self)

    @wraps(reset)
    def observed_reset(self: Any) -> None:
        if self._graphkit_followed is not None:
            self._graphkit_followed.is_reset = True
            self._graphkit_followed = None
        reset(self)

    def register_generator_state(self: Any, generator: Any) -> None:
        assert register is not None, "the program has called it"
        register(self, generator)
        self.__dict__.setdefault("_graphkit_generators", []).append(generator)

    graph_class.replay = counted_replay
    graph_class.reset = observed_reset
    if register is not None:
        graph_class.register_generator_state = register_generator_state


def call_safely(hook: Callable[..., None], *args: Any) -> None:
    """Call a hook; print the first error of this process to stderr, and drop the others."""
    try:
        hook(*args)
    except Exception as error:
        _errors.append(f"{type(error).__name__}: {error}")
        if len(_errors) == 1:
            text = f"the recording of process {os.getpid()} is incomplete: {_errors[0]}"
            with contextlib.suppress(Exception):  # stderr may be closed, or a broken pipe
                sys.stderr.write(f"graphkit record: {text}\n")
