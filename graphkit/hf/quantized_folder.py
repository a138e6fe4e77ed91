"""Models of transformers whose folders have quantised layers that graphkit reads itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from graphkit.errors import CheckpointError
from graphkit.hf.folder_errors import one_line
from graphkit.hf.layout import output_head
from graphkit.quantization import QuantizedLinear, StoredLayout
from graphkit.reference.checkpoint_folder import StoredWeights


def load_quantized(
    folder: Path,
    layout: StoredLayout,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a model whose quantised layers become ``QuantizedLinear``.

    The model is created without memory for its weights, which are read a layer at a time. A
    quantised output head is stored in the dtype of the model.

    Args:
        folder: The folder.
        layout: Layout of its quantised layers.
        dtype: Data type of the other weights; ``None`` selects the one of the folder.
        device: Where the weights go.
        trust_remote_code: As for ``load``.

    Raises:
        CheckpointError: transformers cannot create the model, or tensors are missing or do not fit
            its layers.
    """
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        del config.quantization_config
        with _parameters_on_meta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype or config.dtype or torch.bfloat16,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise CheckpointError(
            f"transformers creates no model for it: {one_line(error)}."
        ) from error
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    stored = StoredWeights(folder)
    layers = layout.layers(stored.forms)
    if not layers:
        raise CheckpointError(f"no tensor of the folder is quantised by {layout.method}.")
    for path, names in layers.items():
        tensors = _read(stored, names.values(), device)
        suffixes = {suffix: tensors[name] for suffix, name in names.items()}
        _fill_quantized(model, path, layout, suffixes)
    _fill_others(model, stored, device)
    nn.Module.eval(model)
    return model


def _fill_quantized(
    model: PreTrainedModel, path: str, layout: StoredLayout, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replace a linear layer of a model by a quantised one, whose bias is filled later."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return  # such as MTP layers, which transformers leaves out, too
    if not isinstance(layer, nn.Linear):
        raise CheckpointError(
            f"{path} is quantised, but {type(model).__name__} has no torch.nn.Linear there."
        )
    weight = layout.weight(path, tensors)
    if (weight.out_features, weight.in_features) != tuple(layer.weight.shape):
        raise CheckpointError(
            f"{path} has the shape {[weight.out_features, weight.in_features]}, but config.json "
            f"requires {list(layer.weight.shape)}. Correct config.json."
        )
    if layer is output_head(model):
        layer.weight = nn.Parameter(weight.dequantized(layer.weight.dtype), requires_grad=False)
        return
    quantized = QuantizedLinear(weight)
    quantized.bias = layer.bias
    model.set_submodule(path, quantized)


def _fill_others(model: PreTrainedModel, stored: StoredWeights, device: torch.device) -> None:
    """Read the parameters on the meta device, and the stored buffers."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            places.setdefault(parameter, []).append(name)
    for parameter, names in places.items():
        found = [name for name in names if name in stored.forms]
        if not found:
            raise CheckpointError(f"there is no {names[0]}, which config.json requires.")
        name = found[0]
        tensor = _read(stored, [name], device)[name].to(parameter.dtype)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, but config.json requires "
                f"{list(parameter.shape)}. Correct config.json."
            )
        filled = nn.Parameter(tensor, requires_grad=False)
        for place in names:
            owner, _, leaf = place.rpartition(".")
            setattr(model.get_submodule(owner), leaf, filled)
    buffers = dict(model.named_buffers())
    stored.copy({name: buffers[name] for name in buffers.keys() & stored.forms.keys()})


def _read(
    stored: StoredWeights, names: Collection[str], device: torch.device
) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in stored.read(names)}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move the parameters of modules that are created in a block to the meta device.

    Buffers stay: no file has those that follow from the configuration.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
