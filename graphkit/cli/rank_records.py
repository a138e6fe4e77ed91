"""Records of several ranks: a file for each, the same graphs in all, one report of an audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.diff import differing_launch, launch_order
from graphkit.errors import RankError
from graphkit.records import AuditReport, CaptureRecord

if TYPE_CHECKING:
    from graphkit.distributed import RankGroup


def path_of_rank(path: Path, group: RankGroup | None) -> Path:
    """Return the output file of this rank: ``F.json`` of rank 0, ``F.rank1.json`` of rank 1."""
    if group is None or not group.rank:
        return path
    return path.with_name(f"{path.stem}.rank{group.rank}{path.suffix}")


def check_same_order(record: CaptureRecord, group: RankGroup) -> None:
    """Compare the sizes, nodes and collectives of this rank with those of rank 0, in order.

    Raises:
        RankError: They differ; the text names the first one that does.
    """
    from graphkit.distributed import Channel

    mine = launch_order(record)
    first: list[str] = json.loads(Channel(group).broadcast(json.dumps(mine).encode()))
    found = differing_launch(mine, first)
    if found is not None:
        raise RankError(
            f"captured other graphs than rank 0: {found[0]}, where rank 0 has {found[1]}. All "
            "ranks must run the same operations in the same order. capture --out F.json writes "
            f"the record of each: compare F.json with F.rank{group.rank}.json by graphkit diff.",
            ranks=(group.rank,),
        )


def report_of_ranks(report: AuditReport, group: RankGroup) -> AuditReport:
    """Return on rank 0 the report of all ranks, on others the report as it is.

    Raises:
        RankError: A rank sent rank 0 no report.
    """
    from graphkit.audit import merged_reports

    if group.rank:
        group.store.write("audit report", report.to_json())
        return report
    texts = group.store.gather("audit report", group.others, group.time_limit)
    missing = tuple(rank for rank in group.others if rank not in texts)
    if missing:
        raise RankError(f"rank {missing[0]} sent no report of its audits.", ranks=missing)
    return merged_reports([report, *(AuditReport.from_json(texts[r]) for r in group.others)])
