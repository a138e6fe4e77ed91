from graphkit.runners.capture_checks import RecurrentStates as RecurrentStates
from graphkit.runners.dispatch import Decision as Decision, Reason as Reason
from graphkit.runners.draft import DraftRunner as DraftRunner
from graphkit.runners.draft_extend import (
    DraftExtendRunner as DraftExtendRunner,
    DraftExtendV2Runner as DraftExtendV2Runner,
)
from graphkit.runners.mode_declaration import SampleRows as SampleRows
from graphkit.runners.multi_layer import MultiLayerEagleRunner as MultiLayerEagleRunner
from graphkit.runners.observe import ObservedReplay as ObservedReplay
from graphkit.runners.output_fields import (
    OutputCheck as OutputCheck,
    OutputRow as OutputRow,
    declare_output as declare_output,
)
from graphkit.runners.outputs import (
    DraftContextOutput as DraftContextOutput,
    DraftExtendOutput as DraftExtendOutput,
    DraftOutput as DraftOutput,
    ForwardOutput as ForwardOutput,
    LastRowOutput as LastRowOutput,
    LayersOutput as LayersOutput,
    Output as Output,
)
from graphkit.runners.ranks import (
    AgreedSize as AgreedSize,
    GroupMember as GroupMember,
    RankAction as RankAction,
    RankReady as RankReady,
    RunnerGroup as RunnerGroup,
)
from graphkit.runners.registry import RUNNERS as RUNNERS
from graphkit.runners.replayer import Replayer as Replayer
from graphkit.runners.runner import Runner as Runner
from graphkit.runners.settings import RunnerOptions as RunnerOptions
from graphkit.runners.staged import StagedBatch as StagedBatch
from graphkit.runners.step import Step as Step
from graphkit.runners.step_runner import StepRunner as StepRunner
from graphkit.runners.target_verify import (
    DecodeRunner as DecodeRunner,
    TargetVerifyRunner as TargetVerifyRunner,
)
