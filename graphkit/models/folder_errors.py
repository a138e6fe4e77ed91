"""Errors of folders that transformers cannot load: which file is wrong, and what to do."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from graphkit.errors import CheckpointError
from graphkit.models.folder import StoredWeights

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
    folder: str | Path, error: Exception, *, what: str = "", trust_remote_code: bool = False
) -> CheckpointError:
    """Return the error of a part of a folder that transformers refuses.

    It names ``config.json`` instead if transformers cannot read that.

    Args:
        folder: The folder.
        error: What transformers raised. It names its argument ``trust_remote_code`` if the folder
            has Python code that it needs.
        what: What cannot be loaded, such as its tokenizer; empty for the folder.
        trust_remote_code: As for ``load``.
    """
    if "trust_remote_code" in str(error):
        return CheckpointError(
            f"{what or folder} needs Python code from its folder, which runs on this machine. Read "
            "the code, then pass trust_remote_code=True, or --trust-remote-code to a command."
        )
    try:
        _settings(folder, trust_remote_code)
    except CheckpointError as wrong:
        return wrong
    return _refusal(what or str(folder), error)


def model_error(
    folder: Path, error: Exception, *, trust_remote_code: bool = False, note: str = ""
) -> CheckpointError:
    """Return the error of a folder whose model transformers refuses.

    It names ``config.json`` if transformers creates no model from it, or else a file of weights
    that is missing or damaged.

    Args:
        folder: The folder.
        error: As for ``load_error``.
        trust_remote_code: As for ``load``.
        note: Ends the text of an error with another cause.
    """
    if "trust_remote_code" in str(error):
        return load_error(folder, error)
    try:
        config = _settings(folder, trust_remote_code)
        _create(folder, config, trust_remote_code)
        StoredWeights(folder)
    except CheckpointError as wrong:
        return wrong
    return _refusal(str(folder), error, note)


def _settings(folder: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and what it calls raise errors of many classes
        raise _refusal(f"config.json of {folder}", error, _ADVICE) from error
    return config


def _create(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
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
