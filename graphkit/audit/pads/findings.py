"""Wrong replays of the audit of pads, and the findings that report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.audit.audit_log import Check
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import Cause
from graphkit.audit.pads.state_writes import Write
from graphkit.audit.places import row_facts, row_text
from graphkit.audit.runs.forward_trace import Weights
from graphkit.ops.tree import parents_and_depths
from graphkit.records import Mismatch, count_of
from graphkit.runners import Runner
from graphkit.runners.comparison.differences import Tensors
from graphkit.spec import ForwardMode, SpecConfig


@dataclass(frozen=True, slots=True)
class WrongReplay:
    """A replay that went wrong.

    Attributes:
        kind: Kind of finding that the variation shows.
        variation: What was varied, such as ``with copies of row 0 in pad rows``.
        live: Number of live requests.
        error: The wrong output or write.
        find_cause: Returns the cause, from further runs of the batch.
        consequence: A further sentence; may be empty.
    """

    kind: FindingKind
    variation: str
    live: int
    error: Mismatch | Write
    find_cause: Callable[[], Cause]
    consequence: str = ""


def report_wrong_replays(
    check: Check, replays: Sequence[WrongReplay], runner: Runner[Any, Any], weights: Weights
) -> None:
    """Report one finding for each cause and each state tensor that is written.

    Args:
        check: The check of one captured size.
        replays: The wrong replays at that size.
        runner: Captured.
        weights: The model, or its weights by name.
    """
    groups: dict[tuple[FindingKind, str], list[WrongReplay]] = {}
    for replay in replays:
        name = replay.error.name if isinstance(replay.error, Write) else ""
        groups.setdefault((replay.kind, name), []).append(replay)
    by_cause: dict[tuple[FindingKind, str], tuple[Cause, list[WrongReplay]]] = {}
    for (_, name), group in groups.items():
        cause = group[0].find_cause()
        by_cause.setdefault((cause.kind, name), (cause, []))[1].extend(group)
    for (kind, name), (cause, (first, *others)) in by_cause.items():
        text, facts = _text_and_facts(first)
        more = f" {count_of(len(others), 'more replay')} went wrong like this." if others else ""
        text = f"{text}{first.consequence}{cause.text}{more}"
        facts |= {"cause": name or "output"}
        facts |= cause.facts(runner, check.batch_size, weights)
        check.report(kind, text, **facts)


def distance_text(wrong: Mismatch, natural_ulps: float) -> str:
    """Return a sentence on how far numbers differ, beside what the step itself rounds."""
    return (
        f" The distance is {wrong.distance}; the padded and the unpadded step differ by "
        f"{natural_ulps:.3g} ulp."
    )


def acceptance_text(runner: Runner[Any, Any], batch: Any, expected: Tensors, got: Tensors) -> str:
    """Return a sentence if wrong logits of a verify change how many drafts are accepted."""
    if runner.mode is not ForwardMode.TARGET_VERIFY:
        return ""
    one, other = (
        accepted_drafts(runner.spec, batch, rows["next_token_logits"]) for rows in (expected, got)
    )
    if one is None or other is None or torch.equal(one, other):
        return ""
    request = int((one != other).nonzero()[0])
    drafts = count_of(int(other[request]), "draft")
    return f" Request {request} then accepts {drafts} instead of {int(one[request])}."


def _text_and_facts(replay: WrongReplay) -> tuple[str, dict[str, Any]]:
    error, variation, live = replay.error, replay.variation, replay.live
    if isinstance(error, Write):
        text = (
            f"row {error.row} of state `{error.name}` changes from {error.before} to {error.after} "
            f"{variation}, but belongs to no request of the batch "
            f"({count_of(live, 'live request')})."
        )
        facts = {"field": error.name, "before": error.before, "after": error.after}
        return text, {**facts, "row": error.row}
    facts = {"field": error.field, **row_facts(error)}
    where, after, before = row_text(error, live), facts["after"], facts["before"]
    return f"{where} is {after} instead of {before} {variation}.", facts


def accepted_drafts(spec: SpecConfig, batch: Any, logits: torch.Tensor) -> torch.Tensor | None:
    """Return how many drafts the target's greedy choice accepts of each request, int64 [B].

    Args:
        spec: Draft settings of the batch.
        batch: A TARGET_VERIFY batch of at least B requests.
        logits: [B * W, V], of the first B requests.

    Returns:
        ``None`` if the batch does not define a tree: it has no drafts, or it is a tree without
        ``custom_mask``.
    """
    width = batch.num_tokens // batch.batch_size
    requests = len(logits) // width
    if width < 2 or (spec.topk > 1 and batch.custom_mask is None):
        return None
    tokens = torch.as_tensor(batch.input_ids).to(logits.device).view(-1, width)[:requests]
    parents, depths = _tree(batch.custom_mask, requests, width, logits.device)
    # A node is accepted if it is the token that follows its parent, and its parent is accepted.
    is_accepted = tokens == logits.argmax(-1).view(requests, width).gather(1, parents)
    is_accepted[:, 0] = True
    for _ in range(width - 1):
        is_accepted &= is_accepted.gather(1, parents)
    return (depths * is_accepted).amax(1)


def _tree(
    mask: Any, requests: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parent and depth of each node, int64 [B, W]; the root is its own parent."""
    if mask is None:
        depths = torch.arange(width, device=device).expand(requests, width)
        return (depths - 1).clamp(min=0), depths
    parents, depths = parents_and_depths(torch.as_tensor(mask)[:requests].cpu())
    return parents.clamp(min=0).to(device), depths.to(device) - 1
