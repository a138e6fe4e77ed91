"""Part of a forward, or of a whole step, that each node belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from graphkit.records import GraphRecord
from graphkit.views.module_tree import node_phases, nodes_in_modules

_RUNNER_PARTS = {"(refresh)": "refresh", "(metadata)": "metadata"}
_MODEL_PARTS = {
    "norm": re.compile(r"norm|^ln_", re.IGNORECASE),  # first: post_attention_layernorm is a norm
    "attn": re.compile(r"attn|attention|mixer|mamba", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE),
    "embed": re.compile(r"embed|rotary|rope|^w[tp]e$", re.IGNORECASE),
    "head": re.compile(r"head|logits", re.IGNORECASE),
}


def node_parts(record: GraphRecord) -> dict[int, str]:
    """Return each node's part by its index: the phase, or else of the runner or of the model.

    The outermost module whose name says what it is decides on the part of a model, so that a norm
    inside attention counts as attention. Empty for nodes of no part.
    """
    pairs = zip(node_phases(record), nodes_in_modules(record), strict=True)
    return {node.index: phase or _part(names) for phase, (names, node) in pairs}


def common_part(parts: Iterable[str]) -> str:
    """Return the part that is equal for all nodes; empty for several."""
    distinct = set(parts)
    return distinct.pop() if len(distinct) == 1 else ""


def _part(names: Sequence[str]) -> str:
    for name in names:
        part = _RUNNER_PARTS.get(name) or _model_part(name)
        if part:
            return part
    return ""


@lru_cache(maxsize=1024)  # most nodes share the names of their modules
def _model_part(name: str) -> str:
    return next((part for part, pattern in _MODEL_PARTS.items() if pattern.search(name)), "")
