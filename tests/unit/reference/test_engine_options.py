"""Functions that create an engine take and show the options of ``SpeculativeEngine``."""

from __future__ import annotations

import inspect

import pytest

from graphkit.engine import EngineOptions, SpeculativeEngine
from graphkit.models.reference import reference_engine
from graphkit.models.sharded import engine_of

OWN = {"target", "drafter", "spec", "sizes", "device", "group"}
"""Arguments that such a function replaces by its own."""


@pytest.mark.parametrize("function", [reference_engine, engine_of])
def test_a_signature_lists_every_option_with_its_default(function):
    known = inspect.signature(SpeculativeEngine).parameters
    shown = inspect.signature(function).parameters
    assert EngineOptions.__annotations__.keys() == known.keys() - OWN
    for name in EngineOptions.__annotations__:
        assert shown[name].default == known[name].default
    assert not [option for option in shown.values() if option.kind is option.VAR_KEYWORD]


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        reference_engine("NONE", device="cpu", steps=4)
