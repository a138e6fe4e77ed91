"""Checkpoint folders in Hugging Face layout: ``config.json`` and weight files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphkit.errors import CheckpointError, short_repr

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_SAFETENSORS_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
}

_REDUNDANT = "rotary_emb.inv_freq"
"""Ends the names of tensors that follow from the config, of older exports."""
Form = tuple[list[int], str]
"""Shape and dtype of a stored tensor, the dtype as safetensors names it."""


def stored_tensors(file: Path) -> dict[str, Form]:
    """Return the shape and dtype of each tensor in a file without reading the tensors.

    Raises:
        CheckpointError: The file has neither format, is truncated, or contains other objects.
    """
    if file.suffix == ".bin":
        return {
            name: (list(tensor.shape), _SAFETENSORS_DTYPE.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in _read_bin(file, "meta").items()
        }
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 -- not a dict
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a valid safetensors file: {error}. Download it again."
        ) from error


def check_tensors(forms: Mapping[str, Form], expected: Mapping[str, Tensor]) -> None:
    """Check that the stored tensors are those of a draft head.

    Raises:
        CheckpointError: A tensor is missing, is unexpected, or has the wrong shape
            or kind of dtype.
    """
    if missing := sorted(expected.keys() - forms.keys()):
        raise CheckpointError(
            f"the checkpoint has no {abbreviate(missing)}, which its config.json requires. "
            "Download all weights, or correct config.json."
        )
    if extra := sorted(n for n in forms.keys() - expected.keys() if not n.endswith(_REDUNDANT)):
        raise CheckpointError(
            f"the checkpoint has {abbreviate(extra)}, which the model of its config.json does not "
            "have. Use a draft head without them, in the dtype of its training."
        )
    for name in sorted(expected.keys() & forms.keys()):
        (shape, dtype), tensor = forms[name], expected[name]
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {shape}, but config.json requires {list(tensor.shape)}. Correct "
                "config.json."
            )
        allowed = _FLOATS if tensor.is_floating_point() else _INTEGERS
        if dtype not in allowed:
            raise CheckpointError(
                f"{name} is stored as {dtype}, but only {', '.join(allowed)} are supported. Use an "
                "unquantised checkpoint."
            )


def abbreviate(names: list[str]) -> str:
    """Return the first three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def open_tensors(file: Path) -> Callable[[str], Tensor]:
    """Return a function that reads one tensor of a file, which stays open as long as it exists."""
    if file.suffix == ".bin":
        return _read_bin(file, "cpu").__getitem__
    read: Callable[[str], Tensor] = safe_open(file, framework="pt").get_tensor
    return read


def _read_bin(file: Path, device: str) -> dict[str, Tensor]:
    """Load a file of ``torch.save`` without executing code that it may contain."""
    try:
        stored = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # a file that is no pickle fails anywhere in its reader
        reason = str(error).splitlines()[0] if str(error) else "the file is empty"
        raise CheckpointError(
            f"{str(file)!r} is not a file of PyTorch tensors: {reason}. Download it again."
        ) from error
    if not isinstance(stored, dict) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise CheckpointError(
            f"{str(file)!r} must contain a dict from names to tensors and nothing else. Pass a "
            "folder with a plain state dict."
        )
    return stored


_CONFIG, _MODELOPT = "config.json", "hf_quant_config.json"
_WEIGHTS, _BIN = "model.safetensors", "pytorch_model.bin"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Settings of the language model among those of a model with several parts."""


def read_config(folder: Path) -> Mapping[str, object]:
    """Read ``config.json``.

    Raises:
        CheckpointError: The folder or file does not exist, or the file is not a JSON object.
    """
    return _read_json(folder, _CONFIG)


def read_quantized_config(folder: Path) -> Mapping[str, object]:
    """Read ``config.json``, with ``hf_quant_config.json`` as its ``quantization_config``.

    ModelOpt writes that file. The ``quantization_config`` of ``config.json`` goes first.

    Raises:
        CheckpointError: As for ``read_config``.
    """
    config = read_config(folder)
    if config.get("quantization_config") or not (folder / _MODELOPT).is_file():
        return config
    return {**config, "quantization_config": _read_json(folder, _MODELOPT)}


class StoredWeights:
    """Names, shapes and dtypes of the tensors in a folder, read without loading the tensors.

    Args:
        folder: Contains ``model.safetensors``, or ``pytorch_model.bin``, or shards of either with
            an index; the first of these is read, files of safetensors before others. A file that
            ``transformers_weights`` of ``config.json`` names is read instead.

    Attributes:
        forms: Shape and dtype of each tensor, by name.

    Raises:
        CheckpointError: A file is missing or damaged, or two have other numbers of one tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.forms: dict[str, Form] = {}
        self._places: dict[str, Path] = {}
        self._open: dict[Path, Callable[[str], Tensor]] = {}
        for file in _weight_files(folder):
            forms = stored_tensors(file)
            for name in sorted(forms.keys() & self.forms.keys()):
                files = self._places[name], file
                if forms[name] != self.forms[name] or not _same(name, *files):
                    raise CheckpointError(
                        f"{name} has other numbers in {files[0].name} than in {files[1].name}. "
                        f"Download {str(folder)!r} again, into an empty folder."
                    )
            self.forms |= forms
            self._places |= dict.fromkeys(forms, file)

    def tensor(self, name: str) -> Tensor:
        """Return a stored tensor, on the CPU, as it is."""
        file = self._places[name]
        if file not in self._open:
            self._open[file] = open_tensors(file)
        return self._open[file](name)


def _same(name: str, *files: Path) -> bool:
    """Return whether two files have the same bytes of a tensor of one shape and dtype."""
    tensor, other = (open_tensors(file)(name).reshape(-1).view(torch.uint8) for file in files)
    return torch.equal(tensor, other)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights, which ``transformers_weights`` of ``config.json`` may name.

    Raises:
        CheckpointError: There are none, or an index has no valid ``weight_map``, or a file that it
            lists is missing.
    """
    own = read_config(folder).get("transformers_weights") if (folder / _CONFIG).is_file() else None
    known = (_WEIGHTS, _INDICES[0], _BIN, _INDICES[1]) if own is None else (str(own),)
    file = next((name for name in known if (folder / name).is_file()), None)
    if file is None:
        listed = f"none of {_WEIGHTS}, {_BIN} and the index of either"
        what = listed if own is None else f"no {own!r}, the transformers_weights of {_CONFIG}"
        raise CheckpointError(
            f"{str(folder)!r} contains {what}. Download the weights, or convert them to "
            "safetensors."
        )
    if not file.endswith(".index.json"):
        return [folder / file]
    names = _read_json(folder, file).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(
            f"the index in {str(folder)!r} has no weight_map from tensor names to files. Download "
            "it again."
        )
    files = [folder / name for name in sorted(set(names.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{str(folder)!r} contains no {abbreviate(missing)}, which its index lists. Download "
            "all weight files."
        )
    return files


def _read_json(folder: Path, name: str) -> Mapping[str, object]:
    path = folder / name
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} contains no {name}. Pass a folder in Hugging Face layout."
            ) from error
        raise CheckpointError(
            f"the checkpoint folder {str(folder)!r} does not exist. Pass a local folder that "
            f"contains {_CONFIG} and {_WEIGHTS}."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot read {str(path)!r}: {reason}. Pass a folder that can be read."
        ) from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r} is not valid JSON: {error}. Download it again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{str(path)!r} must contain a JSON object, got {short_repr(data)}. Download it again."
        )
    return data
