"""Weight files of a model, safetensors or ``torch.save``: find them, check them, read tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphkit.errors import CheckpointError

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

Form = tuple[list[int], str]
"""Shape and dtype of a stored tensor, the dtype as safetensors names it."""
ADVICE = "Correct config.json, or write a CaptureTarget for this model."
"""What to do about a tensor that a language model does not have."""


def shard_files(folder: Path, index: Mapping[str, object]) -> list[Path]:
    """Return the files of an index.

    Raises:
        CheckpointError: The index has no valid ``weight_map``, or a file is missing.
    """
    names = index.get("weight_map")
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


def check_tensors(
    forms: Mapping[str, Form],
    expected: Mapping[str, Tensor],
    *,
    advice: str = ADVICE,
) -> None:
    """Check that the stored tensors are those of the model.

    Args:
        forms: Shape and dtype of the stored tensors, by name.
        expected: Tensors of the model, by name.
        advice: What to do about a tensor that the model does not have, for the error.

    Raises:
        CheckpointError: A tensor is missing, is unexpected, or has the wrong shape
            or kind of dtype.
    """
    if missing := sorted(expected.keys() - forms.keys()):
        raise CheckpointError(
            f"the checkpoint has no {abbreviate(missing)}, which its config.json requires. "
            "Download all weights, or correct config.json."
        )
    if extra := sorted(n for n in forms.keys() - expected.keys() if not _is_redundant(n)):
        raise CheckpointError(
            f"the checkpoint has {abbreviate(extra)}, which the model of its config.json does not "
            f"have. {advice}"
        )
    for name in sorted(expected.keys() & forms.keys()):
        _check_form(name, forms[name], expected[name])


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


def _check_form(name: str, form: Form, expected: Tensor) -> None:
    shape, dtype = form
    if shape != list(expected.shape):
        raise CheckpointError(
            f"{name} has shape {shape}, but config.json requires {list(expected.shape)}. Correct "
            "config.json."
        )
    allowed = _FLOATS if expected.is_floating_point() else _INTEGERS
    if dtype not in allowed:
        raise CheckpointError(
            f"{name} is stored as {dtype}, but only {', '.join(allowed)} are supported. Use an "
            "unquantised checkpoint."
        )


def _is_redundant(name: str) -> bool:
    """Return whether a tensor follows from the config: rotary frequencies of older exports."""
    return name.endswith("rotary_emb.inv_freq")
