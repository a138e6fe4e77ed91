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
from graphkit.hf.folder_errors import model_error
from graphkit.hf.layout import output_head
from graphkit.hf.stored_names import Target, targets
from graphkit.hf.stored_tensors import check_stored
from graphkit.quantization import QuantizedLinear, QuantizedWeight, StoredLayout
from graphkit.quantization.formulas import stored_rows
from graphkit.reference.checkpoint_folder import StoredWeights
from graphkit.reference.weight_files import Form, abbreviate

logger = logging.getLogger(__name__)
_CHECKED_ROWS = 8
"""Outputs of each quantised layer that the check at load compares."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOLERANCE = 1e-4
"""Largest difference of dequantised float32 numbers, over the largest of them."""

StoredRows = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Outputs of quantised layers by name, [R], and what the folder stores of them, [R, K] float32."""


class PlainTensors(StoredWeights):
    """The tensors of a folder, quantised layers dequantised, under the names of the plain folder.

    Args:
        folder: The folder.
        layout: Layout of the quantised layers; ``None`` if it has none.

    Attributes:
        forms: Shape and dtype of each tensor; dequantised ones are F32.
        quantized: Quantised layers by the name of their weight: their own name, and the stored
            names of their tensors by suffix.
    """

    def __init__(self, folder: Path, layout: StoredLayout | None) -> None:
        super().__init__(folder)
        self.layout = layout
        self.quantized: dict[str, tuple[str, dict[str, str]]] = {}
        layers = {} if layout is None else layout.layers(self.forms)
        forms: dict[str, Form] = {}
        for path, names in layers.items():
            assert layout is not None, "it has layers"
            name = path if names[layout.numbers] == path else f"{path}.weight"
            self.quantized[name] = path, names
            forms[name] = layout.shape(names, self.forms), "F32"
        parts = {part for names in layers.values() for part in names.values()}
        plain = {name: form for name, form in self.forms.items() if name not in parts}
        self.forms = plain | forms

    def stored(self, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantised layer by suffix; ``name`` is its weight."""
        names = self.quantized[name][1]
        return {
            suffix: super(PlainTensors, self).tensor(n).to(device) for suffix, n in names.items()
        }

    def weight(self, name: str, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Return the weight of a quantised layer."""
        assert self.layout is not None, "it has quantised layers"
        return self.layout.weight(self.quantized[name][0], self.stored(name, device))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; dequantised ones are float32.

        Raises:
            CheckpointError: Tensors of a quantised layer are missing or do not fit, or the result
                is not what the formula of the layout gives.
        """
        if name not in self.quantized:
            return super().tensor(name)
        assert self.layout is not None, "it has quantised layers"
        tensors = self.stored(name)
        if len(self.forms[name][0]) == 3:
            weight = self.layout.experts(name, tensors)
            last = {suffix: tensor[-1] for suffix, tensor in tensors.items()}
            self._check(name, weight[-1], last)
        else:
            path, _ = self.quantized[name]
            weight = self.layout.weight(path, tensors).dequantized(torch.float32)
            self._check(name, weight, tensors)
        return weight

    def _check(self, name: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare a dequantised matrix with the formula of the layout.

        Raises:
            CheckpointError: They differ.
        """
        assert self.layout is not None, "it has quantised layers"
        rows = checked_rows(len(weight))
        expected = stored_rows(self.layout.method, tensors, rows)
        if not bool((weight[rows] - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise CheckpointError(
                f"{name} is not what the tensors of {self.layout.method} stand for. Report this "
                "with the config.json of the folder."
            )

    def copy(self, targets: Mapping[str, torch.Tensor], *_: Any) -> None:
        """Copy tensors into ``targets``, by their names."""
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensor(name))


def checked_rows(outputs: int) -> torch.Tensor:
    """Return the outputs of a layer that are compared at load, with the first and the last."""
    return torch.linspace(0, outputs - 1, min(outputs, _CHECKED_ROWS)).long()


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
