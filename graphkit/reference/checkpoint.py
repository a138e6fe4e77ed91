"""Checkpoint folders in Hugging Face layout: ``config.json`` beside safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from graphkit.errors import CheckpointError
from graphkit.reference.config import LlamaConfig
from graphkit.reference.model import LlamaModel
from graphkit.reference.shards import check_forms, copy_tensors, shard_files, stored_forms

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def default_checkpoint() -> Path:
    """Return the folder of the trained reference model that ships with the package."""
    return Path(__file__).parent / "weights" / "target"


def load_checkpoint(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaModel:
    """Build the model that a local Llama, Qwen2 or Qwen3 checkpoint folder describes.

    Args:
        folder: Holds ``config.json`` and either ``model.safetensors`` or shards with an index.
        device: Where the weights go, one tensor at a time.
        dtype: What the stored weights are converted to.

    Returns:
        The model, in evaluation mode and without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, damaged, unexpected or not supported.
    """
    folder = Path(folder)
    config = LlamaConfig.from_dict(_read_json(folder, _CONFIG))
    files = _weight_files(folder)
    with torch.device("meta"):
        model = LlamaModel(config).to(dtype)
    forms = {name: form for file in files for name, form in stored_forms(file).items()}
    optional = frozenset({_HEAD}) if config.tie_word_embeddings else frozenset()
    check_forms(forms, model.state_dict(), optional)
    model.to_empty(device=device)
    for file in files:
        copy_tensors(file, model.state_dict())
    _tie(model, has_head=_HEAD in forms)
    return model.eval().requires_grad_(False)


def save_checkpoint(model: LlamaModel, folder: str | Path) -> None:
    """Write a model in its own dtype as a folder that transformers loads too.

    Makes the folder; overwrites ``config.json`` and ``model.safetensors`` in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state[_HEAD]
    dtype = str(state[_EMBEDDING].dtype).removeprefix("torch.")
    config = model.config.to_dict() | {"dtype": dtype}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})


def _read_json(folder: Path, name: str) -> Mapping[str, object]:
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint folder {str(folder)!r}. Give a local folder that holds "
            f"{_CONFIG} and {_WEIGHTS}."
        )
    path = folder / name
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(folder)!r} holds no {name}. Give a folder in Hugging Face layout."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}. Fetch it again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} holds no object but {data!r}. Fetch it again.")
    return data


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return shard_files(folder, _read_json(folder, _INDEX))
    raise CheckpointError(
        f"{str(folder)!r} holds neither {_WEIGHTS} nor {_INDEX}. Fetch or convert the weights to "
        "safetensors."
    )


def _tie(model: LlamaModel, *, has_head: bool) -> None:
    """Tie the head, unless the checkpoint stored another one: then config and weights disagree."""
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    if model.config.tie_word_embeddings and has_head and not torch.equal(head, embedding):
        raise CheckpointError(
            f"{_HEAD} differs from {_EMBEDDING}, but config.json ties them. Set "
            "tie_word_embeddings to false, or drop one of the tensors."
        )
    model.tie_weights()
