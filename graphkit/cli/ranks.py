"""Commands on several ranks: ``torchrun --nproc-per-node 2 -m graphkit COMMAND --tp 2``.

Rank 0 prints. All ranks end with the same exit code, the largest of theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import UsageError, describe, exit_code
from graphkit.cli.output import print_message, silence
from graphkit.errors import RankError
from graphkit.records import AuditReport, CaptureRecord, Node, count_of

if TYPE_CHECKING:
    from graphkit.distributed import RankGroup

Command = Callable[[argparse.Namespace, "RankGroup | None"], int]
"""Runs with the parsed options on one rank, and returns the exit code."""
_EXIT_CODES_S = 20.0
"""How long a rank waits for the exit codes of the others."""
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_NOTHING = "nothing more"


def add_tp_option(parser: argparse.ArgumentParser, command: Command) -> None:
    """Declare --tp and --one-shot, and run the command on all ranks that they ask for."""
    parser.set_defaults(run=partial(_run_on_ranks, command))
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N",
        help="GPUs that split the model (tensor parallelism); start the command with "
        "torchrun --nproc-per-node N -m graphkit; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--one-shot", action="store_true",
        help="with --tp on GPUs: collectives through memory that the GPUs share instead of NCCL, "
        "so that device loops run; if a rank ends, the others must be killed",
    )  # fmt: skip


def _run_on_ranks(command: Command, arguments: argparse.Namespace) -> int:
    """Run a command on this rank, with the group of all ranks or ``None`` for ``--tp 1``.

    The exit code is the largest of all ranks.

    Raises:
        UsageError: torchrun did not start as many processes as ``--tp`` says, or ``--one-shot`` is
            given for one.
    """
    started = int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1
    if arguments.tp != started:
        raise UsageError(
            f"--tp is {arguments.tp}, but the command has {count_of(started, 'process')}. Start it "
            "with torchrun --nproc-per-node N -m graphkit COMMAND --tp N."
        )
    if arguments.tp == 1:
        if arguments.one_shot:
            raise UsageError("--one-shot needs several ranks. Add --tp N.")
        return command(arguments, None)
    if os.environ["RANK"] != "0":
        silence()
    group = _open_group(arguments.device, one_shot=arguments.one_shot)
    failure: Exception | None = None
    try:
        code = command(arguments, group)
    except Exception as error:
        group.leave(error)
        code, failure = exit_code(error), error
        if arguments.verbose:
            traceback.print_exc()
    return _agreed(group, code, failure)


def _open_group(device: str, *, one_shot: bool) -> RankGroup:
    import torch
    import torch.distributed as dist

    from graphkit.distributed import RankGroup
    from graphkit.graphs import resolve_device

    is_cuda = resolve_device(device).type == "cuda"
    if is_cuda:
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=local)
    else:
        dist.init_process_group("gloo")
    return RankGroup(same_batch=True, one_shot=one_shot)


def _agreed(group: RankGroup, code: int, failure: Exception | None) -> int:
    """Exchange exit codes; rank 0 prints its own error, or else the first of another rank.

    If the error of rank 0 names other ranks at fault, their errors come first.
    """
    import torch.distributed as dist

    text = "" if failure is None else describe(failure)
    group.store.write("exit", f"{code} {text}")
    others = group.store.gather("exit", group.others, _EXIT_CODES_S)
    codes, reasons = [code], {group.rank: text}
    for rank in sorted(others):
        other, _, reason = others[rank].partition(" ")
        codes.append(int(other))
        reasons[rank] = reason and f"rank {rank}: {reason}"
    at_fault: tuple[int, ...] = ()
    if isinstance(failure, RankError) and group.rank not in failure.ranks:
        at_fault = failure.ranks
    text = next((reasons[rank] for rank in (*at_fault, *reasons) if reasons.get(rank)), "")
    if text:
        print_message(f"error: {text}")
    if not group.is_lost or dist.get_backend() == "gloo":  # NCCL waits for ranks that are gone
        with suppress(RuntimeError):
            dist.destroy_process_group()
    return max(codes)


def rank_path(path: Path, group: RankGroup | None) -> Path:
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
    difference = differing_launch(mine, first)
    if difference is not None:
        ours, theirs = difference
        raise RankError(
            f"captured other graphs than rank 0: {ours}, where rank 0 has {theirs}. All ranks must "
            "run the same operations in the same order. capture --out F.json writes the record of "
            f"each: compare F.json with F.rank{group.rank}.json by graphkit diff.",
            ranks=(group.rank,),
        )


def merge_rank_reports(report: AuditReport, group: RankGroup) -> AuditReport:
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


def launch_order(record: CaptureRecord) -> list[str]:
    """Return what all ranks must have in the same order, one text each.

    These are the sizes of each mode, then the nodes of each graph: module, operation, and the
    kernel or, on the recorder, the tensors of a collective. Values, memory and times may differ
    between ranks, and so may the kernel of any other operation.
    """
    order = []
    for mode in record.modes:
        sizes = ", ".join(str(size.batch_size) for size in mode.sizes)
        order.append(f"{mode.mode} at batch sizes {sizes or 'none'}")
    for graph in record.graphs:
        for node in graph.nodes:
            place = f" in {node.module}" if node.module else ""
            order.append(f"node {node.index} of {graph.name}: {_action(node)}{place}")
    return order


def differing_launch(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the first texts of two ranks that differ; ``None`` if none does."""
    pairs = zip_longest(mine, others, fillvalue=_NOTHING)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _action(node: Node) -> str:
    if not node.op:
        return node.short_name
    if not node.op.startswith(_COLLECTIVES):
        return f"{node.op} ({node.kind})"
    arguments = (argument for argument in node.arguments if argument.kind == "tensor")
    tensors = [argument.text.partition(" at ")[0] for argument in arguments]
    return f"{node.op} ({', '.join(tensors) or node.short_name})"
