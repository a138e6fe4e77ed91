"""The replay-equivalence kit: tests that replays agree with the model without graphs.

``assert_replay_equivalent`` for your own tests, ``check_wrapper`` for the wrapper of a model,
``attention_conformance`` for attention backends, hypothesis strategies for batches, and a pytest
plugin: the fixture ``replay_equivalence``, and ``pytest --graphkit package.module:attribute``.
Names load on first use, because pytest imports this package in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkit.audit.kit.conformance import attention_conformance
    from graphkit.audit.kit.equivalence import assert_replay_equivalent, assert_target_equivalent
    from graphkit.audit.kit.strategies import batches, target_batches
    from graphkit.models.wrapper.assertion import check_wrapper

_MODULES = {
    "assert_replay_equivalent": "audit.kit.equivalence",
    "assert_target_equivalent": "audit.kit.equivalence",
    "attention_conformance": "audit.kit.conformance",
    "batches": "audit.kit.strategies",
    "check_wrapper": "models.wrapper.assertion",
    "target_batches": "audit.kit.strategies",
}

__all__ = [
    "assert_replay_equivalent",
    "assert_target_equivalent",
    "attention_conformance",
    "batches",
    "check_wrapper",
    "target_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'graphkit.testing' has no attribute {name!r}")
    return getattr(import_module(f"graphkit.{_MODULES[name]}"), name)
