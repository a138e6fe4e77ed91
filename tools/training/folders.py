"""Folders of trained models, in the layouts that ``graphkit.models`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from graphkit.models.heads.config import LAYER_SETTINGS
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.dflash_parts import BlockOptions
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.layouts import MODEL_TYPE

_ARCHITECTURES = {
    EagleHead: "LlamaForCausalLMEagle",
    Eagle3Head: "LlamaForCausalLMEagle3",
    DFlashHead: "MuseGlimmerAssistantModel",
}


def write_folder(folder: Path, config: Mapping[str, object], state: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; create the folder, overwrite the files.

    The floating-point tensors have one dtype, which is written into the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    (dtype,) = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    text = json.dumps(
        {**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2, sort_keys=True
    )
    (folder / "config.json").write_text(text + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_entries(config: PreTrainedConfig) -> dict[str, object]:
    """Return the entries of ``config.json``, from which ``layer_config`` returns the configuration.

    Rotations are written as ``rope_theta`` and ``rope_scaling``, as in published heads.
    """
    unused = {"layer_types", "quantization_config"}
    unused |= set() if config.model_type == "mistral" else {"sliding_window"}
    names = LAYER_SETTINGS - unused
    data = {name: value for name, value in config.to_dict().items() if name in names}
    rope = dict(data.pop("rope_parameters"))
    data["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        data["rope_scaling"] = rope
    # The defaults of transformers, 1 and 2, are ordinary tokens of the byte vocabulary.
    return data | {"bos_token_id": None, "eos_token_id": None}


def save_draft_head(head: EagleHead | Eagle3Head | DFlashHead, folder: Path) -> None:
    """Write a head in its current dtype, without the weights that it shares with its target.

    Creates the folder; overwrites ``config.json`` and ``model.safetensors`` in it.
    """
    config = config_entries(head.config) | {"architectures": [_ARCHITECTURES[type(head)]]}
    if isinstance(head, Eagle3Head):
        config |= {
            "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
            "draft_vocab_size": head.config.vocab_size if head.d2t is None else len(head.d2t),
            "norm_before_residual": head.midlayer.norm_before_residual,
        }
    if isinstance(head, DFlashHead):
        config |= _dflash_entries(head)
    write_folder(folder, config, head.state_dict())


def _dflash_entries(head: DFlashHead) -> dict[str, object]:
    """Return the entries of ``config.json`` that a head has beside those of its layers.

    A head with other blocks than those of DFLASH has the layout of its authors.
    """
    config, options = head.config, asdict(head.options)
    window, layers = options.pop("window"), options.pop("windowed_layers")
    kinds = ("full_attention", "sliding_attention")
    entries = {
        "model_type": MODEL_TYPE,
        "pad_token_id": None,  # the default of transformers is outside of small vocabularies
        "layer_types": [kinds[layer in layers] for layer in range(config.num_hidden_layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_parameters["rope_theta"],
        },
        "target_layer_ids": list(head.target_layer_ids),
        "block_size": head.block_size,
        "mask_token_id": head.mask_token_id,
    }
    if head.options == BlockOptions():
        return entries
    name = "DFlash2DraftModel" if head.candidate_selector is not None else "Qwen3DSparkModel"
    options["is_causal"] = None if options["is_causal"] else False  # the layers decide
    windows = {"sliding_window": window, "use_sliding_window": True} if layers else {}
    return {"architectures": [name], **entries, **options, **windows, "model_type": "qwen3"}
