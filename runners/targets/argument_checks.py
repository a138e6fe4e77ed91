"""Checks of the arguments of a CaptureTarget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn

from graphkit.buffers import AttentionBackend
from graphkit.config import BufferSizes
from graphkit.errors import TargetError, short_repr
from graphkit.runners import RUNNERS
from graphkit.runners.capture_checks import RecurrentStates
from graphkit.spec import ForwardMode, SpecConfig

_Types = type | tuple[type, ...]
_FUNCTION: Any = (NoneType, Callable)
_TYPES: Mapping[str, tuple[_Types, str]] = {
    "name": (str, "a text for messages and records"),
    "spec": (SpecConfig, "a graphkit.SpecConfig"),
    "sizes": (BufferSizes, "a graphkit.BufferSizes"),
    "forwards": (Mapping, "a mapping from a graphkit.ForwardMode to its forward"),
    "sample_batch": (_FUNCTION, "a function of mode, batch size and seed, or None"),
    "weights": ((NoneType, nn.Module, Mapping), "a module, tensors by name, or None"),
    "mutable_state": ((NoneType, Mapping), "tensors by name, or None"),
    "persistent_tensors": (
        (*_FUNCTION, Mapping),
        "tensors by name, a function that returns them, or None",
    ),
    "host_values": (Mapping, "a mapping from a name to a setter and its values"),
    "served_modes": ((NoneType, Collection), "the graphkit.ForwardMode members, or None"),
    "engine": (_FUNCTION, "a function that returns a graphkit.SpeculativeEngine, or None"),
    "model": (_FUNCTION, "a function from token ids [1, N] to logits [1, N, V], or None"),
    "recurrent_state": ((NoneType, RecurrentStates), "a graphkit.RecurrentStatePool, or None"),
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


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a wrong type.

    Raises:
        TargetError: Names the first such argument.
    """
    whose = f"target {short_repr(arguments['name'])}"
    for name, (types, expected) in _TYPES.items():
        _check_type(whose, name, arguments[name], types, expected)
    if (group := arguments["group"]) is not None:
        from graphkit.runners.ranks import RunnerGroup  # a target of one process needs none of it

        _check_type(whose, "group", group, RunnerGroup, "a graphkit.RankGroup, or None")
    _check_forwards(whose, arguments["forwards"], arguments["served_modes"] or ())
    if arguments["engine"] is not None and ForwardMode.STEP in arguments["forwards"]:
        raise TargetError(
            f"{whose} has a forward for STEP, and an engine whose step is STEP. "
            "Pass one of the two."
        )
    for name, (types, expected) in _TYPES_BY_MODE.items():
        _check_by_mode(whose, name, arguments[name], types, expected)
    _check_host_values(whose, arguments["host_values"])
    weights = arguments["weights"]
    for name, weight in weights.items() if isinstance(weights, Mapping) else ():
        if not isinstance(weight, torch.Tensor):
            raise TargetError(
                f"{whose}: weights has no tensor for {short_repr(name)}, but "
                f"{short_repr(weight)}. Pass "
                "tensors by name, or a module."
            )


def _check_type(whose: str, name: str, value: object, types: _Types, expected: str) -> None:
    if not isinstance(value, types):
        raise TargetError(f"{whose}: {name} is {short_repr(value)}. Pass {expected}.")


def _check_forwards(
    whose: str, forwards: Mapping[ForwardMode, Any], served_modes: Collection[ForwardMode]
) -> None:
    for mode in served_modes:
        _check_mode(whose, mode, "serves")
    for mode, forward in forwards.items():
        _check_mode(whose, mode, "has a forward for")
        is_chain = RUNNERS[mode].takes_layers and isinstance(forward, Sequence | nn.ModuleList)
        for layer in forward if is_chain else [forward]:
            if not callable(layer):
                raise TargetError(
                    f"{whose}: the forward of {mode.name} is {short_repr(layer)}. Pass a "
                    "function or a module that takes the inputs of the mode."
                )


def has_runner(mode: object) -> bool:
    """Return whether a value is a forward mode with a runner; ``RUNNERS`` may gain modes."""
    return any(mode is known for known in RUNNERS)


def _check_mode(whose: str, mode: object, verb: str) -> None:
    if not has_runner(mode):
        raise TargetError(
            f"{whose} {verb} {short_repr(mode)}, which has no runner. Use "
            f"graphkit.ForwardMode, one of {', '.join(mode.name for mode in RUNNERS)}."
        )


def _check_by_mode(whose: str, name: str, value: object, types: _Types, expected: str) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        _check_type(whose, name, value, types, expected)
        return
    for mode, one in value.items():
        if not isinstance(mode, ForwardMode):
            raise TargetError(
                f"{whose}: {name} has a value for {short_repr(mode)}. Use graphkit.ForwardMode "
                "as keys."
            )
        if one is not None:
            _check_type(whose, f"{name}[{mode.name}]", one, types, expected)


def _check_host_values(whose: str, host_values: Mapping[str, Any]) -> None:
    for name, setting in host_values.items():
        is_pair = isinstance(setting, Sequence) and len(setting) == 2 and callable(setting[0])
        if not is_pair:
            raise TargetError(
                f"{whose}: host_values[{short_repr(name)}] is {short_repr(setting)}. Pass a setter "
                "and a sequence of values for it."
            )
        if not isinstance(setting[1], Sequence) or len(setting[1]) < 2:
            raise TargetError(
                f"{whose}: host_values[{short_repr(name)}] is {short_repr(setting)}. Pass two or "
                "more values, so that a graph that keeps one of them can be detected."
            )
