"""Folders of the fast layout whose linear layers are quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights
from graphkit.models.heads.merged_linear import MergedLinear
from graphkit.models.quantization import QuantizedLinear, QuantizedWeight, StoredLayout
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.sharded.tensor_parallel import ShardedLlama


def fill_quantized(
    model: LlamaModel,
    stored: StoredWeights,
    layout: StoredLayout,
    device: torch.device | str,
    *,
    optional: frozenset[str],
) -> None:
    """Fill a model on the meta device from a folder with quantised layers.

    Layers of one input are merged, as others are. All or none of them must be quantised.

    Args:
        model: The model; its quantised layers are replaced.
        stored: The tensors of the folder.
        layout: Layout of the quantised ones.
        device: Device of the weights.
        optional: See ``StoredWeights.fill``.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape, or ranks split the
            model.
    """
    if isinstance(model, ShardedLlama):
        raise CheckpointError(
            f"the folder is quantised by {layout.method}, and ranks that split a model have their "
            "own layers, which are not quantised. Load it on one device."
        )
    layers = layout.layers(stored.forms)
    filled: dict[str, QuantizedLinear] = {}
    read: list[str] = []
    for path, parts in _linears(model):
        found = [part for part in parts if part in layers]
        if found and len(found) < len(parts):
            raise CheckpointError(
                f"{found[0]} is quantised, but not all of {', '.join(parts)}, which are one "
                "product here. Load the folder by gk.models."
            )
        if found:
            read += parts
            filled[path] = _read(stored, layout, layers, parts, device)
            sizes = [filled[path].out_features, filled[path].in_features]
            expected = list(model.get_submodule(path).get_parameter("weight").shape)
            if sizes != expected:
                raise CheckpointError(
                    f"{' and '.join(parts)} have the shape {sizes}, but config.json requires "
                    f"{expected}. Correct config.json."
                )
            model.set_submodule(path, nn.Identity())
    # Neither the scales of keys and values nor a quantised output head: they are refused.
    suffixes = ("bias", "input_scale", "activation_scale")
    names = {name for part in read for name in layers[part].values()}
    names |= {f"{part}.{suffix}" for part in read for suffix in suffixes}
    stored.fill(model, device, optional=optional, ignored=frozenset(names))
    for path, quantized in filled.items():
        model.set_submodule(path, quantized)


def _linears(model: LlamaModel) -> Iterator[tuple[str, list[str]]]:
    """Yield the linear layers of the decoder, and the names of their parts in the folder."""
    for path, module in list(model.model.named_modules(prefix="model")):
        owner = path.rpartition(".")[0]
        if isinstance(module, MergedLinear):
            yield path, [f"{owner}.{part}" for part in module.parts]
        elif isinstance(module, nn.Linear):
            yield path, [path]


def _read(
    stored: StoredWeights,
    layout: StoredLayout,
    layers: Mapping[str, Mapping[str, str]],
    parts: list[str],
    device: torch.device | str,
) -> QuantizedLinear:
    """Return the layer of the parts, side by side."""
    weights: list[QuantizedWeight] = []
    biases: list[torch.Tensor] = []
    for part in parts:
        by_name = dict(stored.read(layers[part].values()))
        tensors = {suffix: by_name[name].to(device) for suffix, name in layers[part].items()}
        weights.append(layout.weight(part, tensors))
        if f"{part}.bias" in stored.forms:
            biases += (bias.to(device) for _, bias in stored.read([f"{part}.bias"]))
    weight = weights[0] if len(weights) == 1 else QuantizedWeight.join(weights)
    return QuantizedLinear(weight, torch.cat(biases) if biases else None)
