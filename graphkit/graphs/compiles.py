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
        self._is_on = self._is_installed = False

    def start(self) -> None:
        """Begin to watch, if Triton is imported."""
        self._is_on = True
        if self._is_installed or "triton" not in sys.modules:
            return
        from triton import knobs

        before, self._is_installed = knobs.runtime.jit_post_compile_hook, True

        def hook(**facts: Any) -> Any:
            if self._is_on:
                with suppress(Exception):  # another version of Triton may pass other facts
                    self._note(facts)
            return None if before is None else before(**facts)

        knobs.runtime.jit_post_compile_hook = hook

    def stop(self) -> None:
        """Stop to watch. The hook stays, because others may have been set after it."""
        self._is_on = False

    def _note(self, facts: Mapping[str, Any]) -> None:
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


def _log(found: Compile) -> None:
    logger.warning("%s while serving, at %s", found.text, found.source or "an unknown line")
