"""The replay-equivalence kit: tests that replays agree with the model without graphs.

``assert_replay_equivalent`` for your own tests, ``check_wrapper`` for the wrapper of a model,
``attention_conformance`` for attention backends, hypothesis strategies for batches, and a pytest
plugin: the fixture ``replay_equivalence``, and ``pytest --graphkit package.module:attribute``.
Names load on first use, because pytest imports this package in every run.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
