"""Names of kernels, demangled and shortened.

``torch._C._demangle`` is a private name of torch, checked on 2.11 and 2.13.
"""

from __future__ import annotations

import re
from functools import cache

import torch

_FUNCTOR = re.compile(r"(\w*?)(?:Functor|_functor|Ops)(?:OnSelf)?(_\w+)?<")
_LAUNCHER = re.compile(
    r"(\w+?)(?:_kernel(?:_cuda|_impl|_opmath)*|(?:CUDA)?Kernel(?:CUDA)?(?:Impl)?)(?:<[^()<>]*>)?\("
)
_WRAPPERS = ("Binary", "AUnary", "BUnary", "CUDA", "gpu", "Reduce")
"""Functors of torch that wrap the one of the operation."""
_GENERIC = re.compile(r"elementwise|reduce_kernel|index_kernel|gpu_kernel|unrolled")
"""Kernels that torch uses for many operations; a template argument names the operation."""


@cache
def demangled(name: str) -> str:
    """Return a symbol as in its source; other names unchanged."""
    return str(torch._C._demangle(name)) if name.startswith("_Z") else name


@cache
def short_name(name: str) -> str:
    """Return a demangled name without return type, namespaces, templates and arguments.

    A generic kernel of torch keeps its operation: ``vectorized_elementwise_kernel[silu]``.
    """
    plain = name.replace("(anonymous namespace)::", "").replace("{lambda(", "{lambda ")
    base = _without_templates(plain).split("(")[0].split(" ")[-1].split("::")[-1]
    operation = _operation(plain) if _GENERIC.search(base) else ""
    return f"{base}[{operation}]" if operation else base or name


def _without_templates(name: str) -> str:
    kept, depth = [], 0
    for letter in name.replace("operator<", "operator").replace("->", ""):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            kept.append(letter)
    return "".join(kept)


def _operation(name: str) -> str:
    """Return the operation that a generic kernel's template arguments name, or nothing."""
    inside = name[name.find("<") :]
    launchers = [names for names in _LAUNCHER.findall(inside) if names not in _WRAPPERS]
    functors = [after.strip("_") or before for before, after in _FUNCTOR.findall(inside)]
    names = launchers + [functor for functor in functors if functor not in _WRAPPERS]
    return names[0] if names else ""
