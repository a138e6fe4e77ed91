"""Loading and saving of language models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from graphkit.config import require_type
from graphkit.distributed import RankGroup
from graphkit.engine.kv.contracts import require_device
from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights, as_folder, read_quantized_config, write_folder
from graphkit.models.heads.config import LlamaConfig
from graphkit.models.heads.layers import store_by_columns
from graphkit.models.heads.sharded_layers import part_of
from graphkit.models.quantization import stored_layout
from graphkit.models.sharded.model import LlamaModel
from graphkit.models.sharded.quantized_checkpoint import fill_quantized
from graphkit.models.sharded.tensor_parallel import ShardedLlama
from graphkit.ops.argument_rules import check_dtype

_WEIGHTS = Path(__file__).parent / "weights"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def default_checkpoint(kind: str = "target") -> Path:
    """Return the folder of trained weights that ship with the package.

    Args:
        kind: ``target`` (the reference model), or what drafts for it: ``standalone`` (a small
            language model), ``eagle``, ``eagle3``, ``mtp`` or ``dflash`` (heads).

    Raises:
        CheckpointError: There are no such weights.
    """
    kinds = sorted(each.name for each in _WEIGHTS.iterdir())
    if kind not in kinds:
        raise CheckpointError(f"graphkit has no weights {kind!r}: kinds are {', '.join(kinds)}.")
    return _WEIGHTS / kind


def load_checkpoint(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: RankGroup | None = None,
) -> LlamaModel:
    """Build the model that a local Llama, Mistral, Qwen2 or Qwen3 folder describes.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``, or shards with an index, or
            ``pytorch_model.bin``. Quantised layers of AWQ, GPTQ, compressed-tensors and FP8 stay
            quantised.
        device: Device of the weights, which are copied one tensor at a time.
        dtype: Data type that the weights are converted to.
        group: Ranks that split the model; see ``ShardedLlama``. Each reads its part alone.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or unsupported.
        ConfigError: An argument has a wrong type, or the ranks cannot split the model evenly.
    """
    folder = as_folder("load_checkpoint", folder)
    device = require_device("load_checkpoint", device)
    check_dtype("load_checkpoint", dtype)
    settings = dict(read_quantized_config(folder))
    layout = stored_layout(settings)
    if layout is not None:
        for name in ("quantization_config", "compression_config"):
            settings.pop(name, None)
    config = LlamaConfig.from_dict(settings)
    stored = StoredWeights(folder)
    with torch.device("meta"):
        model = whole = LlamaModel(config).to(dtype)
        if group is not None:
            model = ShardedLlama(config, group).to(dtype)
    optional = frozenset({_HEAD}) if config.tie_word_embeddings else frozenset()
    if layout is not None:
        fill_quantized(model, stored, layout, device, optional=optional)
        _tie(model, has_head=_HEAD in stored.forms)
    elif isinstance(model, ShardedLlama):
        part, expected = partial(part_of, group=group), whole.state_dict()
        stored.fill(model, device, optional=optional, expected=expected, part_of=part)
        model.tie_weights()
    else:
        stored.fill(model, device, optional=optional)
        _tie(model, has_head=_HEAD in stored.forms)
    store_by_columns(model)
    return model.eval().requires_grad_(False)


def checkpoint_dtype(folder: str | Path) -> torch.dtype:
    """Return the data type in which a model folder stores its embedding, read without the weights.

    float32 if it is none of float16, bfloat16 and float32.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError: The folder is neither a string nor a path.
    """
    forms = StoredWeights(as_folder("checkpoint_dtype", folder)).forms
    _, name = forms.get(_EMBEDDING, ([], ""))
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)


def save_checkpoint(model: LlamaModel, folder: str | Path) -> None:
    """Write a model, in its current dtype, as a folder that transformers can load.

    Creates the folder; overwrites ``config.json`` and ``model.safetensors`` in it.

    Raises:
        ConfigError: An argument has a wrong type.
    """
    folder = as_folder("save_checkpoint", folder)
    require_type("save_checkpoint", "model", model, LlamaModel, "a LlamaModel")
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[_HEAD]
    write_folder(folder, model.config.to_dict(), state)


def _tie(model: LlamaModel, *, has_head: bool) -> None:
    """Tie the head to the embedding, after checking that a stored head equals the embedding."""
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    if model.config.tie_word_embeddings and has_head and not torch.equal(head, embedding):
        raise CheckpointError(
            f"{_HEAD} differs from {_EMBEDDING}, but config.json sets tie_word_embeddings. Set it "
            f"to false, or remove {_HEAD} from the checkpoint."
        )
    model.tie_weights()
