"""Runners: one per forward mode. Imported as ``graphkit.runners``.

A batch takes this path: ``runner`` (the verbs) -> ``replayer`` (everything prepared for its size)
-> one mailbox entry, one graph launch, the live rows of the output.
``capture`` makes the graphs. ``dispatch`` says which batches have no graph, and ``step`` runs them
eagerly. The file of a mode contains what the mode computes around the user's forward, and overrides
what ``mode_declaration`` lists.
"""

from typing import Any

from graphkit.runners.attention_check import RecurrentStates
from graphkit.runners.dispatch import Decision, Reason
from graphkit.runners.draft import DraftRunner
from graphkit.runners.draft_extend import DraftExtendRunner, DraftExtendV2Runner
from graphkit.runners.host_objects import FrozenValue
from graphkit.runners.multi_layer import MultiLayerEagleRunner
from graphkit.runners.observe import ObservedReplay
from graphkit.runners.output_fields import OutputCheck, OutputRow, declare_output
from graphkit.runners.outputs import (
    DraftContextOutput,
    DraftExtendOutput,
    DraftOutput,
    ForwardOutput,
    LastRowOutput,
    LayersOutput,
    Output,
)
from graphkit.runners.ranks import AgreedSize, GroupMember, RankAction, RankReady, RunnerGroup
from graphkit.runners.replayer import Replayer
from graphkit.runners.runner import Runner
from graphkit.runners.sample_rows import SampleRows
from graphkit.runners.settings import RunnerOptions
from graphkit.runners.staged import StagedBatch
from graphkit.runners.step import Step
from graphkit.runners.step_runner import StepRunner
from graphkit.runners.target_verify import DecodeRunner, TargetVerifyRunner
from graphkit.spec import ForwardMode

__all__ = [
    "RUNNERS",
    "AgreedSize",
    "Decision",
    "DecodeRunner",
    "DraftContextOutput",
    "DraftExtendOutput",
    "DraftExtendRunner",
    "DraftExtendV2Runner",
    "DraftOutput",
    "DraftRunner",
    "ForwardOutput",
    "FrozenValue",
    "GroupMember",
    "LastRowOutput",
    "LayersOutput",
    "MultiLayerEagleRunner",
    "ObservedReplay",
    "Output",
    "OutputCheck",
    "OutputRow",
    "RankAction",
    "RankReady",
    "Reason",
    "RecurrentStates",
    "Replayer",
    "Runner",
    "RunnerGroup",
    "RunnerOptions",
    "SampleRows",
    "StagedBatch",
    "Step",
    "StepRunner",
    "TargetVerifyRunner",
    "declare_output",
]

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
