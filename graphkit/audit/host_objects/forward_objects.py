"""What runners ask about the objects that a forward can reach."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphkit.audit.host_objects.containers import Container
from graphkit.audit.host_objects.frozen_values import FrozenValues, HeldTensors
from graphkit.audit.host_objects.reachable_objects import SEARCH_DEPTH, ReachableObjects, walk_roots
from graphkit.errors import ConfigError
from graphkit.graphs import CapturedGraph
from graphkit.graphs.operations import has_storage
from graphkit.records import tensor_text
from graphkit.runners.known_memory import attribute_tensors, is_a

logger = logging.getLogger(__name__)
_POOL_DEPTH = 2
"""Attributes down to the tensors of an object of graphkit, such as a KV pool."""
_WRITING = frozenset(
    {
        "append", "appendleft", "extend", "insert", "clear", "update", "setdefault", "add",
        "__setitem__", "__setattr__",
    }
)  # fmt: skip
"""Methods of collections whose call reads nothing that was left."""
_SCOPES = FunctionType, ModuleType
"""Owners of variables; those of attributes are other objects."""


class ForwardObjects:
    """The objects that a forward, or each of several, can reach; see ``runners.capture_checks``."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._held: HeldTensors | None = None

    def check_weights(self, device: torch.device) -> None:
        """Check that the weights are on the device of the runner, and note them before a capture.

        Weights on several devices are left to the capture: the forward may not use all of them.
        """
        objects = ReachableObjects(walk_roots(self._forward))
        self._held = HeldTensors(objects)
        devices = dict.fromkeys(str(w.device) for _, _, w in objects.values_of(nn.Parameter))
        if devices and str(device) not in devices:
            raise ConfigError(
                f"the weights of the forward are on {', '.join(devices)}, the runner on {device}. "
                "Move the model there, or create the runner with "
                f'device="{next(iter(devices))}".',
                field="device",
            )

    def frozen_values(self, runner: Any) -> FrozenValues:
        """Note what the forward can read, for a runner that has just captured it."""
        if self._held is not None:
            self._held.keep_unchanged()
        return FrozenValues(runner, self._forward, self._held)

    def held_weights(self) -> nn.Module | None:
        """Return the module that the forward holds, or several by name; ``None`` without any."""
        held = self._modules()
        for module in held.values():
            training = next((inner for inner in module.modules() if inner.training), None)
            if training is not None:
                raise ConfigError(
                    f"{type(training).__name__} is in training mode, in which results may be "
                    "random and depend on the whole batch. Call its eval() first.",
                    field="fn",
                )
        if len(held) > 1:
            return nn.ModuleDict(held)
        return next(iter(held.values()), None)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield path and tensor of what the forward can reach, also in objects of graphkit."""
        for container, values in self._objects().entries:
            for key, value in values.items():
                name = container.name(key)
                if isinstance(value, torch.Tensor):
                    yield name, value
                elif type(value).__module__.partition(".")[0] == "graphkit":
                    for inner, tensor in attribute_tensors(value, _POOL_DEPTH):
                        yield f"{name}.{inner}", tensor

    def warn_of_side_outputs(self, label: str, graph: CapturedGraph) -> None:
        """Log a warning if the capture of a graph has left tensors in objects.

        A tensor that the code of the forward reads itself, as layers read a context, is not named:
        it may be for its own use alone. ``audit_target`` reports it as a note.
        """
        blocks = [(block.begin, block.end) for block in graph.pool_memory()]
        objects = self._objects()
        left = [
            f"`{container.name(key)}` ({tensor_text(tensor.dtype, tensor.shape)})"
            for container, key, tensor in objects.values_of(torch.Tensor)
            if has_storage(tensor)
            and any(begin <= tensor.data_ptr() < end for begin, end in blocks)
            and not reads(objects.functions, container, key)
        ]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            logger.warning(
                "%s: the forward leaves a tensor in %s%s. Replays run no Python, so that what it "
                "holds after them is of the capture. Return it in the output.",
                label,
                left[0],
                more,
            )

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules that the forward is, is bound to or reaches, outermost ones alone."""
        forward = self._forward
        owner: Any = forward if is_a(forward, nn.Module) else getattr(forward, "__self__", forward)
        if is_a(owner, nn.Module):
            return {type(owner).__name__: owner}
        held: dict[str, nn.Module] = {}
        inner: set[nn.Module] = set()
        for _, key, module in self._objects().values_of(nn.Module):
            if module not in inner:
                inner |= {*module.modules()}
                name = key if is_a(key, str) and "." not in key else type(module).__name__
                held[name if name not in held else f"{name}_{len(held)}"] = module
        return held

    def _objects(self) -> ReachableObjects:
        return ReachableObjects(walk_roots(self._forward), SEARCH_DEPTH)


def reads(functions: Sequence[FunctionType], container: Container, key: Any) -> bool:
    """Return whether code reads a value, or what holds it, apart from adding to it.

    A local variable with the name of an attribute is another value.

    Args:
        functions: The forward, then other functions; those without a source are not searched.
            Attributes of the forward's inputs, by the name of its parameter, do not count.
        container: What holds the value.
        key: Its key there.
    """
    while container.has_items and container.parent is not None:
        container, key = container.parent
    kinds = (ast.Attribute, ast.Name) if is_a(container.owner, _SCOPES) else (ast.Attribute,)
    inputs: set[str] = set()
    for function in functions:
        with suppress(OSError, TypeError, SyntaxError, ValueError):
            inputs = inputs or set(inspect.signature(function).parameters) - {"self"}
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            if _reads(tree, str(key), kinds, inputs):
                return True
    return False


def _reads(tree: ast.AST, word: str, kinds: tuple[type, ...], inputs: set[str]) -> bool:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        is_load = isinstance(getattr(node, "ctx", None), ast.Load)
        if not isinstance(node, kinds) or name != word or not is_load:
            continue
        base = getattr(node, "value", None)
        if isinstance(base, ast.Name) and base.id in inputs:
            continue
        if not _is_written(node, parents):
            return True
    return False


def _is_written(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether an expression is the target of a store, or of a call that adds to it."""
    parent = parents.get(node)
    while isinstance(parent, ast.Subscript) and parent.value is node:
        if not isinstance(parent.ctx, ast.Load):
            return True
        node, parent = parent, parents.get(parent)
    if isinstance(parent, ast.Attribute) and parent.value is node:
        return not isinstance(parent.ctx, ast.Load) or parent.attr in _WRITING
    return False
