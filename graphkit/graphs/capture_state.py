"""State of the process during a capture: who knows of it, and how torch's dispatch modes behave.

Only this module replaces names of torch, and only during a capture:
``torch.cuda.graphs._cuda_isCurrentStreamCapturing`` and ``torch.overrides.has_torch_function``. It
also uses ``_len_torch_function_stack`` and ``_pop_mode_temporarily`` of ``torch.overrides``, and
two guards of ``torch._C``. Checked on torch 2.11 and 2.13; ``tests/unit/test_private_names.py``
names what another version changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import RLock
from typing import Any

import torch
import torch.overrides

DISPATCH_MODES = RLock()
"""Held while a dispatch mode of graphkit is active.

torch keeps part of a mode's state per process: if modes of two threads overlap, compiled functions
run eagerly from then on. The recorder waits for the lock. Attribution does not wait, because the
captures of two ranks may wait for each other.
"""

disable_function_modes: Any = torch._C.DisableTorchFunction
"""A context manager under which functions call no ``__torch_function__``."""
disable_autocast: Any = torch._C._DisableAutocast
"""A context manager under which autocast changes no operation, on all devices."""

_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)
_reports_capture: ContextVar[bool] = ContextVar("reports_capture", default=False)


def is_recording() -> bool:
    """Return whether a recorder captures now: tensors on the CPU then stand for the device's."""
    return _is_recording.get()


def is_capturing() -> bool:
    """Return whether a backend captures now, so that values of tensors cannot be read."""
    if is_recording():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def reporting_capture() -> Iterator[None]:
    """Make torch report a capture on CUDA within a block. Blocks may be nested.

    - ``torch.cuda.is_current_stream_capturing()`` is true. Models skip checks that read values
      then.
    - ``torch.overrides.has_torch_function`` ignores graphkit's own function mode, because of which
      modules such as ``nn.TransformerEncoderLayer`` would leave their fast path.

    Other threads get the results of torch's own functions. The caller holds ``DISPATCH_MODES``.
    """
    graphs: Any = torch.cuda.graphs
    overrides: Any = torch.overrides
    stream_captures = graphs._cuda_isCurrentStreamCapturing
    has_override = overrides.has_torch_function

    def is_current_stream_capturing() -> bool:
        return _reports_capture.get() or bool(stream_captures())

    def has_torch_function(relevant_args: Any) -> bool:
        if not is_recording() or not overrides._len_torch_function_stack():
            return bool(has_override(relevant_args))
        with overrides._pop_mode_temporarily():
            return bool(has_override(relevant_args))

    token = _reports_capture.set(True)
    graphs._cuda_isCurrentStreamCapturing = is_current_stream_capturing
    overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        graphs._cuda_isCurrentStreamCapturing = stream_captures
        overrides.has_torch_function = has_override
        _reports_capture.reset(token)


@contextmanager
def recording() -> Iterator[None]:
    """Mark a block as the capture of a recorder. See ``reporting_capture``."""
    token = _is_recording.set(True)
    try:
        with reporting_capture():
            yield
    finally:
        _is_recording.reset(token)


@contextmanager
def compilation_disabled() -> Iterator[None]:
    """Run compiled functions eagerly for a block, and keep what was compiled before.

    Enter it before a ``CaptureRulesMode``: torch cannot compile under a dispatch mode, and a
    compiled function that runs under one is never compiled again
    (https://github.com/pytorch/pytorch/issues/190286).
    """
    with DISPATCH_MODES:
        # Importing torch._dynamo takes a second; nothing is compiled before it is imported.
        is_loaded = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
            yield
