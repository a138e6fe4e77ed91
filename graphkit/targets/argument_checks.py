"""Checks of the arguments of a CaptureTarget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphkit.attention import AttentionBackend
from graphkit.config import BufferSizes
from graphkit.distributed import RankGroup
from graphkit.errors import TargetError
from graphkit.runners import RUNNERS
from graphkit.spec import ForwardMode, SpecConfig

if TYPE_CHECKING:
    from graphkit.targets.target import CaptureTarget

_Types = type | tuple[type, ...]
_TYPES: Mapping[str, tuple[_Types, str]] = {
    "name": (str, "a text for messages and records"),
    "spec": (SpecConfig, "a graphkit.SpecConfig"),
    "sizes": (BufferSizes, "a graphkit.BufferSizes"),
    "forwards": (Mapping, "a mapping from a graphkit.ForwardMode to its forward"),
    "sample_batch": (Callable, "a function of mode, batch size and seed"),  # type: ignore[dict-item]
    "weights": ((NoneType, nn.Module, Mapping), "a module, tensors by name, or None"),
    "mutable_state": ((NoneType, Mapping), "tensors by name, or None"),
    "kept_memory": (
        (NoneType, Mapping, Callable),  # type: ignore[dict-item]
        "tensors by name, a function that returns them, or None",
    ),
    "host_values": (Mapping, "a mapping from a name to a setter and its values"),
    "group": ((NoneType, RankGroup), "a graphkit.RankGroup, or None"),
    "served_modes": ((NoneType, Collection), "the graphkit.ForwardMode members, or None"),
    "engine": (
        (NoneType, Callable),  # type: ignore[dict-item]
        "a function that returns a graphkit.SpeculativeEngine, or None",
    ),
    "model": (
        (NoneType, Callable),  # type: ignore[dict-item]
        "a function from token ids [1, N] to logits [1, N, V], or None",
    ),
    "kv_slots": ((NoneType, torch.Tensor), "a tensor of KV slots [rows, context], or None"),
}
"""Types of each argument, and what to pass."""
_TYPES_BY_MODE: Mapping[str, tuple[_Types, str]] = {
    "attention": (AttentionBackend, "a graphkit.AttentionBackend, or one by mode"),
    "optional_fields": (object, "names of fields, or names by mode"),
    "inputs_type": (type, "a class of inputs, or one by mode"),
    "output_type": (type, "a class of outputs, or one by mode"),
}
"""The same for arguments that may be ``None``, and may be mappings from a mode."""


def check_arguments(target: CaptureTarget) -> None:
    """Refuse arguments of a wrong type.

    Raises:
        TargetError: Names the first such argument.
    """
    for name, (types, expected) in _TYPES.items():
        _check_type(target, name, getattr(target, name), types, expected)
    _check_forwards(target)
    if target.engine is not None and ForwardMode.STEP in target.forwards:
        raise TargetError(
            f"target {target.name!r} has a forward for STEP, and an engine whose step is STEP. "
            "Pass one of the two."
        )
    for name, (types, expected) in _TYPES_BY_MODE.items():
        _check_by_mode(target, name, types, expected)
    _check_host_values(target)
    weights = target.weights if isinstance(target.weights, Mapping) else {}
    for name, each in weights.items():
        if not isinstance(each, torch.Tensor):
            raise TargetError(
                f"target {target.name!r}: weights has no tensor for {name!r}, but {each!r}. Pass "
                "tensors by name, or a module."
            )


def _check_type(
    target: CaptureTarget, name: str, value: object, types: _Types, expected: str
) -> None:
    if not isinstance(value, types):
        raise TargetError(f"target {target.name!r}: {name} is {value!r}. Pass {expected}.")


def _check_forwards(target: CaptureTarget) -> None:
    for mode in target.served_modes or ():
        _check_mode(target, mode, "serves")
    for mode, forward in target.forwards.items():
        _check_mode(target, mode, "has a forward for")
        is_chain = RUNNERS[mode].takes_layers and isinstance(forward, Sequence | nn.ModuleList)
        forwards: Iterable[Any] = forward if is_chain else [forward]  # type: ignore[assignment]
        for each in forwards:
            if not callable(each):
                raise TargetError(
                    f"target {target.name!r}: the forward of {mode.name} is {each!r}. Pass a "
                    "function or a module that takes the inputs of the mode."
                )


def has_runner(mode: object) -> bool:
    """Return whether a value is a forward mode with a runner; ``RUNNERS`` may gain modes."""
    return any(mode is each for each in RUNNERS)


def _check_mode(target: CaptureTarget, mode: object, verb: str) -> None:
    if not has_runner(mode):
        raise TargetError(
            f"target {target.name!r} {verb} {mode!r}, which has no runner. Use "
            f"graphkit.ForwardMode, one of {', '.join(mode.name for mode in RUNNERS)}."
        )


def _check_by_mode(target: CaptureTarget, name: str, types: _Types, expected: str) -> None:
    value = getattr(target, name)
    if value is None:
        return
    if not isinstance(value, Mapping):
        _check_type(target, name, value, types, expected)
        return
    for mode, each in value.items():
        if not isinstance(mode, ForwardMode):
            raise TargetError(
                f"target {target.name!r}: {name} has a value for {mode!r}. Use "
                "graphkit.ForwardMode as keys."
            )
        if each is not None:
            _check_type(target, f"{name}[{mode.name}]", each, types, expected)


def _check_host_values(target: CaptureTarget) -> None:
    host_values: Mapping[str, Any] = target.host_values
    for name, setting in host_values.items():
        is_pair = isinstance(setting, Sequence) and len(setting) == 2 and callable(setting[0])
        if not is_pair:
            raise TargetError(
                f"target {target.name!r}: host_values[{name!r}] is {setting!r}. Pass a setter and "
                "a sequence of values for it."
            )
        if not isinstance(setting[1], Sequence) or len(setting[1]) < 2:
            raise TargetError(
                f"target {target.name!r}: host_values[{name!r}] is {setting!r}. Pass two or more "
                "values, so that a graph that keeps one of them can be detected."
            )
