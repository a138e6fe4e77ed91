"""Part of a forward, or of a whole step, that each node belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from graphkit.records import GraphRecord
from graphkit.views.module_tree import nodes_in_modules
from graphkit.views.phases import PHASES, phases_of

_OF_RUNNER = {"(refresh)": "refresh", "(metadata)": "metadata"}
_OF_MODEL = {
    "norm": re.compile(r"norm|^ln_", re.IGNORECASE),  # first: post_attention_layernorm is a norm
    "attn": re.compile(r"attn|attention|mixer|mamba", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE),
    "embed": re.compile(r"embed|rotary|rope|^w[tp]e$", re.IGNORECASE),
    "head": re.compile(r"head|logits", re.IGNORECASE),
}
PARTS = (*_OF_RUNNER.values(), *PHASES, *_OF_MODEL)
"""Names of all parts: of the runner, of a whole step, and of a model."""


def parts_of(record: GraphRecord) -> dict[int, str]:
    """Return each node's part by its index: the phase, or else of the runner or of the model.

    The outermost module whose name says what it is decides on the part of a model, so that a norm
    inside attention counts as attention. Empty for nodes of no part.
    """
    pairs = zip(phases_of(record), nodes_in_modules(record), strict=True)
    return {node.index: phase or _part(names) for phase, (names, node) in pairs}


def common_part(parts: Iterable[str]) -> str:
    """Return the part that is equal for all nodes; empty for several."""
    found = set(parts)
    return found.pop() if len(found) == 1 else ""


def _part(names: Sequence[str]) -> str:
    for name in names:
        part = _OF_RUNNER.get(name) or _of_model(name)
        if part:
            return part
    return ""


@lru_cache(maxsize=1024)  # most nodes share the names of their modules
def _of_model(name: str) -> str:
    return next((part for part, pattern in _OF_MODEL.items() if pattern.search(name)), "")
