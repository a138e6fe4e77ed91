"""Weights that the code of a model reads itself, which therefore cannot be quantised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.models.folder import abbreviate
from graphkit.models.quantization.linear import QuantizedLinear, keep_hooks

logger = logging.getLogger(__name__)
_TOKENS = 4


def dequantize_read_weights(model: PreTrainedModel) -> None:
    """Replace quantised layers whose weight the model reads by ``nn.Linear``, in place.

    Models convert rows to the dtype of a weight, or multiply with it by other means than the layer.
    Forwards over a few tokens show which layers those are. Layers of one name in modules of one
    class are replaced together. Logs their names at INFO.
    """
    replaced: list[str] = []
    while names := _read_in_forward(model):
        replaced += names
        for name in names:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantizedLinear), "the others are not watched"
            weight = layer.quantized.dequantized(model.dtype)
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias  # type: ignore[assignment]
            keep_hooks(layer, plain)
            model.set_submodule(name, plain.train(layer.training))
    if replaced:
        logger.info(
            "%s are held in %s, because %s reads their weights outside of the layers.",
            abbreviate(replaced), model.dtype, type(model).__name__,
        )  # fmt: skip


def _read_in_forward(model: PreTrainedModel) -> list[str]:
    """Return the quantised layers whose weight a forward reads, and those like them."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    if not layers:
        return []
    tokens = torch.ones(1, _TOKENS, dtype=torch.long, device=model.device)
    with _watched(layers.values()) as read, torch.no_grad(), suppress(Exception):
        model(input_ids=tokens)  # raises where it multiplies with the numbers of a weight
    kinds = {_kind(model, name) for name, layer in layers.items() if layer in read}
    return [name for name in layers if _kind(model, name) in kinds]


def _kind(model: nn.Module, name: str) -> tuple[type, str]:
    owner, _, leaf = name.rpartition(".")
    return type(model.get_submodule(owner)), leaf


class _Watched(QuantizedLinear):
    """A quantised layer that notes in ``read`` when others than itself get its weight."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        vars(self)["is_running"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            vars(self)["is_running"] = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not vars(self).get("is_running"):
            vars(self)["read"].add(self)
        return super().__getattr__(name)


@contextmanager
def _watched(layers: Any) -> Iterator[set[nn.Module]]:
    read = set[nn.Module]()
    for layer in layers:
        layer.__class__ = _Watched
        vars(layer)["read"] = read
    try:
        yield read
    finally:
        for layer in layers:
            layer.__class__ = QuantizedLinear
            for name in ("read", "is_running"):
                vars(layer).pop(name, None)
