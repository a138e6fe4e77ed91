"""Hooks into the captures and replays of ``torch.cuda.CUDAGraph``.

An error in a hook never reaches the program: the first one of a process is printed to stderr, the
others are dropped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from graphkit.audit.foreign.audit_options import AuditOptions
from graphkit.audit.foreign.capture_observers import CaptureObserver, RecordedCapture
from graphkit.audit.foreign.graph_files import GraphFileWriter
from graphkit.errors import InspectError

if TYPE_CHECKING:
    from graphkit.audit.foreign.audits.program_audit import ProgramAudit

_OFTEN = 8
"""Replays that are all compared with those of other ranks; then every power of two."""
_errors: list[str] = []


def hook_into(graph_class: Any) -> None:
    """Record all graphs of ``torch.cuda.CUDAGraph`` if this process belongs to a recording.

    Raises:
        InspectError: This torch cannot keep a graph's template.
    """
    writer, options = GraphFileWriter.from_environment(), AuditOptions.from_environment()
    if writer is not None:
        writer.mark_torch_imported()
    if writer is None or options is not None:  # ``following`` audits the graphs
        return
    observe_captures(graph_class, lambda: RecordedCapture(writer))


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


def observe_replays(graph_class: Any, audit: Callable[[], ProgramAudit]) -> None:
    """Count the replays of the followed graphs of a class, and let the audit run those to check.

    Between checks a replay costs one Python call more than without the audit. A graph that is reset
    is not followed any more.

    Args:
        graph_class: ``torch.cuda.CUDAGraph``.
        audit: Returns the audit of this process.
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
            _print_error(f"the recording of process {os.getpid()} is incomplete: {_errors[0]}")


def _print_error(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or a broken pipe
        sys.stderr.write(f"graphkit record: {text}\n")
