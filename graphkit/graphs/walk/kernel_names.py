"""NamedTensors of kernels: demangled, and short enough to read."""

from __future__ import annotations

import re
from functools import cache

import torch

_FUNCTOR = re.compile(r"(\w*?)(?:Functor|_functor|Ops)(?:OnSelf)?(_\w+)?<")
_MAKER = re.compile(
    r"(\w+?)(?:_kernel(?:_cuda|_impl|_opmath)*|(?:CUDA)?Kernel(?:CUDA)?(?:Impl)?)(?:<[^()<>]*>)?\("
)
_WRAPPERS = ("Binary", "AUnary", "BUnary", "CUDA", "gpu", "Reduce")
"""Say how something is done, not what."""
_VAGUE = re.compile(r"elementwise|reduce_kernel|index_kernel|gpu_kernel|unrolled")
"""Kernels that torch uses for many operations: what they do stands in their template."""


@cache
def demangled(name: str) -> str:
    """A symbol as its source spells it."""
    return str(torch._C._demangle(name)) if name.startswith("_Z") else name


@cache
def short_name(name: str) -> str:
    """A demangled name without return type, namespaces, templates and arguments.

    What a kernel of many uses does is kept: ``vectorized_elementwise_kernel[silu]``.
    """
    plain = name.replace("(anonymous namespace)::", "").replace("{lambda(", "{lambda ")
    base = _without_templates(plain).split("(")[0].split(" ")[-1].split("::")[-1]
    does = _what_it_does(plain) if _VAGUE.search(base) else ""
    return f"{base}[{does}]" if does else base or name


def _without_templates(name: str) -> str:
    kept, depth = [], 0
    for letter in name.replace("operator<", "operator").replace("->", ""):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            kept.append(letter)
    return "".join(kept)


def _what_it_does(name: str) -> str:
    inside = name[name.find("<") :]
    makers = [found for found in _MAKER.findall(inside) if found not in _WRAPPERS]
    functors = [after.strip("_") or before for before, after in _FUNCTOR.findall(inside)]
    found = makers + [each for each in functors if each not in _WRAPPERS]
    return found[0] if found else ""
