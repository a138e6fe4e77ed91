"""Find ranks that replay different graphs, which wait for each other's collectives forever.

Each rank writes into the store of its process group which graph it replays, and reads what the
others have written about a replay of the same number. Nothing waits: the last rank to arrive sees
all others.
"""

from __future__ import annotations

import json
from functools import cached_property

import torch.distributed as dist

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.foreign.audits.followed_graph import FollowedGraph
from graphkit.audit.foreign.registration import registration_of
from graphkit.distributed.rank_store import RankStore

_COLLECTIVES = ("nccl", "nvshmem", "allreduce", "all_reduce", "allgather", "all_gather", "multimem")
"""Parts of the names of kernels that wait for other processes."""


def has_collective(name: str) -> bool:
    """Return whether a kernel or an operation waits for other processes."""
    return any(part in name.lower() for part in _COLLECTIVES)


class RankKeys:
    """Compares the replays of this process with those of other ranks."""

    @cached_property
    def _store(self) -> RankStore:
        group = dist.group.WORLD
        assert group is not None, "the caller has asked for the number of ranks"
        return RankStore(group.get_group_store(), dist.get_rank())

    def compare(self, number: int, followed: FollowedGraph, check: Check) -> None:
        """Report ranks whose replay of this number is of another graph.

        Graphs without collectives do not count: ranks may replay different ones.
        """
        known = registration_of(followed.graph())
        key = "" if known is None or known.key is None else f" for {known.key()!r}"
        label = f"{(known and known.name) or followed.name}{key}"
        waits = any(has_collective(node.name) for node in followed.record.nodes)
        topic, rank = f"replay {number}", dist.get_rank()
        self._store.write(topic, json.dumps([label, waits]))
        others = [other for other in range(dist.get_world_size()) if other != rank]
        texts = self._store.gather(topic, others, 0)
        check.text = f"compared with {len(texts)} of {len(others)} other ranks"
        for other, text in sorted(texts.items()):
            its_label, its_waits = json.loads(text)
            if its_label != label and (waits or its_waits):
                check.report(
                    FindingKind.WRONG_GRAPH,
                    f"rank {other} replays {its_label}, and rank {rank} {label}, as replay "
                    f"{number}: their collectives do not match.",
                    names=(f"rank {other}", f"rank {rank}"),
                    before=its_label,
                    after=label,
                    cause="ranks",
                )
