"""One runner per forward mode. Imported as ``graphkit.runners``.

A batch's way: ``runner`` (the verbs) -> ``replayer`` -> ``fit`` (what was made ready for its size)
-> one mailbox entry, one graph launch, the live rows of the output. ``capturing`` makes the graphs;
``dispatch`` says which batches have none, and ``step`` runs those without. What a mode does around
the user's forward stands in the file of the mode.
"""

from graphkit.runners.decode import DecodeRunner
from graphkit.runners.dispatch import Decision, Reason
from graphkit.runners.draft import DraftRunner
from graphkit.runners.draft_extend import DraftExtendRunner, DraftExtendV2Runner
from graphkit.runners.multi_layer import MultiLayerEagleRunner
from graphkit.runners.outputs import DraftExtendOutput, DraftOutput, ForwardOutput, Output
from graphkit.runners.runner import Runner
from graphkit.runners.staged import StagedBatch
from graphkit.runners.target_verify import TargetVerifyRunner

__all__ = [
    "Decision",
    "DecodeRunner",
    "DraftExtendOutput",
    "DraftExtendRunner",
    "DraftExtendV2Runner",
    "DraftOutput",
    "DraftRunner",
    "ForwardOutput",
    "MultiLayerEagleRunner",
    "Output",
    "Reason",
    "Runner",
    "StagedBatch",
    "TargetVerifyRunner",
]
