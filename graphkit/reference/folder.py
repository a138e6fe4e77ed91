"""Checkpoint folders in Hugging Face layout: ``config.json`` beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphkit.errors import CheckpointError
from graphkit.reference.shards import check_forms, copy_tensors, shard_files, stored_forms

_CONFIG = "config.json"
_WEIGHTS, _BIN = "model.safetensors", "pytorch_model.bin"
_INDEX = "model.safetensors.index.json"


def default_folder(name: str) -> Path:
    """Return the folder of trained weights that ships with the package under ``name``."""
    return Path(__file__).parent / "weights" / name


def read_config(folder: Path) -> Mapping[str, object]:
    """Read ``config.json``.

    Raises:
        CheckpointError: There is no such folder or file, or it is not a JSON object.
    """
    return _read_json(folder, _CONFIG)


class StoredWeights:
    """The tensors of a folder, known by name and form before any is read.

    Args:
        folder: Holds one file of safetensors, else its shards with an index, else PyTorch's one.

    Attributes:
        forms: Each tensor's shape and dtype.

    Raises:
        CheckpointError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._files = _weight_files(folder)
        self.forms = {
            name: form for file in self._files for name, form in stored_forms(file).items()
        }

    def fill(
        self,
        module: nn.Module,
        device: torch.device | str,
        *,
        optional: frozenset[str] = frozenset(),
        unread: frozenset[str] = frozenset(),
    ) -> None:
        """Move a module from the meta device to ``device`` and copy all of its tensors.

        Args:
            module: Expects what its state dict names, in the dtypes that it has.
            device: Where the tensors go, one at a time.
            optional: What may be absent, and then stays uninitialised.
            unread: What may be there and is left.

        Raises:
            CheckpointError: A tensor is missing, unexpected or of another form.
        """
        forms = {name: form for name, form in self.forms.items() if name not in unread}
        check_forms(forms, module.state_dict(), optional)
        module.to_empty(device=device)
        for file in self._files:
            copy_tensors(file, module.state_dict())


def write_folder(folder: Path, config: Mapping[str, object], state: Mapping[str, Tensor]) -> None:
    """Write a config and tensors of one dtype, which the config then tells.

    Makes the folder; overwrites ``config.json`` and ``model.safetensors`` in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    text = json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True)
    (folder / _CONFIG).write_text(text + "\n")
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        return shard_files(folder, _read_json(folder, _INDEX))
    if (folder / _BIN).is_file():
        return [folder / _BIN]
    raise CheckpointError(
        f"{str(folder)!r} holds neither {_WEIGHTS} nor {_INDEX} nor {_BIN}. Fetch the weights, or "
        "convert them to safetensors."
    )


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
