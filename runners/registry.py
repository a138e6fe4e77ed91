"""The runner class of each forward mode."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphkit.spec import ForwardMode

if TYPE_CHECKING:
    from graphkit.runners.runner import Runner

    RunnerType = type[Runner[Any, Any]]


class _RunnersByMode(MutableMapping[ForwardMode, "RunnerType"]):
    """Imports the module of a class on first use: a step of one mode needs no other mode."""

    def __init__(self, names: dict[ForwardMode, str]) -> None:
        self._classes: dict[ForwardMode, str | RunnerType] = {**names}

    def __getitem__(self, mode: ForwardMode) -> RunnerType:
        known = self._classes[mode]
        if isinstance(known, str):
            self._classes[mode] = known = getattr(import_module("graphkit.runners"), known)
        return known

    def __setitem__(self, mode: ForwardMode, runner: RunnerType) -> None:
        self._classes[mode] = runner

    def __delitem__(self, mode: ForwardMode) -> None:
        del self._classes[mode]

    def __iter__(self) -> Iterator[ForwardMode]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


RUNNERS: MutableMapping[ForwardMode, RunnerType] = _RunnersByMode(
    {
        ForwardMode.DECODE: "DecodeRunner",
        ForwardMode.TARGET_VERIFY: "TargetVerifyRunner",
        ForwardMode.DRAFT: "DraftRunner",
        ForwardMode.DRAFT_EXTEND: "DraftExtendRunner",
        ForwardMode.DRAFT_EXTEND_V2: "DraftExtendV2Runner",
        ForwardMode.MULTI_LAYER_EAGLE: "MultiLayerEagleRunner",
        ForwardMode.STEP: "StepRunner",
    }
)
"""Runner class of each forward mode. Commands, audits, strategies and targets find it here."""
