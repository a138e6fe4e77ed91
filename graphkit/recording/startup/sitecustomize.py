"""Python runs this before any code of a recorded program; see ``graphkit.recording``.

Any Python that the program starts runs it, also one without graphkit or torch. So it needs the
standard library alone, imports next to nothing, and takes itself out of the program's sight.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost every Python that starts
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(__file__)  # noqa: PTH120 - the same for pathlib
_WATCHED = "torch.cuda.graphs"


class _Watch:
    """Finds one module as if this finder were not there, and hooks into it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        able = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in able)), None)
        if spec is not None:
            _or_say_why_not(_call_after_loading, spec)
        return spec


def _call_after_loading(spec: ModuleSpec) -> None:
    loader = spec.loader
    assert loader is not None
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        _or_say_why_not(_hook_into, module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _hook_into(module: ModuleType) -> None:
    """By the graphkit that records, which the program need not be able to import."""
    root = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3))  # noqa: PTH100, PTH118
    sys.path.append(root)
    try:
        from graphkit.recording.hooks import hook_into
    finally:
        sys.path.remove(root)
    hook_into(module.CUDAGraph)


def _or_say_why_not(act: Callable[..., object], *given: object) -> None:
    """A program goes on also where it cannot be recorded."""
    try:
        act(*given)
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write(f"graphkit record: process {os.getpid()} is not recorded: {error}\n")


def _run_the_hidden_one() -> None:
    """Another sitecustomize that this one hides on the path; its errors are its own."""
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


def _start() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    if _WATCHED in sys.modules:
        _or_say_why_not(_hook_into, sys.modules[_WATCHED])
    else:
        sys.meta_path.insert(0, _Watch())
    _run_the_hidden_one()


if __name__ == "sitecustomize":  # else somebody only looks at it
    _start()
