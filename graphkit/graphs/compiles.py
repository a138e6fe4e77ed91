"""Triton kernels that are compiled while a program serves, as Triton reports them.

A kernel that meets a new shape is compiled at its launch, which takes up to seconds. Triton calls
``knobs.runtime.jit_post_compile_hook`` then; checked on 3.6 and 3.7. Kernels of torch.compile are
compiled without it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from graphkit.graphs.source_lines import caller_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compile:
    """A kernel that was compiled.

    Attributes:
        kernel: Its name.
        shape: Types of its arguments and values of its constants, by name.
        source: The line that launched it.
    """

    kernel: str
    shape: str
    source: str

    @property
    def text(self) -> str:
        """The compile, as a clause."""
        return f"`{self.kernel}` is compiled for {self.shape}"


class CompileWatch:
    """Notes compiles of Triton kernels between ``start`` and ``stop``, on all threads.

    A hook that the program has set is called, too.

    Args:
        on_compile: Called with each compile; ``None`` logs a warning.

    Attributes:
        compiles: The compiles so far.
    """

    def __init__(self, on_compile: Callable[[Compile], object] | None = None) -> None:
        self.compiles: list[Compile] = []
        self._on_compile = on_compile or _log

    def start(self) -> None:
        """Begin to watch, if Triton is imported."""
        if "triton" in sys.modules:
            _watches.add(self)
            _install_hook()

    def stop(self) -> None:
        """Stop watching."""
        _watches.discard(self)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Note a compile from what Triton passes to its hook."""
        kernel, compiled = facts["fn"], facts["compile"]
        names = getattr(kernel.jit_function, "arg_names", ())
        parts = [f"{name}: {kind}" for name, kind in compiled["signature"].items()]
        parts += [
            f"{names[place[0]]} = {value!r}"
            for place, value in compiled["constants"].items()
            if isinstance(place, tuple) and place[0] < len(names)
        ]
        shown = [part for part in parts if not part.endswith(": constexpr")]
        found = Compile(kernel.name, ", ".join(shown), caller_line())
        self.compiles.append(found)
        self._on_compile(found)


_watches: WeakSet[CompileWatch] = WeakSet()
"""Watches that have started. One hook serves them all."""
_hook: Callable[..., Any] | None = None
"""The hook that notes compiles. It stays, since a program may set its own around it."""


def _install_hook() -> None:
    """Let Triton report each compile to the watches, unless it does."""
    global _hook
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook
    if before is not None and before is _hook:
        return

    def hook(**facts: Any) -> Any:
        for watch in [*_watches] if hook is _hook else ():  # one that was replaced notes nothing
            with suppress(Exception):  # another version of Triton may pass other facts
                watch.note(facts)
        return None if before is None else before(**facts)

    _hook = knobs.runtime.jit_post_compile_hook = hook


def _log(found: Compile) -> None:
    logger.warning("%s while serving, at %s", found.text, found.source or "an unknown line")
