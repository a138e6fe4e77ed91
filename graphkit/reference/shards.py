"""Weight files of one model, safetensors or PyTorch's own: find, check, copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphkit.errors import CheckpointError

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_SPELLING = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}

Form = tuple[list[int], str]
"""A stored tensor's shape and dtype, the latter as safetensors spells it."""


def shard_files(folder: Path, index: Mapping[str, object]) -> list[Path]:
    """Return the files that an index names, each of which exists.

    Raises:
        CheckpointError: The index has no ``weight_map``, or a file is missing.
    """
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(
            f"the index in {str(folder)!r} has no weight_map of tensors to files. Fetch it again."
        )
    files = [folder / name for name in sorted(set(names.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{str(folder)!r} holds no {few(missing)}. Fetch all weights, as safetensors."
        )
    return files


def stored_forms(file: Path) -> dict[str, Form]:
    """Return each stored tensor's form without reading the tensors.

    Raises:
        CheckpointError: The file is of neither format, is cut short, or holds more than tensors.
    """
    if file.suffix == ".bin":
        return {
            name: (list(tensor.shape), _SPELLING.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in _read_bin(file, "meta").items()
        }
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 -- no dict
            return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a safetensors file: {error}. Fetch it again."
        ) from error


def check_forms(
    forms: Mapping[str, Form], expected: Mapping[str, Tensor], optional: frozenset[str]
) -> None:
    """Compare what is stored with what the model has.

    Raises:
        CheckpointError: A tensor is missing and not optional, is unexpected, or has another shape
            or a dtype of another kind.
    """
    if missing := sorted(expected.keys() - forms.keys() - optional):
        raise CheckpointError(
            f"the checkpoint lacks {few(missing)}, which config.json calls for. Fetch all weights, "
            "or mend config.json."
        )
    if extra := sorted(n for n in forms.keys() - expected.keys() if not _is_harmless(n)):
        raise CheckpointError(
            f"the checkpoint holds {few(extra)}, which config.json does not call for. Mend "
            "config.json, or bring your own forward."
        )
    for name in sorted(expected.keys() & forms.keys()):
        _check_form(name, forms[name], expected[name])


def copy_tensors(file: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy those stored tensors that have a target, one at a time, into their target's dtype."""
    with torch.no_grad():
        for name, tensor in _read(file, frozenset(targets)):
            targets[name].copy_(tensor)


def few(names: list[str]) -> str:
    """Join the first three names and count the rest."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(file: Path, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".bin":
        yield from ((name, x) for name, x in _read_bin(file, "cpu").items() if name in names)
        return
    with safe_open(file, framework="pt") as stored:
        for name in names & set(stored.keys()):
            yield name, stored.get_tensor(name)


def _read_bin(file: Path, device: str) -> dict[str, Tensor]:
    """Read a file of ``torch.save`` without running what it may hold."""
    try:
        stored = torch.load(file, map_location=device, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise CheckpointError(
            f"{str(file)!r} is not a file of PyTorch tensors: {reason}. Fetch it again."
        ) from error
    if not isinstance(stored, dict) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise CheckpointError(
            f"{str(file)!r} holds more than tensors by name. Fetch the weights alone."
        )
    return stored


def _check_form(name: str, form: Form, expected: Tensor) -> None:
    shape, dtype = form
    if shape != list(expected.shape):
        raise CheckpointError(
            f"{name} has shape {shape}, but config.json makes it {list(expected.shape)}. Mend "
            "config.json."
        )
    allowed = _FLOATS if expected.is_floating_point() else _INTEGERS
    if dtype not in allowed:
        raise CheckpointError(
            f"{name} is stored as {dtype}, but only {', '.join(allowed)} can be read. Fetch an "
            "unquantised checkpoint."
        )


def _is_harmless(name: str) -> bool:
    """Older exports store the rotary frequencies, which follow from the config."""
    return name.endswith("rotary_emb.inv_freq")
