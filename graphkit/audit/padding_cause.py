"""Why padding changes live rows: one name for one cause, and the node at which it begins.

Used wherever a padded step differs from the unpadded one: by the audits of pads and shadow, by
``ShadowWatch``, and by the kit for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphkit.audit.batch_variants import Fill, Requests, fill_floats
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.forward_caches import ForwardCache, cache_at_fault
from graphkit.audit.runs import EqualStateRuns
from graphkit.audit.runs.first_node import FirstNode
from graphkit.audit.runs.forward_trace import Weights
from graphkit.errors import InspectError
from graphkit.records import Node
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import even_owner, first_difference
from graphkit.runners.sample_batch import largest_number


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a difference between two runs of a step.

    Attributes:
        kind: Kind of finding.
        first: The operation at which the runs begin to differ; ``None`` if it is unknown.
        cache: The cache that it reads, if that is the cause.
        runs: What the two runs are, as phrases.
    """

    kind: FindingKind
    first: FirstNode | None = None
    cache: ForwardCache | None = None
    runs: tuple[str, str] = ("the step without pads", "the padded step")

    @property
    def text(self) -> str:
        """Description of the node and the cache, or an empty string."""
        if self.first is None:
            return ""
        name = f"`{self.first.short_name}`"
        if self.first.only_in is None:
            text = f" The first node that differs is {name}."
        else:
            text = f" Only {self.runs[self.first.only_in]} runs {name}."
        return text if self.cache is None else f"{text} {self.cache.text}"

    @property
    def place(self) -> str:
        """Module and line of the node, or empty strings."""
        origin = None if self.first is None else self.first.origin
        return ", ".join(filter(None, (origin.module, origin.source))) if origin else ""

    def facts(self, runner: Runner[Any, Any], size: int, weights: Weights) -> dict[str, Any]:
        """Return what ``Check.report`` takes to name the node and the cache.

        Args:
            runner: Captured.
            size: Captured size of the graph that has the node.
            weights: The model, or its weights by name.
        """
        names = () if self.cache is None else (self.cache.name,)
        if self.first is None:
            return {"names": names}
        return {
            "kernel": self.first.short_name,
            "module": self.first.origin.module,
            "source": self.first.origin.source,
            "node": _node(runner, size, self.first, weights),
            "names": names,
        }


def padding_cause(
    runs: EqualStateRuns, weights: Weights = None, kind: FindingKind | None = None
) -> Cause:
    """Return why the padded step differs from the unpadded one.

    Runs the forward several times. On several ranks, where only one of them may see the difference,
    nothing is run.

    Args:
        runs: Runs of the batch.
        weights: The model, or its weights by name, to name modules by.
        kind: Kind of finding that other contents of pads have shown; ``None`` tries them.
    """
    runner = runs.runner
    if runner.group is not None:
        return Cause(kind or FindingKind.LEAKING_PAD_ROW)
    first = runs.first_node(weights)
    if kind is not None and kind.severity == "note":
        return Cause(kind, first)
    cache = None
    if first is not None:

        def agrees() -> bool:
            return runs.padding_difference() is None

        cache = cache_at_fault(runner, first.outside, runs.padded, agrees)
    if cache is not None:
        return Cause(cache.kind, first, cache)
    if kind is None:
        is_branch = first is not None and first.only_in is not None
        reads_pads = not is_branch and _contents_matter(runs)
        kind = (
            FindingKind.LEAKING_PAD_ROW if reads_pads else FindingKind.DEPENDENCE_ON_THE_BATCH_SIZE
        )
    return Cause(kind, first)


def _contents_matter(runs: EqualStateRuns) -> bool:
    """Return whether other contents of pad rows change live rows of the padded step."""
    runner, size = runs.runner, runs.padded_batch_size
    rounding = Rounding(runner.sizes.dtype)
    requests = Requests.from_batch(runs.batch, runner.buffers.layouts, runner.buffers.capacity)
    fills: tuple[Fill, ...] = (
        fill_floats(math.nan),
        lambda layout, _rows: largest_number(layout, runner.sizes, runner.steps_ahead()),
    )
    padded = runs.padded()
    for fill in fills:
        batch = requests.padded(size, fill)
        filled = EqualStateRuns(runner, runs.batch, size, runs.start, padded_batch=batch).padded()
        allowed = rounding.beside(0.0)
        if first_difference(padded, filled, even_owner(1), rounding, allowed) is not None:
            return True
    return False


def _node(runner: Runner[Any, Any], size: int, first: FirstNode, weights: Weights) -> Node | None:
    """Return the node of a graph that an operation made; the first one if it made several."""
    try:
        nodes = runner.inspect(size, weights=weights).nodes
    except InspectError:  # cuda-bindings are not installed
        return None
    place = first.op.name, first.origin.module, first.origin.source
    same = [node for node in nodes if (node.op, node.module, node.source) == place]
    return same[min(first.occurrence, len(same) - 1)] if same and first.only_in != 0 else None
