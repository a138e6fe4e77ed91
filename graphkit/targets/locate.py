"""From ``package.module:attribute`` to a CaptureTarget."""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from graphkit.errors import GraphkitError, TargetError
from graphkit.targets.target import CaptureTarget


def locate(text: str, device: str) -> CaptureTarget:
    """Import what ``text`` names; call it if it is a factory.

    The working directory is on the path. A factory is called with ``device=`` if it takes one.

    Raises:
        TargetError: The text has no colon, the import fails, or the result is no CaptureTarget.
    """
    module_name, colon, attribute = text.partition(":")
    if not (module_name and colon and attribute):
        raise TargetError(f"TARGET {text!r} is not of the form package.module:attribute.")
    if "/" in module_name or module_name.endswith(".py"):
        raise TargetError(
            f"TARGET {text!r} names a file. Name its module as python imports it from here, "
            "package.module:attribute."
        )
    found = _attribute(_module(module_name, text), attribute, text)
    if isinstance(found, CaptureTarget):
        return found
    if not callable(found):
        raise TargetError(f"TARGET {text!r} is a {type(found).__name__}, not a CaptureTarget.")
    made = _call(found, device, text)
    if not isinstance(made, CaptureTarget):
        raise TargetError(f"TARGET {text!r} made a {type(made).__name__}, not a CaptureTarget.")
    return made


def _module(name: str, text: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise TargetError(f"TARGET {text!r} cannot be imported: {_brief(error)}.") from error


def _attribute(module: Any, attribute: str, text: str) -> Any:
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise TargetError(f"TARGET {text!r} not found: {_first_line(error)}.") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"TARGET {text!r} cannot be read: {_brief(error)}.") from error


def _call(factory: Any, device: str, text: str) -> Any:
    try:
        return factory(device=device) if _takes_device(factory) else factory()
    except GraphkitError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"TARGET {text!r} failed when called: {_brief(error)}.") from error


def _takes_device(factory: Any) -> bool:
    try:
        return "device" in inspect.signature(factory).parameters
    except ValueError:  # some built-ins have no signature
        return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".")


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
