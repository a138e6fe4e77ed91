"""Origin of each node of a graph: module, operation, line and scope, recorded during its capture.

The number of nodes is read before and after every operation and at both ends of every module's
forward. Nodes that appeared in between belong to the code that ran in between. (The idea is from
ggml-org/llama.cpp#6766; newer CUDA drivers can annotate nodes themselves.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from threading import get_ident
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.graphs.capture_state import DISPATCH_MODES
from graphkit.graphs.host_memory import fill_stack
from graphkit.graphs.operations import Operand, OpOverload, operands_in
from graphkit.graphs.pool_memory import Allocation, new_allocations
from graphkit.graphs.source_lines import ModuleNames, node_line


class Stage(StrEnum):
    """Stages of a runner's step. Records show them in the place of a module's path."""

    REFRESH = "(refresh)"
    METADATA = "(metadata)"
    STEP = "(step)"
    """The mode's own operations around the forward."""
    FORWARD = "(forward)"
    """The user's forward, outside of its modules."""


_active: list[Attribution] = []
_COMPILED_UNDER_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""A warning of torch when a compiled module runs under the hooks of an attribution."""


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """The code that created a node. Empty strings where it is unknown.

    Attributes:
        module: Path of the innermost module that ran, such as ``layers.0.mlp``, or a ``Stage``.
        op: The operation, such as ``aten::mm``.
        source: The user's line, as ``folder/file.py:12 in forward``.
        scope: Names of the ``graphkit.scope`` blocks around it, joined by ``/``.
        operands: Address and bytes of the tensors among the operation's arguments and results.
    """

    module: str = ""
    op: str = ""
    source: str = ""
    scope: str = ""
    operands: tuple[Operand, ...] = ()


class Attribution:
    """Records the origin of each node while a graph is captured.

    Pass it to a runner's ``capture``. For a capture of your own, enter it as a context manager
    after ``CUDAGraph.capture_begin``, on the capturing stream, and leave it before
    ``capture_end``; then pass it to ``inspect_graph``. It may serve several captures, one after the
    other; each starts with empty ``origins``.

    Only one thread attributes at a time: a capture that another thread begins meanwhile has no
    origins. Costs about 50 us of host time per node during the capture
    (``tools/bench/sight.py``) and nothing at replay. On CUDA it needs cuda-bindings
    (``cudaStreamGetCaptureInfo``, ``cudaGraphGetNodes``); without them there are no origins.

    Args:
        modules: The model, or its weights by name, to give modules their paths. Modules outside of
            it are named below the class of the outermost one that runs.
        stack_fill: Value of the argument bytes that torch leaves unset; see ``fill_stack``.
        observe: Called before each operation with the operation, its arguments, and the index of
            its first node.

    Attributes:
        origins: Origin of each node of the last capture, in order of creation.
        allocations: Memory that operations of the last capture allocated, in order. Memory that
            kernels and compiled functions allocate without an operation is missing.
    """

    def __init__(
        self,
        modules: nn.Module | Mapping[str, torch.Tensor] | None = None,
        *,
        stack_fill: int = 0,
        observe: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any], int], None]
        | None = None,
    ) -> None:
        self.observe = observe
        self.origins: list[NodeOrigin] = []
        self.allocations: list[Allocation] = []
        self._stack_fill = stack_fill
        self._names = ModuleNames(modules)
        self._modules: list[str] = []
        self._scopes: list[str] = []
        self._count = _zero
        self._thread = 0
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        from graphkit.graphs.driver import captured_node_counter

        self._exits.enter_context(self.attributing(captured_node_counter()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._exits.close()

    @contextmanager
    def attributing(self, count: Callable[[], int]) -> Iterator[None]:
        """Record the origins of nodes for a block; ``count`` returns their number so far."""
        self._reset(count)
        if not DISPATCH_MODES.acquire(blocking=False):
            yield
            return
        _active.append(self)
        try:
            with self._module_hooks(), _OperationMode(self):
                yield
                self.add_new_nodes()
        finally:
            _active.remove(self)
            self._count = _zero  # the counter may reference captured tensors
            DISPATCH_MODES.release()

    @contextmanager
    def _module_hooks(self) -> Iterator[None]:
        hooks = (
            register_module_forward_pre_hook(lambda module, _args: self._enter(module)),
            register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True),
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _COMPILED_UNDER_HOOKS)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def applies_here(self) -> bool:
        """Return whether the running code is being captured.

        False in other threads, where torch calls the hooks as well, and while torch.compile traces:
        it splits a model at a hook that has effects.
        """
        return not torch.compiler.is_compiling() and get_ident() == self._thread

    def add_new_nodes(self, op: str = "", values: tuple[Any, ...] = ()) -> None:
        """Record ``op``, empty between operations, as the origin of nodes since the last call."""
        new = self._count() - len(self.origins)
        if new > 0:
            module = self._modules[-1] if self._modules else ""
            is_graphkit = isinstance(module, Stage) and module is not Stage.FORWARD
            line = "" if is_graphkit else node_line()
            operands = tuple(operands_in(values))
            origin = NodeOrigin(module, op, line, "/".join(self._scopes), operands)
            self.origins += [origin] * new

    def add_allocations(self, func: OpOverload, out: Any, node: int) -> None:
        """Record the memory that an operation allocated, after so many nodes."""
        self.allocations += new_allocations(func, out, self._line_of_results, node)

    def _line_of_results(self, is_initialised: bool) -> str:
        """Return the line of an operation that has just run, from its nodes if it has some."""
        if not is_initialised:
            return node_line()
        return self.origins[-1].source if self.origins else ""

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """Record a scope for a block, or a runner's stage; see ``scope``."""
        stack = self._modules if isinstance(name, Stage) else self._scopes
        self.add_new_nodes()
        stack.append(name)
        try:
            yield
        finally:
            self.add_new_nodes()
            stack.pop()

    def _reset(self, count: Callable[[], int]) -> None:
        """Forget the previous capture, which may have failed inside of modules."""
        self._count, self._thread = count, get_ident()
        self.origins, self.allocations, self._modules, self._scopes = [], [], [], []
        self._names.reset()

    def _enter(self, module: nn.Module) -> None:
        if self.applies_here():
            self.add_new_nodes()
            self._modules.append(self._names.enter(module))

    def _leave(self, module: nn.Module) -> None:
        if self.applies_here():
            self.add_new_nodes()
            if self._names.leave(module):  # False if the capture began within its forward
                self._modules.pop()


def _zero() -> int:
    return 0


def attributing(
    attribution: Attribution | None, count: Callable[[], int]
) -> AbstractContextManager[None]:
    """Return ``Attribution.attributing``, or a context that does nothing without attribution."""
    return nullcontext() if attribution is None else attribution.attributing(count)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a block of a forward, such as ``sampler``, in the records of its graph.

    Scopes nest: nodes of ``inner`` in ``outer`` have the scope ``outer/inner``. Does nothing unless
    the forward is captured with ``Attribution``, and nothing in functions that torch.compile
    compiles.

    Args:
        name: Shown as ``scope`` of the block's nodes.
    """
    if torch.compiler.is_compiling():  # a guard on _active would cause recompilation
        yield
        return
    with ExitStack() as scopes:
        for attribution in _active:  # several if a recorded program attributes as well
            if attribution.applies_here():
                scopes.enter_context(attribution.scoped(name))
        yield


class _OperationMode(TorchDispatchMode):
    """Records the origin of every operation's nodes."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attribution = attribution

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled under this mode; by default torch runs it eagerly.

        https://github.com/pytorch/pytorch/pull/161648
        """
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._attribution.add_new_nodes()
        num_nodes = len(self._attribution.origins)
        if self._attribution.observe is not None:
            self._attribution.observe(func, args, kwargs or {}, num_nodes)
        fill_stack(self._attribution._stack_fill)
        out = func(*args, **(kwargs or {}))
        self._attribution.add_new_nodes(func.name(), (args, kwargs, out))
        self._attribution.add_allocations(func, out, num_nodes)
        return out
