"""One runner per forward mode. Imported as ``graphkit.runners``.

A batch's way: ``runner`` (the verbs) -> ``replayer`` -> ``fit`` (what was made ready for its size)
-> one mailbox slot, one graph launch, the live rows of the output. ``capturing`` makes the graphs;
``dispatch`` says which batches have none, and ``step`` runs those without.
"""

from graphkit.runners.decode import DecodeRunner
from graphkit.runners.dispatch import Decision, Reason
from graphkit.runners.outputs import Output, VerifyOutput
from graphkit.runners.runner import Runner
from graphkit.runners.staged import StagedBatch
from graphkit.runners.target_verify import TargetVerifyRunner

__all__ = [
    "Decision",
    "DecodeRunner",
    "Output",
    "Reason",
    "Runner",
    "StagedBatch",
    "TargetVerifyRunner",
    "VerifyOutput",
]
