"""Models of transformers whose folders have quantised layers that graphkit reads itself.

transformers loads the folder under the names of the plain one, with its renamings and conversions.
Linear layers are passed as placeholders without memory, which ``QuantizedLinear`` replaces then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graphkit.errors import CheckpointError
from graphkit.models.folder_errors import model_error
from graphkit.models.layout import output_head
from graphkit.models.plain_tensors import PlainTensors, checked_rows
from graphkit.models.quantization import QuantizedLinear, QuantizedWeight, StoredLayout
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.stored_names import Target, targets
from graphkit.models.stored_tensors import check_stored
from graphkit.models.weight_files import abbreviate

logger = logging.getLogger(__name__)
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


StoredRows = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Outputs of quantised layers by name, [R], and what the folder stores of them, [R, K] float32."""


def load_quantized(
    folder: Path,
    layout: StoredLayout,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, StoredRows]:
    """Load a model whose quantised linear layers become ``QuantizedLinear``.

    Weights that transformers merges, splits or transposes are dequantised, such as experts, and so
    are output heads and embeddings.

    Args:
        folder: The folder.
        layout: Layout of its quantised layers.
        dtype: Data type of the other weights; ``None`` selects the one of the folder.
        device: Where the quantised weights go.
        trust_remote_code: As for ``load``.

    Returns:
        The model, and rows of its quantised layers for the check.

    Raises:
        CheckpointError: transformers cannot create the model, or tensors are missing, are not used,
            or do not fit its layers.
    """
    tensors = PlainTensors(folder, layout)
    shape = _model_on_meta(folder, dtype, tensors, trust_remote_code)
    placed = targets(shape, tensors.forms)
    weights: dict[str, QuantizedWeight] = {}
    checked = StoredRows()
    state: dict[str, Any] = {}
    dequantised = []
    for name in tensors.forms:
        state[name] = _Lazy(partial(tensors.tensor, name))
        if name not in tensors.quantized:
            continue
        if _is_linear(shape, tensors.quantized[name][0], placed[name]):
            path = placed[name].name.removesuffix(".weight")
            weights[path] = weight = tensors.weight(name, device)
            rows = checked_rows(weight.out_features)
            checked[path] = rows, stored_rows(layout.method, tensors.stored(name), rows)
            state[name] = _placeholder(weight, shape.dtype)
        elif placed[name].name in shape.state_dict():
            dequantised.append(name)
    try:
        loaded: Any = type(shape).from_pretrained(
            None, config=shape.config, state_dict=state, dtype=shape.dtype,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except CheckpointError:  # of a tensor
        raise
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise model_error(folder, error, trust_remote_code=trust_remote_code) from error
    model: PreTrainedModel
    model, report = loaded
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    check_stored(folder, model, report, tensors, is_quantised=True)
    if dequantised:
        logger.info(
            "%s: %s are held in %s: transformers merges or splits them, or they are no linear "
            "layers but the output head.", folder, abbreviate(dequantised), shape.dtype,
        )  # fmt: skip
    _replace_placeholders(model, weights)
    return model, checked


def _model_on_meta(
    folder: Path, dtype: torch.dtype | None, tensors: PlainTensors, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the model of a folder without memory for its weights.

    Its dtype is that of the settings, or else that of the first stored matrix that is not
    quantised, such as the embedding.
    """
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        configs = (config, config.get_text_config(decoder=True))
        matrices = (
            _DTYPES[form]
            for name, (sizes, form) in tensors.forms.items()
            if form in _DTYPES and len(sizes) > 1 and name not in tensors.quantized
        )
        for each in configs:
            dtype = dtype or each.dtype
            for name in ("quantization_config", "compression_config"):
                vars(each).pop(name, None)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype or next(matrices, torch.bfloat16),
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise model_error(folder, error, trust_remote_code=trust_remote_code) from error
    return model


def _is_linear(model: PreTrainedModel, path: str, target: Target) -> bool:
    """Return whether a quantised layer is a linear layer of the model but its output head.

    Raises:
        CheckpointError: The model holds the weight of the layer in another order.
    """
    owner, _, leaf = target.name.rpartition(".")
    if target.is_converted or leaf != "weight" or target.name not in model.state_dict():
        return False
    layer = model.get_submodule(owner)
    if isinstance(layer, Conv1D):
        raise CheckpointError(
            f"{path} is quantised, but {type(model).__name__} has a Conv1D there, whose weight is "
            "transposed. graphkit reads quantised layers of torch.nn.Linear."
        )
    return type(layer).forward is nn.Linear.forward and layer is not output_head(model)


def _placeholder(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the shape of a weight with the memory of one number.

    NaN equals no other weight, so that transformers does not tie the layer to another.
    """
    nan = torch.full((), torch.nan, dtype=dtype)
    return nan.expand(weight.out_features, weight.in_features)


def _replace_placeholders(model: PreTrainedModel, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replace the linear layers that got placeholders, and those tied to them, in place."""
    layers: dict[torch.Tensor, QuantizedLinear] = {}
    for path, weight in weights.items():
        plain = model.get_submodule(path)
        layer = QuantizedLinear(weight).train(plain.training)
        layer.bias = plain.bias  # type: ignore[assignment]
        layers[plain.get_parameter("weight")] = layer
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and module.weight in layers:
            model.set_submodule(path, layers[module.weight])


class _Lazy:
    """A tensor that is read when transformers slices it."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: object) -> torch.Tensor:
        return self._read()
