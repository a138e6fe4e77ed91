"""Why a function cannot be captured: told from the operation, or from the exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphkit.errors import CaptureCause, GraphkitError
from graphkit.graphs.places import is_machinery

_MARKERS = {
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
    CaptureCause.UNSUPPORTED_OP: ("could not run", "not implemented for", "not supported"),
}


class CaptureFailure(Exception):  # noqa: N818 - becomes a CaptureError once mode and size are known
    """A capture failed; carries what the runner's CaptureError will say."""

    def __init__(self, cause: CaptureCause, where: str) -> None:
        super().__init__(f"{cause.label} in {where}")
        self.cause = cause
        self.where = where


def refusal_of(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CaptureCause | None:
    """Why this operation may not run inside a capture; ``None`` if it may."""
    name = op.overloadpacket.__name__
    if torch.Tag.data_dependent_output in op.tags:
        return CaptureCause.HOST_SYNCHRONISATION
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        # Integer indices keep the shape; a boolean one selects a number of rows only known later.
        counts = any(map(is_mask, args[1])) and not _fills(*args[1:4])
        return CaptureCause.DATA_DEPENDENT_SHAPE if counts else None
    if name in ("_to_copy", "copy_") and _crosses_devices(name, args, kwargs):
        return CaptureCause.HOST_SYNCHRONISATION
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.dynamic_output_shape in op.tags:
        return CaptureCause.DATA_DEPENDENT_SHAPE
    return None


def failure_of(error: BaseException) -> CaptureFailure:
    """Class and place of an exception that left the captured function."""
    if isinstance(error, CaptureFailure):
        return error
    if isinstance(error, GraphkitError):
        return CaptureFailure(CaptureCause.OTHER, f"{type(error).__name__}: {error}")
    return CaptureFailure(_cause_of(error), place_of(error))


def place_of(error: BaseException) -> str:
    """The user's innermost line, else the exception itself."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_machinery(frame.filename):
            return f"{frame.filename}:{frame.lineno} `{frame.line}` ({_one_line(error)})"
    return _one_line(error)


def _cause_of(error: BaseException) -> CaptureCause:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return CaptureCause.OUT_OF_MEMORY
    if isinstance(error, NotImplementedError):
        return CaptureCause.UNSUPPORTED_OP
    texts = [str(e).lower() for e in _chain(error)]
    for cause, markers in _MARKERS.items():
        if any(marker in text for text in texts for marker in markers):
            return cause
    return CaptureCause.OTHER


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _crosses_devices(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy between host and device makes the host wait."""
    if name == "copy_":
        target, waits = args[0].device, not (args[2] if len(args) > 2 else False)
        return waits and target.type != args[1].device.type
    target = torch.device(kwargs.get("device") or args[0].device)
    return not kwargs.get("non_blocking") and target.type != args[0].device.type


def is_mask(index: Any) -> bool:
    """Whether an index selects as many rows as it has true values."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fills(indices: Any, values: torch.Tensor | None = None, accumulate: bool = False) -> bool:
    """Whether the host puts one number behind one mask, for which no rows are counted."""
    is_number = values is not None and values.dim() == 0 and values.device.type == "cpu"
    return is_number and not accumulate and sum(each is not None for each in indices) == 1


def _one_line(error: BaseException) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"
