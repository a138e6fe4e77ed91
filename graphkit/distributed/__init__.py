"""Several ranks: they capture together, and agree before each replay on what all replay.

Built on ``torch.distributed``. ``RankGroup`` is the argument ``group=`` of runners. Before a
replay, each rank casts a ``Vote``, and all reach the same ``Agreement`` (``votes``). Captures
proceed in ``lockstep``. What ranks say about failures goes through ``notes``. ``collectives`` are
those of the forwards.
"""

from graphkit.distributed.channel import Channel
from graphkit.distributed.collectives import Collectives, OneShotCollectives
from graphkit.distributed.lockstep import Lockstep, LockstepBackend, RankFailure
from graphkit.distributed.rank_group import Member, RankGroup
from graphkit.distributed.votes import ANY_RUNNER, Agreement, Choice, Vote

__all__ = [
    "ANY_RUNNER",
    "Agreement",
    "Channel",
    "Choice",
    "Collectives",
    "Lockstep",
    "LockstepBackend",
    "Member",
    "OneShotCollectives",
    "RankFailure",
    "RankGroup",
    "Vote",
]
