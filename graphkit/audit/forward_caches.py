"""Tensors that a forward keeps from one call to the next, and that make padding change live rows.

A tensor is a cache if the forward makes it again when it is removed. It is at fault if runs with
and without pads agree if each of them creates the tensor again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.reachable_objects import ReachableObjects, walk_roots
from graphkit.audit.runs.teacher_forcing import wrapped_forward
from graphkit.graphs.operations import storage_id
from graphkit.records import tensor_text
from graphkit.runners import Runner
from graphkit.runners.known_memory import is_a


@dataclass(frozen=True, slots=True)
class ForwardCache:
    """A cache of a forward.

    Attributes:
        name: Where the forward keeps it, such as ``Model.mask``.
        kept: Its dtype and shape.
        kind: Whether it depends on the contents of a batch, or on its size alone.
    """

    name: str
    kept: str
    kind: FindingKind

    @property
    def text(self) -> str:
        """Sentence that names the cache and the call that made it."""
        made = (
            "from other rows" if self.kind is FindingKind.LAZY_CACHE else "for another batch size"
        )
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
