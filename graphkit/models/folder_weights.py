"""Models of transformers from folders whose weights graphkit reads itself.

These are folders with quantised layers, and folders of which each rank reads its part. transformers
loads the weights under the names of the plain folder, with its renamings and conversions. Quantised
linear layers are passed as placeholders without memory, which ``QuantizedLinear`` replaces then.
MTP layers are read this way, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graphkit.distributed import RankGroup
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models import experts
from graphkit.models.expert_weights import ExpertWeights, StoredRows, read_experts
from graphkit.models.layout import output_head
from graphkit.models.plain_tensors import PlainTensors, checked_rows
from graphkit.models.quantization.formulas import stored_rows
from graphkit.models.quantization.linear import QuantizedExperts, QuantizedLinear
from graphkit.models.quantization.stored import StoredLayout
from graphkit.models.quantization.weight import QuantizedWeight
from graphkit.models.refusals import load_error
from graphkit.models.stored_tensors import Target, check_stored, targets
from graphkit.models.tensor_parallel import Part, RankSplit

_LAYER_TOLERANCE = 1e-4
"""Largest difference of a product of a quantised layer in float32, over its size."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_weights(
    folder: Path,
    layout: StoredLayout | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    group: RankGroup | None = None,
    check: bool = True,
) -> tuple[PreTrainedModel, RankSplit | None]:
    """Load a model whose quantised linear layers become ``QuantizedLinear``.

    Its quantised experts become ``QuantizedExperts``. Other weights that transformers merges,
    splits or transposes are dequantised, and so are output heads, embeddings, and layers whose
    blocks of inputs ranks would split.

    Args:
        folder: The folder.
        layout: Layout of its quantised layers; ``None`` if it has none.
        dtype: Data type of the other weights; ``None`` selects the one of the folder.
        device: Where the quantised weights go.
        trust_remote_code: As for ``load``.
        group: Ranks that split the model. Each reads its part, and all of the few tensors that
            transformers converts otherwise than by stacking experts.
        check: See ``ReadTensors.install``.

    Returns:
        The model, and how ranks split it.

    Raises:
        CheckpointError: transformers cannot create the model, or tensors are missing, are not used,
            or do not fit its layers.
        ConfigError: The ranks cannot split the model; see ``RankSplit``.
    """
    tensors = PlainTensors(folder, layout)
    shape = _model_on_meta(folder, dtype, tensors, trust_remote_code)
    split = None if group is None else RankSplit(shape, group)
    read = read_tensors(shape, tensors, device, split, trust_remote_code=trust_remote_code)
    model = read.model
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    is_quantised, held = layout is not None, read.held.weights
    check_stored(folder, model, read.report, tensors, is_quantised=is_quantised, held=held)
    tensors.warn_dequantised(read.dequantised, shape.dtype)
    read.install(check=check)
    return model, split


@dataclass(slots=True, eq=False)
class ReadTensors:
    """A model with stored tensors, in which placeholders without memory are for quantised ones.

    Attributes:
        model: The model.
        report: What transformers reports of its load.
        weights: Weights of its quantised linear layers, by path.
        held: Its quantised experts.
        checked: Rows of both, for the check.
        dequantised: Stored names of quantised tensors that are held dequantised.
        dtype: Data type of the other weights.
    """

    model: PreTrainedModel
    report: Mapping[str, Any]
    weights: Mapping[str, QuantizedWeight]
    held: ExpertWeights
    checked: StoredRows
    dequantised: list[str]
    dtype: torch.dtype

    @torch.no_grad()
    def install(self, *, check: bool = True) -> None:
        """Put the quantised layers and experts in their places, in those tied to them, too.

        Args:
            check: Whether their products are compared with those of rows that the folder stores.

        Raises:
            ConfigError: They differ by more than rounding.
        """
        layers: dict[torch.Tensor, QuantizedLinear] = {}
        for path, weight in self.weights.items():
            plain = self.model.get_submodule(path)
            layer = QuantizedLinear(weight).train(plain.training)
            layer.bias = plain.bias  # type: ignore[assignment]
            layers[plain.get_parameter("weight")] = layer
        for path, module in list(self.model.named_modules(remove_duplicate=False)):
            if isinstance(module, nn.Linear) and module.weight in layers:
                self.model.set_submodule(path, layers[module.weight])
        self.held.install(self.model)
        if self.held.weights:
            self.model.set_experts_implementation(experts.IMPLEMENTATION)
        for name, (rows, numbers) in self.checked.items() if check else ():
            _check_products(name, self.model, rows, numbers, self.dtype)


def read_tensors(
    shape: PreTrainedModel,
    tensors: PlainTensors,
    device: torch.device,
    split: RankSplit | None,
    *,
    create: Callable[[PreTrainedModel], object] = lambda model: model,
    trust_remote_code: bool = False,
) -> ReadTensors:
    """Return a model with stored tensors, converted as transformers does.

    Args:
        shape: The model on the meta device.
        tensors: Those of its folder.
        device: Where the quantised weights go.
        split: How ranks split the model.
        create: Makes a new model of the class and the configuration of ``shape`` like it.
        trust_remote_code: As for ``load``.

    Raises:
        CheckpointError: As for ``load_weights``.
    """
    placed, parameters = targets(shape, tensors.forms), shape.state_dict()
    for name, count in _experts_stored(placed).items():
        if name in parameters and count != len(parameters[name]):
            raise CheckpointError(
                f"{tensors.folder} has {count} of {len(parameters[name])} experts of {name}. "
                "Download all weights."
            )
    parts = {} if split is None else _parts(tensors.folder, shape, split, placed, tensors)
    held = read_experts(shape, tensors, placed, parts, device)
    weights: dict[str, QuantizedWeight] = {}
    checked = dict(held.checked)
    state: dict[str, Any] = {}
    dequantised = []
    for name in tensors.forms:
        if name in held.names:
            continue
        part = parts.get(name)
        state[name] = _Lazy(partial(tensors.tensor, name), part)
        if name not in tensors.quantized:
            continue
        weight = None
        if _is_linear(shape, tensors.quantized[name][0], placed[name]):
            weight = tensors.weight(name, device, part)
        if weight is not None:
            path = placed[name].name.removesuffix(".weight")
            weights[path] = weight
            checked[path] = _checked(tensors, name, part, weight.out_features)
            # The memory of one number. NaN equals no other weight, so that transformers does not
            # tie the layer to another.
            nan = torch.full((), torch.nan, dtype=shape.dtype)
            state[name] = nan.expand(weight.out_features, weight.in_features)
        elif placed[name].name in parameters:
            dequantised.append(name)
    cut = {placed[name].name for name in parts}
    try:
        loaded: Any = _sized_class(type(shape), split, cut, held, create).from_pretrained(
            None, config=shape.config, state_dict=state, dtype=shape.dtype,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except CheckpointError:  # of a tensor
        raise
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise load_error(tensors.folder, error, trust_remote_code=trust_remote_code) from error
    model: PreTrainedModel
    model, report = loaded
    model.__class__ = type(shape)
    if split is not None:
        split.cut(model, split.parts.keys() - cut - held.weights.keys())
    return ReadTensors(model, report, weights, held, checked, dequantised, shape.dtype)


def _experts_stored(placed: Mapping[str, Target]) -> dict[str, int]:
    """Return how many experts are stored of each parameter that stacks some."""
    counts = Counter((place.name, place.source) for place in placed.values() if place.is_stacked)
    fewest: dict[str, int] = {}
    for (name, _), count in counts.items():
        fewest[name] = min(count, fewest.get(name, count))
    return fewest


def _sized_class(
    kind: type[PreTrainedModel],
    split: RankSplit | None,
    cut: Collection[str],
    held: ExpertWeights,
    create: Callable[[PreTrainedModel], object],
) -> type[PreTrainedModel]:
    """Return a class of models whose parameters have the sizes of the tensors.

    ``from_pretrained`` creates the model and then compares its sizes with those of the tensors.
    """

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        create(self)
        if split is not None:
            split.cut(self, [name for name in cut if name not in held.weights])
        held.leave_out(self)

    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def _parts(
    folder: Path,
    shape: PreTrainedModel,
    split: RankSplit,
    placed: Mapping[str, Target],
    tensors: PlainTensors,
) -> dict[str, Part]:
    """Return the parts of stored tensors that this rank reads, by stored name.

    Raises:
        CheckpointError: A tensor does not have the shape of its parameter.
    """
    parts, tied = {}, shape.all_tied_weights_keys
    for name, target in placed.items():
        part = split.parts.get(target.name)
        if part is None or target.name in tied or (target.is_converted and not target.is_stacked):
            continue
        sizes, expected = tensors.forms[name][0], list(shape.get_parameter(target.name).shape)
        if target.is_stacked and sizes[part.dim] != part.size:
            part = Part(part.dim, part.size // 2, part.spans[:1])  # of one of the two halves
        elif not target.is_stacked and sizes != expected:
            raise CheckpointError(
                f"{folder}: {name} has shape {sizes}, but config.json requires {expected}. Correct "
                "config.json."
            )
        parts[name] = part
    return parts


def _checked(
    tensors: PlainTensors, name: str, part: Part | None, outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs of a quantised layer of this rank, and what the folder stores of them."""
    assert tensors.layout is not None, "it has quantised layers"
    rows, begin, end = checked_rows(outputs), 0, None
    if part is not None:
        ((begin, end),) = part.spans
    first = begin if part is not None and part.dim == -2 else 0
    numbers = stored_rows(tensors.layout.method, tensors.stored(name), rows + first)
    return rows, numbers if part is None or part.dim == -2 else numbers[:, begin:end]


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
        for part in configs:
            dtype = dtype or part.dtype
            for name in ("quantization_config", "compression_config"):
                vars(part).pop(name, None)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype or next(matrices, torch.bfloat16),
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise load_error(folder, error, trust_remote_code=trust_remote_code) from error
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


class _Lazy:
    """A tensor, or a part of it, that is read when transformers slices it."""

    def __init__(self, read: Callable[[], torch.Tensor], part: Part | None) -> None:
        self._read, self._part = read, part

    def __getitem__(self, _: object) -> torch.Tensor:
        tensor = self._read()
        return tensor if self._part is None else self._part.of(tensor)


def _check_products(
    name: str, model: nn.Module, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> None:
    """Compare products of a quantised layer or expert with those of rows that its folder stores.

    Raises:
        ConfigError: They differ by more than rounding.
    """
    path, _, expert = name.rpartition(".")
    layer, options = model.get_submodule(path), dict[str, int]()
    if isinstance(layer, QuantizedExperts):
        options = {"expert": int(expert)}
    else:
        layer = model.get_submodule(name)
    bias: torch.Tensor | None = getattr(layer, "bias", None)
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, weight.shape[1], generator=generator).to(dtype)
    got = (
        layer.forward(inputs.to(device), **options).float().cpu()[:, rows]
    )  # without the sum over ranks
    expected = inputs.float() @ weight.T.cpu()
    if bias is not None:
        expected = expected + bias.float().cpu()[rows]
    difference, size = (got - expected).norm(dim=0), expected.norm(dim=0)
    allowed = max(_LAYER_TOLERANCE, 8 * torch.finfo(dtype).eps)
    if not bool((difference <= allowed * size.clamp(min=float(size.mean()) / 16)).all()):
        raise ConfigError(
            f"{name} computes other products than its quantised weight in the folder. Report this "
            "with config.json of the folder; check=False skips the comparison.",
            field="folder_or_model",
        )
