"""What made each node of a graph: module, operation, line and scope, noted while it is captured.

The number of nodes is asked for before and after every operation and at both ends of every module's
forward; nodes that came in between belong to what ran in between. (The idea is that of a llama.cpp
maintainer, ggml-org/llama.cpp#6766; newer CUDA drivers annotate nodes themselves.)
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

from graphkit.graphs.driver import capturing_counter
from graphkit.graphs.host_memory import fill_stack
from graphkit.graphs.modes import MODES
from graphkit.graphs.module_names import ModuleNames
from graphkit.graphs.places import caller_line


class Stage(StrEnum):
    """Parts of a runner's step. Each stands in a record where a module's path would."""

    REFRESH = "(refresh)"
    METADATA = "(metadata)"
    STEP = "(step)"
    """What the mode does around the forward."""
    FORWARD = "(forward)"
    """The user's forward, as far as it runs outside of modules."""


_active: list[Attribution] = []
_COMPILED_UNDER_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""What torch warns of when a compiled module runs: our hooks, which are gone after the capture."""


@dataclass(frozen=True, slots=True)
class Place:
    """What made a node; see the fields of the same names in ``graphkit.records.Node``."""

    module: str = ""
    op: str = ""
    source: str = ""
    scope: str = ""


class Attribution:
    """Notes what makes each node while a graph is captured.

    A context manager, entered after ``capture_begin`` on the capturing stream and left before
    ``capture_end``; a runner does so itself. One thread attributes at a time: captures of others
    meanwhile have no places. Costs some 50 us of host time per node during the capture
    (``tools/bench/sight.py``), nothing at replay.

    Args:
        modules: The model, or its weights by name; modules then have their paths in it. Others are
            named by the class of the outermost one that ran.

        unset: The byte that argument bytes hold which torch leaves unset, see ``host_memory``.

    Attributes:
        places: What made each node, in order of creation.
    """

    def __init__(
        self, modules: nn.Module | Mapping[str, torch.Tensor] | None = None, *, unset: int = 0
    ) -> None:
        self.places: list[Place] = []
        self._unset = unset
        self._names = ModuleNames(modules)
        self._modules: list[str] = []
        self._scopes: list[str] = []
        self._count = _none
        self._thread = 0
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        self._exits.enter_context(self.noting(capturing_counter()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._exits.close()

    @contextmanager
    def noting(self, count: Callable[[], int]) -> Iterator[None]:
        """Note what makes nodes, while ``count()`` says how many there are."""
        self._begin_anew(count)
        if not MODES.acquire(blocking=False):
            yield
            return
        _active.append(self)
        try:
            with self._hooked(), _Operations(self):
                yield
                self.note()
        finally:
            _active.remove(self)
            self._count = _none  # may hold what was captured
            MODES.release()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Hear of every module that runs."""
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

    def is_here(self) -> bool:
        """Whether what runs now is what is being captured: no other thread's, and no compiler's.

        Hooks run in every thread; and torch.compile follows them wherever it finds them, but splits
        a model where one does more than nothing.
        """
        return not torch.compiler.is_compiling() and get_ident() == self._thread

    def note(self, op: str = "") -> None:
        """Say that ``op`` made the nodes that are new since the last call."""
        new = self._count() - len(self.places)
        if new > 0:
            module = self._modules[-1] if self._modules else ""
            is_ours = isinstance(module, Stage) and module is not Stage.FORWARD
            line = "" if is_ours else caller_line()
            self.places += [Place(module, op, line, "/".join(self._scopes))] * new

    @contextmanager
    def scoped(self, name: str) -> Iterator[None]:
        """See ``scope``; a stage of a runner stands where a module would."""
        stack = self._modules if isinstance(name, Stage) else self._scopes
        self.note()
        stack.append(name)
        try:
            yield
        finally:
            self.note()
            stack.pop()

    def _begin_anew(self, count: Callable[[], int]) -> None:
        """Forget the capture before, which may have been cut off inside of modules."""
        self._count, self._thread = count, get_ident()
        self.places, self._modules, self._scopes = [], [], []
        self._names.start_over()

    def _enter(self, module: nn.Module) -> None:
        if self.is_here():
            self.note()
            self._modules.append(self._names.enter(module))

    def _leave(self, module: nn.Module) -> None:
        if self.is_here():
            self.note()
            if self._names.leave(module):  # else the capture began within its forward
                self._modules.pop()


def _none() -> int:
    return 0


def noting(
    attribution: Attribution | None, count: Callable[[], int]
) -> AbstractContextManager[None]:
    """See ``Attribution.noting``; nothing is noted without one."""
    return nullcontext() if attribution is None else attribution.noting(count)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Mark what a block of a forward does, such as ``sampler``; the graph's record then says so.

    May be nested. Does nothing unless the forward is being captured with attribution, and nothing
    inside of what torch.compile made of it.
    """
    if torch.compiler.is_compiling():  # else it would compile anew once there is an attribution
        yield
        return
    with ExitStack() as scopes:
        for attribution in _active:  # a recorded program may itself attribute
            if attribution.is_here():
                scopes.enter_context(attribution.scoped(name))
        yield


class _Operations(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attribution = attribution

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code stays compiled under this mode; else torch would run it eagerly."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._attribution.note()
        fill_stack(self._attribution._unset)
        out = func(*args, **(kwargs or {}))
        self._attribution.note(func.name())
        return out
