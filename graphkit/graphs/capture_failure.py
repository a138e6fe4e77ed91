"""Cause and location of a capture's failure, derived from the exception."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from graphkit.errors import CaptureCause, GraphkitError, error_text
from graphkit.graphs.source_lines import (
    Frame,
    in_module,
    is_graphkit,
    is_internal,
    location_in,
    quoted,
)

_MESSAGES = {
    CaptureCause.OUT_OF_MEMORY: (
        "out of memory",
        "can't allocate memory",
        "alloc_failed",
        "cublas_status_not_initialized",
    ),
    CaptureCause.HOST_SYNCHRONISATION: (
        "when stream is capturing",
        "previous error during capture",
        "cannot copy between cpu and cuda tensors during cuda graph capture",
        "dependency created on uncaptured work",
        "cudaerrorstreamcapture",
    ),
    CaptureCause.UNSUPPORTED_OP: (
        "could not run",
        "not implemented for",
        "not supported",
        "generator not in capture mode",
    ),
}
"""Fragments of messages of torch and CUDA, in lower case, by the cause that they show."""
_EXPERTS = re.compile(r"[/\\]transformers[/\\].* in module \S*\.experts\b")
"""A line of transformers that runs the experts of a layer."""
_DISPATCH = str(Path(__file__).parent)
"""Code that runs the forward's operations on its behalf, so that their errors pass through it."""


class CaptureFailure(Exception):  # noqa: N818 - becomes a CaptureError once mode and size are known
    """A failed capture, with the ``cause`` and ``where`` of the runner's ``CaptureError``.

    Attributes:
        is_shared: Whether all ranks that capture together raise it.
        rank: The rank that failed, if it is known.
    """

    is_shared = False
    rank: int | None = None

    def __init__(self, cause: CaptureCause, where: str) -> None:
        super().__init__(cause.describe(where))
        self.cause = cause
        self.where = where


def advice_at(cause: CaptureCause, where: str) -> str:
    """Return what to do about a cause at a location."""
    waits = cause in (CaptureCause.HOST_SYNCHRONISATION, CaptureCause.DATA_DEPENDENT_SHAPE)
    if waits and _EXPERTS.search(where):
        return (
            'Load the model with experts_implementation="batched_mm", or with "grouped_mm" in '
            "bfloat16: the shapes of these do not depend on the chosen experts."
        )
    return cause.value


def as_capture_failure(error: BaseException) -> CaptureFailure:
    """Classify an exception that left the captured function, and locate it."""
    if isinstance(error, CaptureFailure):
        return error
    cause = _cause(error)
    if cause in (CaptureCause.FORWARD_ERROR, CaptureCause.GRAPHKIT_ERROR):
        return CaptureFailure(cause, describe_exception(error))
    line, text = location_in(_frames(error)), error_text(error)
    return CaptureFailure(cause, f"{line} ({text})" if line else text)


def describe_exception(error: BaseException) -> str:
    """Return which line, of which module, raised an exception, with its type and first line."""
    frames, text, own = _frames(error), error_text(error), _defect_of_graphkit(error)
    if own is None:
        line = location_in(frames)
        return f"{line} raised {text}" if line else text
    text = f"{text} at {quoted(own)}"
    caller = location_in([frame for frame in frames if not is_graphkit(_filename(frame))])
    if caller:
        return f"{caller} called graphkit, which raised {text}"
    return f"graphkit raised {text}{in_module(frames)}"


def _cause(error: BaseException) -> CaptureCause:
    if isinstance(error, GraphkitError):
        return CaptureCause.FORWARD_ERROR
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return CaptureCause.OUT_OF_MEMORY
    if isinstance(error, NotImplementedError):
        return CaptureCause.UNSUPPORTED_OP
    texts = [str(raised).lower() for raised in exception_chain(error)]
    for cause, messages in _MESSAGES.items():
        if any(message in text for text in texts for message in messages):
            return cause
    is_defect = _defect_of_graphkit(error) is not None
    return CaptureCause.GRAPHKIT_ERROR if is_defect else CaptureCause.FORWARD_ERROR


def _defect_of_graphkit(error: BaseException) -> Frame | None:
    """Return graphkit's line that raised an exception other than a ``GraphkitError``."""
    for frame in _frames(error):
        filename = _filename(frame)
        if is_graphkit(filename) and not filename.startswith(_DISPATCH):
            return None if isinstance(error, GraphkitError) else frame
        if not is_internal(filename):
            break
    return None


def _frames(error: BaseException) -> list[Frame]:
    """Return the frames of the traceback, innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]


def _filename(frame: Frame) -> str:
    return frame[0].f_code.co_filename


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the latest first, each once."""
    yielded: set[int] = set()
    while error is not None and id(error) not in yielded:  # ``raise error from error`` is a cycle
        yielded.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
