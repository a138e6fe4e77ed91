"""Selection of the modes of a target to work on."""

from __future__ import annotations

from collections.abc import Iterable

from graphkit.errors import TargetError
from graphkit.spec import ForwardMode
from graphkit.targets.target import CaptureTarget


def selected_modes(target: object, modes: object = None) -> list[ForwardMode]:
    """Return the modes to work on, each once.

    Args:
        target: A ``CaptureTarget``.
        modes: Modes of the target; ``None`` selects all of it.

    Raises:
        TargetError: ``target`` is not a target or has no mode, or ``modes`` has something other
            than its modes.
    """
    if not isinstance(target, CaptureTarget):
        raise TargetError(f"a target must be a graphkit.CaptureTarget, got {target!r}.")
    if not isinstance(modes, (Iterable, type(None))) or isinstance(modes, str):
        raise TargetError(f"modes must be graphkit.ForwardMode members, got {modes!r}.")
    chosen = list(modes or target.modes)
    if not chosen:
        raise TargetError(f"target {target.name!r} has no forward. Give it one for a mode.")
    for mode in chosen:
        target.check_mode(mode)
    return list(dict.fromkeys(chosen))
