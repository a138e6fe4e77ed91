"""``gk.capture`` finds the modules that a function calls, wherever Python holds them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import graphkit as gk

LAYER = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)


class Slotted:
    """Holds a module in a slot."""

    __slots__ = ("layers",)

    def __init__(self, layer):
        self.layers = {"first": [layer]}

    def __call__(self, x):
        return self.layers["first"][0](x)


class Pipeline:
    """Holds modules, and is none."""

    def __init__(self, layer):
        self.layer, self.norm = layer, nn.LayerNorm(4).eval()

    def run(self, x):
        return self.norm(self.layer(x))


def call_a_global(x):
    return LAYER(x)


def holders(layer):
    return {
        "module": layer,
        "method": layer.forward,
        "object": Pipeline(layer).run,
        "bound": partial(partial(lambda model, x: model(x), layer)),
        "keyword": partial(lambda x, model: model(x), model=layer),
        "closure": lambda x: layer(x),
        "global": call_a_global,
        "list": lambda x, layers=[layer]: layers[0](x),
        "slots": Slotted(layer),
        "partial of a dict": partial(lambda layers, x: layers["a"][0](x), {"a": (layer,)}),
    }


@pytest.mark.parametrize("holder", holders(LAYER))
def test_a_module_in_training_mode_is_refused(holder):
    with pytest.raises(gk.ConfigError, match="TransformerEncoderLayer is in training mode"):
        gk.capture(holders(LAYER)[holder], torch.zeros(2, 3, 4), batch_sizes=[2])


@pytest.mark.parametrize("holder", holders(LAYER))
def test_weights_are_named_without_a_declaration(capture, monkeypatch, holder):
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True).eval()
    monkeypatch.setitem(globals(), "LAYER", layer)
    captured = capture(holders(layer)[holder], torch.randn(2, 3, 4))
    names = {p.name for n in captured.inspect(4).nodes for a in n.arguments for p in a.pointers}
    assert any(str(name).endswith("self_attn.in_proj_weight") for name in names), names
