"""The runner class of each forward mode."""

from __future__ import annotations

from typing import Any

from graphkit.runners.draft import DraftRunner
from graphkit.runners.draft_extend import DraftExtendRunner, DraftExtendV2Runner
from graphkit.runners.multi_layer import MultiLayerEagleRunner
from graphkit.runners.runner import Runner
from graphkit.runners.step_runner import StepRunner
from graphkit.runners.target_verify import DecodeRunner, TargetVerifyRunner
from graphkit.spec import ForwardMode

RUNNERS: dict[ForwardMode, type[Runner[Any, Any]]] = {
    runner.mode: runner
    for runner in (
        DecodeRunner,
        TargetVerifyRunner,
        DraftRunner,
        DraftExtendRunner,
        DraftExtendV2Runner,
        MultiLayerEagleRunner,
        StepRunner,
    )
}
"""Runner class of each forward mode. Commands, audits, strategies and targets find it here."""
