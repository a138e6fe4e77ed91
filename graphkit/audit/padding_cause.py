"""Why padding changes live rows: one name for one cause, and the node at which it begins.

Used wherever a padded step differs from the unpadded one: by the audits of pads and shadow, by
``ShadowWatch``, and by the kit for tests. A tensor that a forward keeps from one call to the next
is a cache if the forward makes it again when it is removed. It is at fault if runs with and without
pads agree if each of them creates the tensor again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from graphkit.audit.batch_variants import Fill, Requests, fill_floats
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.reachable_objects import ReachableObjects, walk_roots
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.audit.runs.first_node import FirstNode
from graphkit.audit.runs.forward_trace import Weights
from graphkit.audit.runs.teacher_forcing import wrapped_forward
from graphkit.errors import InspectError
from graphkit.graphs.operations import storage_id
from graphkit.records import Node, tensor_text
from graphkit.runners import Runner
from graphkit.runners.comparison import Rounding
from graphkit.runners.comparison.differences import even_owner, first_difference
from graphkit.runners.known_memory import is_a
from graphkit.runners.sample_batch import largest_number


class ForwardCache(NamedTuple):
    """A cache of a forward: where it is kept, such as ``Model.mask``, and its dtype and shape.

    Its kind says whether it depends on the contents of a batch, or on its size alone.
    """

    name: str
    kept: str
    kind: FindingKind

    @property
    def text(self) -> str:
        """Sentence that names the cache and the call that made it."""
        is_lazy = self.kind is FindingKind.LAZY_CACHE
        made = "from other rows" if is_lazy else "for another batch size"
        return f"It reads `{self.name}` ({self.kept}), which the forward made {made} and kept."


def cache_at_fault(
    runner: Runner[Any, Any],
    read: Sequence[torch.Tensor],
    run: Callable[[], object],
    agrees: Callable[[], bool],
) -> ForwardCache | None:
    """Return the cache without which two runs of a step agree.

    Runs both for each tensor that may be a cache. Restores what the forward refers to.

    Args:
        runner: Captured.
        read: Tensors that the step reads and has not made.
        run: Runs the step on one batch.
        agrees: Runs it on the other one, and returns whether both outputs agree.
    """
    storages = {storage_id(tensor) for tensor in read}
    if not storages:
        return None
    objects = ReachableObjects(walk_roots(runner.step.forward))
    for container, key, value in objects.values_of(torch.Tensor):
        if isinstance(value, nn.Parameter) or storage_id(value) not in storages:
            continue
        for place, without in _removals(container, key):
            try:
                with _forgetting(runner, place, without):
                    run()
                    made: Any = container.find(key)
                    if not is_a(made, torch.Tensor) or made is value:
                        continue
                    if agrees():
                        return _cache(container.name(key), value, made)
            except Exception:
                continue
            finally:
                objects.restore()
    return None


@contextmanager
def _forgetting(
    runner: Runner[Any, Any], container: Container, without: dict[Any, Any]
) -> Iterator[None]:
    """Remove values from a container before each call of the forward."""

    def call(forward: Any, inputs: Any) -> Any:
        container.restore(without)
        return forward(inputs)

    with runner.step.wrapped(lambda forward: wrapped_forward(forward, call)):
        yield


def _cache(name: str, kept: torch.Tensor, made: torch.Tensor) -> ForwardCache:
    is_size = made.shape != kept.shape or torch.equal(made, kept)
    kind = FindingKind.METADATA_OF_ANOTHER_SIZE if is_size else FindingKind.LAZY_CACHE
    return ForwardCache(name, tensor_text(kept.dtype, kept.shape), kind)


def _removals(container: Container, key: Any) -> Iterator[tuple[Container, dict[Any, Any]]]:
    """Yield a container and its values without one: set to ``None``, deleted, or all deleted.

    Then those of the containers around it: a cache may be an object with several tensors.
    """
    values = container.read()
    if container.name(key).endswith("]"):
        yield container, {}
    else:
        yield container, values | {key: None}
        yield container, {name: value for name, value in values.items() if name != key}
    if container.parent is not None:
        parent, own_key = container.parent
        if not is_a(parent.get(own_key), nn.Module):
            yield from _removals(parent, own_key)


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
        text = self.first.text(self.runs)
        return text if self.cache is None else f"{text} {self.cache.text}"

    @property
    def place(self) -> str:
        """Module and line of the node, or empty strings."""
        origin = None if self.first is None else self.first.origin
        return ", ".join(filter(None, (origin.module, origin.source))) if origin else ""

    def facts(self, runner: Runner[Any, Any], size: int, weights: Weights) -> dict[str, Any]:
        """Return what ``Check.report`` takes to name the node and the cache."""
        facts: dict[str, Any] = {"names": () if self.cache is None else (self.cache.name,)}
        if self.first is not None:
            facts |= self.first.facts | {"node": _node(runner, size, self.first, weights)}
        return facts


def padding_cause(
    runs: EqualStateRuns, weights: Weights = None, kind: FindingKind | None = None
) -> Cause:
    """Return why the padded step differs from the unpadded one.

    Runs the forward several times. On several ranks, where only one of them may see the difference,
    nothing is run. ``kind`` is what other contents of pads have shown; ``None`` tries them.
    """
    runner = runs.runner
    if runner.group is not None:
        return Cause(kind or FindingKind.LEAKING_PAD_ROW)
    first = runs.first_node(weights)
    if kind is not None and kind.severity == "note":
        return Cause(kind, first)
    read = () if first is None else first.outside
    cache = cache_at_fault(runner, read, runs.padded, lambda: runs.padding_difference() is None)
    if cache is not None:
        return Cause(cache.kind, first, cache)
    if kind is None:
        is_branch = first is not None and first.only_in is not None
        kind = FindingKind.DEPENDENCE_ON_THE_BATCH_SIZE
        if not is_branch and _contents_matter(runs):
            kind = FindingKind.LEAKING_PAD_ROW
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
