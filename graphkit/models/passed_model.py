"""What ``load`` is passed in the place of a folder or a model: what it is, and what to pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from graphkit.errors import ConfigError
from graphkit.models.layout import output_head
from graphkit.models.prepare import PREPARED

_EXPECTED = {
    "folder_or_model": "a folder, or a causal language model of transformers",
    "draft": "a folder with an EAGLE, EAGLE-3 or DFLASH head or a causal language model, 'mtp', or "
    "such a head or model",
}


def check_type(passed: object, field: str, heads: tuple[type, ...] = ()) -> None:
    """Refuse what is neither a folder nor a model.

    Args:
        passed: The argument.
        field: Its name.
        heads: Further types that are allowed.

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
