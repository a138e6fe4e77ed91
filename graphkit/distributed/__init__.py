"""Ranks that capture together, and agree before each replay on the size that all replay.

Built on ``torch.distributed``. ``RankGroup`` is the argument ``group=`` of runners. Before a
replay, each rank sends a ``RankReady``, and all derive the same ``AgreedSize``. Captures wait at
each ``CaptureBarrier``. ``guarded_calls`` reports failures of calls, and ``failure_detector`` finds
out which rank failed first, through ``rank_store``, ``heartbeat`` and ``connections``. Forwards use
``collectives``.
"""

from graphkit.distributed.barrier_backend import BarrierBackend, CaptureBarrier, RankFailure
from graphkit.distributed.channel import Channel
from graphkit.distributed.collectives import Collectives, OneShotCollectives
from graphkit.distributed.rank_group import RankGroup

__all__ = [
    "BarrierBackend",
    "CaptureBarrier",
    "Channel",
    "Collectives",
    "OneShotCollectives",
    "RankFailure",
    "RankGroup",
]
