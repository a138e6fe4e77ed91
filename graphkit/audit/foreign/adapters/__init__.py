"""Adapters: what engines know of their graphs, registered for the audit.

One file per engine. Each checks the signatures that it wraps, and does nothing but a message on
stderr if an engine has others. Without an audit of the process, no adapter does anything.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from graphkit.audit.foreign.audit_options import REPORT_VARIABLE
from graphkit.errors import ConfigError


def check_signature(function: Any, parameters: Sequence[str], engine: str) -> None:
    """Check the first parameters of a function of an engine.

    Raises:
        ConfigError: They are others: the adapter is not for this version.
    """
    found = list(inspect.signature(function).parameters)
    if found[: len(parameters)] != list(parameters):
        raise ConfigError(
            f"not for this version of {engine}: {function.__qualname__} has the parameters "
            f"{', '.join(found)}, expected {', '.join(parameters)}."
        )


def plugged_in(plug_in: Callable[[], None]) -> Callable[[], bool]:
    """Return a plug-in that returns whether it is in place, and reports an error to stderr."""

    @wraps(plug_in)
    def call() -> bool:
        if not os.environ.get(REPORT_VARIABLE):  # this process is not audited
            return False
        try:
            plug_in()
        except Exception as error:  # the program must not see it
            if sys.stderr is not None:
                sys.stderr.write(f"graphkit audit: {plug_in.__module__}: {error}\n")
            return False
        return True

    return call


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by ``wrapper(original, *args, **kwargs)``, once."""
    original = getattr(owner, name)
    if hasattr(original, "_graphkit_original"):
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    call._graphkit_original = original  # type: ignore[attr-defined]
    setattr(owner, name, call)
