"""Public names of a package that load on first use, listed once, in the package's stub.

``__init__.pyi`` beside the package imports each name from its module (``from graphkit.spec import
SpecConfig as SpecConfig``). Type checkers read it as the package, and ``lazy_names`` reads it in
order to find the module of a name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Name of the package, its ``__name__``.
        file: Its ``__file__``; the stub has the same name with the suffix ``.pyi``. Packages that
            it imports from the package itself are not among the names.
    """
    modules = {name: module for name, module in stub_names(file).items() if module != package}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        # Later accesses find the name without a call. A module may have been imported meanwhile
        # that has the same name: the import set it as an attribute of the package.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, names, [*modules]


def stub_names(file: str) -> dict[str, str]:
    """Return the module of each name that the stub of a package imports, in the stub's order."""
    stub = Path(file).with_suffix(".pyi")
    return {
        alias.name: str(node.module)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
