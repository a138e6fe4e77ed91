"""Whether a capture runs now, as graphkit, torch and other libraries ask for it.

The one place that replaces private names of torch during a capture. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.overrides

_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)
_answers_as_captured: ContextVar[bool] = ContextVar("answers_as_captured", default=False)


def is_recording() -> bool:
    """Return whether a recorder captures now: tensors on the CPU then stand for the device's."""
    return _is_recording.get()


def is_capturing() -> bool:
    """Return whether a backend captures now, so that values of tensors cannot be read."""
    if is_recording():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def answering_as_captured() -> Iterator[None]:
    """Let torch answer in a block as during a capture on CUDA. Blocks may be nested.

    - ``torch.cuda.is_current_stream_capturing()`` is true. Models skip checks that read values
      then.
    - ``torch.overrides.has_torch_function`` ignores graphkit's own function mode, for which modules
      such as ``nn.TransformerEncoderLayer`` would leave their fast path.

    Other threads receive torch's own answers. The caller holds ``DISPATCH_MODES``.
    """
    graphs: Any = torch.cuda.graphs
    overrides: Any = torch.overrides
    stream_captures = graphs._cuda_isCurrentStreamCapturing
    has_override = overrides.has_torch_function

    def is_current_stream_capturing() -> bool:
        return _answers_as_captured.get() or bool(stream_captures())

    def has_torch_function(relevant_args: Any) -> bool:
        if not is_recording() or not overrides._len_torch_function_stack():
            return bool(has_override(relevant_args))
        with overrides._pop_mode_temporarily():
            return bool(has_override(relevant_args))

    token = _answers_as_captured.set(True)
    graphs._cuda_isCurrentStreamCapturing = is_current_stream_capturing
    overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        graphs._cuda_isCurrentStreamCapturing = stream_captures
        overrides.has_torch_function = has_override
        _answers_as_captured.reset(token)


@contextmanager
def recording() -> Iterator[None]:
    """Mark a block as the capture of a recorder. See ``answering_as_captured``."""
    token = _is_recording.set(True)
    try:
        with answering_as_captured():
            yield
    finally:
        _is_recording.reset(token)
