"""Load a causal language model of transformers, check it, and prepare it for capture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from graphkit.config import require_type
from graphkit.distributed import RankGroup
from graphkit.errors import CheckpointError, ConfigError, short_repr
from graphkit.graphs import resolve_device
from graphkit.models import experts
from graphkit.models.drafted_model import WITHOUT_DRAFT, check_algorithm
from graphkit.models.folder import StoredWeights, read_quantized_config
from graphkit.models.fusion.observation import deciding_by
from graphkit.models.generation import generation_defaults
from graphkit.models.kv_scales import with_kv_scales
from graphkit.models.layout import ModelLayout, output_head
from graphkit.models.load_check import check_keys, check_loaded
from graphkit.models.model import TransformersModel
from graphkit.models.prepare import prepare_model
from graphkit.models.quantization.linear import (
    QuantizedExperts,
    QuantizedLinear,
    quantize_linears,
    set_row_invariant,
)
from graphkit.models.quantization.settings import check_quantization_keys, quantization_settings
from graphkit.models.quantization.stored import stored_layout
from graphkit.models.quantization.weight import check_quantization
from graphkit.models.refusals import check_model, check_type, load_error
from graphkit.models.stored_tensors import check_stored
from graphkit.models.tensor_parallel import RankSplit
from graphkit.models.weight_reads import dequantize_read_weights
from graphkit.ops.argument_rules import check_dtype

if TYPE_CHECKING:
    from graphkit.models.heads.draft_model import DraftModel

_log = logging.getLogger(__name__)


def load(
    folder_or_model: str | Path | PreTrainedModel,
    *,
    draft: str | Path | PreTrainedModel | nn.Module | None = None,
    algorithm: str | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    device: torch.device | str = "auto",
    fuse: bool = True,
    check: bool = True,
    trust_remote_code: bool = False,
    group: RankGroup | None = None,
    row_invariant: bool = False,
) -> TransformersModel:
    """Load a causal language model of transformers for capture.

    No architecture is known by name. The shapes of keys, values and recurrent states are learnt
    from one forward with the model's own cache. Attention runs through the attention registry of
    transformers, recurrent layers through the interface of its cache.

    Args:
        folder_or_model: A folder with ``config.json`` and weights, or a model of transformers.
            Folders of AWQ, GPTQ, compressed-tensors, ModelOpt and FP8 run over graphkit's kernels.
            A model object is changed in place: it then runs through graphkit alone.
        draft: A draft model for it, or its folder. It is a draft head (EAGLE, EAGLE-3 or DFLASH
            in a layout of ``heads.layouts``, MTP layers of the model in a folder of their own, an
            assistant of Gemma 4), or a causal language model of the same vocabulary (STANDALONE).
            A model object is changed in place, too. ``"mtp"`` selects the MTP layers in the folder
            of the model: one drafts all steps (EAGLE), several draft one step each
            (MULTI_LAYER_EAGLE).
        algorithm: The algorithm of engines and targets: that of the draft model, ``"NGRAM"`` or
            ``"NONE"``. ``None`` selects the first of these.
        dtype: Data type of the weights; ``None`` keeps that of the folder or the model.
        quantize: ``"fp8"`` or ``"int4"`` stores the weights of linear layers in eight or four bits,
            and of experts, in the draft model too. Output heads of language models, embeddings and
            experts whose weights have a row per input (gpt-oss) stay as they are. ``None`` keeps
            the weights.
        device: ``auto``, ``cpu`` or ``cuda``; a model object is moved there.
        fuse: Whether linear layers of one input become one product, and norms, gated networks and
            the rotation of heads run through graphkit's ops, where both compute the same on random
            inputs, up to rounding. ``layout.replaced`` of the result names these modules, and
            ``layout.torch_products`` modules that still multiply by torch, whose rows may depend on
            the batch; ``draft.layout`` has those of the draft model.
        check: Whether the logits of the result are compared with those of the model, as
            ``testing.check_wrapper`` does.
        trust_remote_code: Whether Python code in the folders of the model and of the draft model
            runs, for types that transformers does not have. ``tokenizer`` follows it, too.
        group: Ranks that split the layers and the output head, as ``tp_plan`` of the model says. A
            rank reads its part of a folder. Draft heads of folders and MTP layers are split, too,
            and other draft models are on every rank, as embeddings. All ranks call this.
        row_invariant: Whether the bits of a row are independent of the batch, as ops allow it. By
            default attention, and on CUDA products with quantised weights and of more than 256
            rows, take their fastest way; ``docs/same_bits.md`` says where equal rows cost time. The
            log says at INFO whether rows depend on the batch, and why.

    Raises:
        CheckpointError: The folder cannot be loaded.
        ConfigError: An argument has a wrong type or value, or the model keeps state that graphkit
            has no pool for, or a layer does not attend through the registry, or the model has no
            layer to quantise, or the result computes other logits, or the draft model does not fit
            the model or the algorithm, or ``group`` cannot split the model.
        RankError: Another rank has failed.
        TargetError: The logits of the model depend on later tokens.

    Examples:
        >>> model = gk.models.load("models/Qwen3-0.6B")  # doctest: +SKIP
        >>> engine = model.engine(algorithm="NGRAM", num_steps=3)  # doctest: +SKIP
    """
    flags = {
        "fuse": fuse, "check": check, "trust_remote_code": trust_remote_code,
        "row_invariant": row_invariant,
    }  # fmt: skip
    for name, flag in flags.items():
        require_type("load", name, flag, bool, "True or False")
    if dtype is not None:
        check_dtype("load", dtype)
    check_type(folder_or_model, "folder_or_model")
    heads: Any = None
    kind = None
    if draft is not None:  # a model without one does not need the module
        from graphkit.models.heads import load as heads

        kind = heads.draft_kind(draft, folder_or_model)
    if algorithm is not None:
        own = () if heads is None else heads.ALGORITHMS_BY_KIND[kind]
        check_algorithm(algorithm, (*own, *WITHOUT_DRAFT))
    if quantize is not None:
        check_quantization(quantize)
    if group is not None:
        require_type("load", "group", group, RankGroup, "a graphkit.RankGroup")
    device = resolve_device(device)
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "device": device, **flags}
    part = partial(_loaded, folder_or_model, "folder_or_model", group=group, **options)
    loaded = part() if group is None else group.run(part)
    drafting: DraftModel | None = None
    if heads is not None and kind == "STANDALONE":
        drafting = heads.standalone_draft(_loaded(draft, "draft", **options), loaded)
    elif heads is not None and kind == "ASSISTANT":
        options["dtype"] = loaded.dtype
        assistant = _loaded(draft, "draft", prepares=False, **options).model
        drafting = heads.AssistantDraft(assistant, loaded, fuse=fuse)
    elif heads is not None:
        drafting = heads.load_draft(
            kind, draft, loaded, algorithm, quantize, fuse=fuse, row_invariant=row_invariant
        )
    if drafting is not None:
        drafting.row_invariant = row_invariant
    generation = getattr(loaded.original, "generation_config", None)
    name = loaded.folder or type(loaded.original).__name__
    generation_defaults(generation, frozenset(), loaded.head.out_features).report(name)
    parts = (loaded.model, loaded.original, loaded.layout, loaded.folder)
    result = TransformersModel(
        *parts, drafting, algorithm, trust_remote_code, split=loaded.split,
        row_invariant=row_invariant,
    )  # fmt: skip
    _log_row_invariance(result, str(name))
    return result


def _log_row_invariance(model: TransformersModel, name: str) -> None:
    """Log whether the bits of a row depend on the batch, and why."""
    reasons = model.row_dependences()
    if reasons:
        text = "; ".join(reasons)
        _log.info("the bits of a row of %s may depend on its batch: %s.", name, text)
    else:
        _log.info("the bits of a row of %s depend on the row alone.", name)


def _loaded(
    folder_or_model: Any,
    field: str,
    *,
    dtype: torch.dtype | None,
    quantize: str | None,
    device: torch.device,
    fuse: bool,
    check: bool,
    trust_remote_code: bool,
    row_invariant: bool,
    group: RankGroup | None = None,
    prepares: bool = True,
) -> TransformersModel:
    folder, split = None, None
    if isinstance(folder_or_model, PreTrainedModel):
        check_model(folder_or_model, field)
        model = folder_or_model if dtype is None else nn.Module.to(folder_or_model, dtype)
        if group is not None:
            split = RankSplit(model, group)
            split.cut(model)
    else:
        folder = str(folder_or_model)
        model, split = _from_folder(Path(folder), dtype, device, trust_remote_code, group, check)
        check_keys(Path(folder), model)
    if quantize is not None:
        _quantize(model, quantize, device)
    set_row_invariant(model, row_invariant)
    nn.Module.to(model, device)
    nn.Module.eval(model).requires_grad_(False)
    if not prepares:
        return TransformersModel(model, model, ModelLayout((), ()), folder)
    if not getattr(model.config.get_text_config(decoder=True), "is_causal", True):
        raise ConfigError(
            f"the configuration of {type(model).__name__} sets is_causal to false, so that its "
            "layers attend to later tokens. Load a causal language model.",
            field=field,
        )
    if split is not None:
        split.install(model)
    dequantize_read_weights(model)
    original = _shared_copy(model)
    with nullcontext() if split is None else deciding_by(split.all):
        layout = prepare_model(model, fuse=fuse)
    if folder is not None:
        layout = with_kv_scales(layout, model, Path(folder), group)
    _refuse_encoder(model, layout)
    loaded = TransformersModel(model, original, layout, folder, split=split)
    if check:
        check_loaded(loaded)
    return loaded


def _from_folder(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    group: RankGroup | None,
    check: bool,
) -> tuple[PreTrainedModel, RankSplit | None]:
    """Load a folder, its quantised layers by graphkit if it reads their layout.

    Returns the model, and how ranks split it.
    """
    has_config = False
    with suppress(OSError, ValueError):  # a name that no file can have
        has_config = (folder / "config.json").is_file()
    if not has_config:
        raise CheckpointError(
            f"{str(folder)[:200]} has no config.json. Pass a folder of transformers; download it "
            "first if this is the name of a model."
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has an adapter (adapter_config.json) beside its weights. Merge it into the "
            "weights (merge_and_unload of peft), save the model, and load that folder."
        )
    config = read_quantized_config(folder)
    settings, reason = quantization_settings(config) or {}, ""
    check_quantization_keys(settings)
    try:
        layout = stored_layout(config)
    except CheckpointError as error:
        if not _has_quantizer(settings):
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        layout, reason = None, f"graphkit does not read it: {error}"
    if layout is not None or (group is not None and not settings):
        from graphkit.models.folder_weights import load_weights

        return load_weights(
            folder, layout, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
            group=group, check=check,
        )  # fmt: skip
    if settings and not _has_quantizer(settings):
        raise CheckpointError(
            f"{folder} has quantised layers of the method {settings.get('quant_method')!r}, which "
            "neither graphkit nor transformers reads. Use a folder in a layout of the page "
            "Quantised weights."
        )
    if group is not None:
        raise ConfigError(
            f"{folder} has quantised layers of the method {settings.get('quant_method')!r}, which "
            f"transformers reads and ranks do not split. Load it on one device. {reason}".rstrip(),
            field="group",
        )
    return _by_transformers(folder, dtype, trust_remote_code, reason), None


def _has_quantizer(settings: Mapping[str, Any]) -> bool:
    """Return whether transformers has a quantizer for ``quantization_config``."""
    method = {**settings, "quant_method": str(settings.get("quant_method") or "")}
    return bool(AutoHfQuantizer.supports_quant_method(method))  # type: ignore[no-untyped-call]


def _by_transformers(
    folder: Path, dtype: torch.dtype | None, trust_remote_code: bool, reason: str
) -> PreTrainedModel:
    """Load a folder by transformers; ``reason`` says why graphkit does not read it itself."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise load_error(folder, error, trust_remote_code=trust_remote_code, note=reason) from error
    model: PreTrainedModel
    model, report = loaded
    check_stored(folder, model, report, StoredWeights(folder))
    return model


def _refuse_encoder(model: PreTrainedModel, layout: ModelLayout) -> None:
    """Refuse a model whose attention is bidirectional, as its modules say."""
    for layer in layout.attention:
        if getattr(model.get_submodule(layer.name), "is_causal", None) is False:
            raise ConfigError(
                f"{type(model).__name__} is an encoder: {layer.name} attends to later tokens. Load "
                "a causal language model, or set is_decoder in config.json if this is one.",
                field="folder_or_model",
            )


def _shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares the weights and runs as transformers runs it."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, memo)
    copy.set_attn_implementation("eager")
    return copy


def _quantize(model: PreTrainedModel, quantize: str, device: torch.device) -> None:
    """Quantise the linear layers and experts of a model but its output head, in place."""
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ConfigError(
            f"quantize is {short_repr(quantize)}, but the weights are quantised already. Load "
            "them without quantize.",
            field="quantize",
        )
    if not quantize_linears(model, quantize, device=device, kept=[output_head(model)]):
        raise ConfigError(
            f"{type(model).__name__} has no layers of torch.nn.Linear besides its output head, so "
            f"that quantize={quantize!r} changes nothing. Load it without quantize.",
            field="quantize",
        )
    if any(isinstance(module, QuantizedExperts) for module in model.modules()):
        model.set_experts_implementation(experts.IMPLEMENTATION)
