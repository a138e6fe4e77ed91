"""What load refuses: folders that transformers cannot load, and objects that are no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.folder import StoredWeights
from graphkit.models.layout import output_head
from graphkit.models.prepare import PREPARED

_LIST_OF_TYPES = "Model type should be one of"
"""Begins the list of all classes in an error of transformers 5.23."""
_GUESSES = "This could be because"
"""Begins what transformers 5.23 says of a model type that it does not have."""
_ADVICE = "Correct config.json, or update transformers."


def one_line(error: Exception) -> str:
    """Return the text of an error on one line, with its class."""
    text = " ".join(str(error).partition(_GUESSES)[0].split())
    return f"{type(error).__name__}: {text}".rstrip(" :.")


def load_error(
    folder: str | Path,
    error: Exception,
    *,
    what: str = "",
    trust_remote_code: bool = False,
    note: str = "",
) -> CheckpointError:
    """Return the error of a folder, or a part of it, that transformers refuses.

    It names ``config.json`` if transformers cannot read that, or creates no model from it, or else
    a file of weights that is missing or damaged.

    Args:
        folder: The folder.
        error: What transformers raised. It names its argument ``trust_remote_code`` if the folder
            has Python code that it needs.
        what: A part that needs no model, such as the tokenizer; empty for the model.
        trust_remote_code: As for ``load``.
        note: Ends the text of an error with another cause.
    """
    if "trust_remote_code" in str(error):
        return CheckpointError(
            f"{what or folder} needs Python code from its folder, which runs on this machine. Read "
            "the code, then pass trust_remote_code=True, or --trust-remote-code to a command."
        )
    try:
        config = _settings(folder, trust_remote_code)
        if not what:
            _create(folder, config, trust_remote_code)
            StoredWeights(Path(folder))
    except CheckpointError as wrong:
        return wrong
    return _refusal(what or str(folder), error, note)


def _settings(folder: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise _refusal(f"config.json of {folder}", error, _ADVICE) from error
    return config


def _create(folder: str | Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Create the model of a folder without memory for its weights."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)  # type: ignore[no-untyped-call]
    except Exception as error:  # as above
        if _LIST_OF_TYPES in str(error):
            raise CheckpointError(
                f"{folder} has no causal language model: transformers has none of the type "
                f"{config.model_type!r}. Pass the folder of a causal language model."
            ) from error
        raise _refusal(f"config.json of {folder}", error, _ADVICE) from error


def _refusal(what: str, error: Exception, advice: str = "") -> CheckpointError:
    text = f"{what} cannot be loaded by transformers: {one_line(error)}. {advice}"
    return CheckpointError(text.rstrip())


_EXPECTED = {
    "folder_or_model": "a folder, or a causal language model of transformers",
    "draft": "a folder with an EAGLE, EAGLE-3 or DFLASH head or a causal language model, 'mtp', or "
    "such a head or model",
}


def check_type(passed: object, field: str, heads: tuple[type, ...] = ()) -> None:
    """Refuse what is neither a folder nor a model.

    Raises:
        ConfigError: It is something else, such as a model in a wrapper.
    """
    if isinstance(passed, (str, Path, PreTrainedModel, *heads)):
        return
    name = passed.__name__ if isinstance(passed, type) else type(passed).__name__
    what = f"an object of {name}"
    if isinstance(passed, type):
        what, advice = f"the class {name}", "Pass an instance, or a folder."
    elif isinstance(passed, PreTrainedConfig):
        what = f"a {name}, which has no weights"
        advice = "Pass the folder, or a model that AutoModelForCausalLM creates from it."
    elif isinstance(passed, Mapping):
        what = f"a mapping ({name}), such as a state dict"
        advice = "Load it into a model of transformers (load_state_dict), and pass the model."
    elif hasattr(passed, "peft_config"):
        what = f"a model of peft ({name})"
        advice = "Merge its adapter (merge_and_unload()), and pass the result."
    elif isinstance(inner := _wrapped(passed), nn.Module):
        what = f"a wrapper ({name}) around a {type(inner).__name__}"
        advice = "Pass the model inside: graphkit captures it itself."
    elif isinstance(getattr(passed, "model", None), PreTrainedModel):
        advice = "A model that load returned is ready; pass its folder to load it again."
    else:
        advice = ""
    raise ConfigError(
        f"{field} is {what}, expected {_EXPECTED[field]}. {advice}".rstrip(), field=field
    )


def check_model(model: PreTrainedModel, field: str) -> None:
    """Refuse a model object that graphkit cannot run.

    Raises:
        ConfigError: It has no output head, no weights, an encoder or compiled modules, or ``load``
            has prepared it before.
    """
    name = type(model).__name__
    tensors = (*model.named_parameters(), *model.named_buffers())
    on_meta = next((path for path, tensor in tensors if tensor.is_meta), "")
    compiled = next((path for path, module in model.named_modules() if _is_compiled(module)), None)
    reason = ""
    if PREPARED in vars(model):
        reason = f"{name} was passed to load before, which changed it. Use that result, or a copy."
    elif getattr(model.config, "is_encoder_decoder", False):
        reason = f"{name} has an encoder and a decoder. Pass a causal language model."
    elif not isinstance(output_head(model), nn.Linear):
        reason = (
            f"{name} has no output head, which computes logits of tokens. Pass a causal language "
            "model, such as AutoModelForCausalLM loads from its folder."
        )
    elif on_meta:
        reason = (
            f"{name} has no weights: {on_meta} is on the meta device. Load them first, all on one "
            "device, or pass the folder."
        )
    elif compiled is not None:
        reason = (
            f"{f'{compiled} of ' if compiled else ''}{name} is compiled (torch.compile). Pass the "
            "model as it was: graphkit captures it itself."
        )
    if reason:
        raise ConfigError(reason, field=field)


def _wrapped(passed: Any) -> object:
    """Return the module in a wrapper such as those of torch.compile and of parallel training."""
    names = ("_orig_mod", "module", "base_model", "model")
    inner = (getattr(passed, name, None) for name in names if isinstance(passed, nn.Module))
    return next((module for module in inner if isinstance(module, nn.Module)), None)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
