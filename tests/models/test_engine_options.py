"""The engine of a model takes and shows the options of ``SpeculativeEngine``."""

from __future__ import annotations

import inspect

from graphkit.engine import EngineOptions, SpeculativeEngine
from graphkit.models import TransformersModel

OWN = {"target", "drafter", "spec", "sizes", "device", "group"}
"""Arguments that the function replaces by its own."""


def test_a_signature_lists_every_option_with_its_default():
    known = inspect.signature(SpeculativeEngine).parameters
    shown = inspect.signature(TransformersModel.engine).parameters
    assert EngineOptions.__annotations__.keys() == known.keys() - OWN
    for name in EngineOptions.__annotations__:
        assert shown[name].default == known[name].default
    assert not [option for option in shown.values() if option.kind is option.VAR_KEYWORD]
