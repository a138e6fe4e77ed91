"""Import of targets by name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from graphkit.errors import GraphkitError, TargetError, error_text, first_line
from graphkit.runners.ranks import RunnerGroup
from graphkit.runners.targets.target import CaptureTarget


def locate(text: str, device: str, group: RunnerGroup | None = None) -> CaptureTarget:
    """Return the target that a name such as ``package.module:attribute`` stands for.

    Modules in the working directory can be named. If the attribute is a function, it is called,
    with ``device=`` and ``group=`` if it takes them.

    Args:
        text: The name.
        device: Passed to a function.
        group: Passed to a function; the target must then run on its ranks.

    Raises:
        TargetError: The text has another form, the import or the call fails, the result is not a
            CaptureTarget, or it does not run on the ranks of ``group``.
        GraphkitError: The function raised it.
    """
    module_name, colon, attribute = text.partition(":")
    if os.path.isdir(text) and not colon:  # noqa: PTH112 - pathlib raises for a long name
        raise TargetError(
            f"TARGET {text!r} is a folder. Load a model with --checkpoint, or name a target in a "
            "module that can be imported from the working directory: package.module:attribute."
        )
    if not (module_name and colon and attribute):
        raise TargetError(f"TARGET {text!r} does not have the form package.module:attribute.")
    if "/" in module_name or module_name.endswith(".py"):
        raise TargetError(
            f"TARGET {text!r} names a file. Name the module as Python imports it from the working "
            "directory: package.module:attribute."
        )
    target = _named(text)
    if not isinstance(target, CaptureTarget):
        if not callable(target):
            raise TargetError(
                f"TARGET {text!r} is a {type(target).__name__}. Name a graphkit.CaptureTarget, or "
                "a function that returns one."
            )
        target = _call(target, {"device": device, "group": group}, text)
        if not isinstance(target, CaptureTarget):
            raise TargetError(
                f"TARGET {text!r} returned a {type(target).__name__}, not a graphkit.CaptureTarget."
            )
    if group is not None and target.group is not group:
        raise TargetError(
            f"TARGET {text!r} does not run on several ranks. Name a function that takes group= and "
            "returns a CaptureTarget with it."
        )
    return target


def _named(text: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(text.partition(":")[0])
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        raise TargetError(f"TARGET {text!r} cannot be imported: {error_text(error)}.") from error
    try:
        return attrgetter(text.partition(":")[2])(module)
    except AttributeError as error:
        raise TargetError(f"TARGET {text!r} was not found: {first_line(error)}.") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"TARGET {text!r} cannot be read: {error_text(error)}.") from error


def _call(factory: Any, arguments: Mapping[str, Any], text: str) -> Any:
    names: Collection[str] = ()
    try:
        with suppress(ValueError):  # some built-ins have no signature
            names = inspect.signature(factory).parameters
        return factory(**{name: value for name, value in arguments.items() if name in names})
    except GraphkitError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"TARGET {text!r} failed when called: {error_text(error)}.") from error
