"""Runs in every Python of a recorded program before its code; see ``graphkit.audit.foreign``.

It also runs in Pythons without graphkit or torch. It therefore uses the standard library alone,
imports next to nothing, and removes its folder from the program's ``sys.path``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would slow down the start of every Python
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_FOLDER = os.path.dirname(__file__)  # noqa: PTH120 - importing pathlib costs start-up time
_GRAPHS_MODULE = "torch.cuda.graphs"


class _TorchFinder:
    """Finds ``torch.cuda.graphs`` through the other finders and has it hooked once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _GRAPHS_MODULE:
            return None
        sys.meta_path.remove(self)
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(
            filter(None, (finder.find_spec(name, path, target) for finder in finders)), None
        )
        if spec is not None:
            _call_safely(_hook_after_loading, spec)
        return spec


def _hook_after_loading(spec: ModuleSpec) -> None:
    loader = spec.loader
    assert loader is not None
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        _call_safely(_hook_into, module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _hook_into(module: ModuleType) -> None:
    """Call the hooks of the graphkit that records, which the program may be unable to import."""
    # The folder around graphkit, last, so that the program imports all else from its own folders.
    root = os.path.abspath(os.path.join(_FOLDER, *[os.pardir] * 3))  # noqa: PTH100, PTH118
    sys.path.append(root)
    try:
        from graphkit.audit.foreign.following import hook_into
    finally:
        sys.path.remove(root)
    hook_into(module.CUDAGraph)


def _call_safely(hook: Callable[..., object], *args: object) -> None:
    """Call a hook; if it fails, the program runs on without being recorded."""
    try:
        hook(*args)
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write(f"graphkit record: process {os.getpid()} is not recorded: {error}\n")


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that Python would have run without this one; its errors are raised."""
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


def _start() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    if _GRAPHS_MODULE in sys.modules:
        _call_safely(_hook_into, sys.modules[_GRAPHS_MODULE])
    else:
        sys.meta_path.insert(0, _TorchFinder())
    _run_hidden_sitecustomize()


if __name__ == "sitecustomize":  # not when imported under its full name
    _start()
