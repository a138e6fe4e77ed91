"""Settings of a runner: the optional ones by name, their checks, and what they prepare."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch

from graphkit.buffers import AttentionBackend, Limits, StepInputs
from graphkit.config import BufferSizes, is_int, require_type
from graphkit.errors import ConfigError, short_repr
from graphkit.graphs import Backend
from graphkit.ops.argument_rules import describe
from graphkit.spec import ForwardMode, SpecConfig

if TYPE_CHECKING:
    from graphkit.runners.ranks import RunnerGroup

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class RunnerOptions(TypedDict, total=False):
    """Optional arguments of every runner. ``Runner`` documents them and has their defaults."""

    batch_sizes: Iterable[int] | None
    device: torch.device | str
    backend: Backend | None
    multiple_of: int
    optional_fields: Collection[str] | None
    bound_fields: Mapping[str, torch.Tensor] | None
    mutable_state: Mapping[str, torch.Tensor] | None
    check: bool | None
    draft_token_map: torch.Tensor | None
    group: RunnerGroup | None


def show_options(
    base: Callable[..., Any], options_type: type = RunnerOptions
) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator for a function that passes ``**options`` on to ``base``.

    ``help`` and ``inspect.signature`` then list the options, with the defaults of ``base``.

    Args:
        base: Declares the options and their defaults.
        options_type: Typed dictionary of the options that are passed on.
    """
    known = inspect.signature(base).parameters
    options = [known[name] for name in options_type.__annotations__]

    def decorate(constructor: FunctionT) -> FunctionT:
        signature = inspect.signature(constructor)
        own = [kept for kept in signature.parameters.values() if kept.kind is not kept.VAR_KEYWORD]
        shown = signature.replace(parameters=[*own, *options])
        constructor.__signature__ = shown  # type: ignore[attr-defined]  # inspect reads it
        return constructor

    return decorate


def check_types(
    runner: type, spec: object, sizes: object, attention: object, check: object = None
) -> None:
    """Check the types of a runner's settings, before anything reads them.

    Raises:
        ConfigError: A setting has another type, or the class declares no mode, or there are more
            branches than draft tokens.
    """
    name = runner.__name__
    if not hasattr(runner, "mode"):
        raise ConfigError(f"{name} declares no mode. Use a subclass such as TargetVerifyRunner.")
    require_type(name, "spec", spec, SpecConfig, "a graphkit.SpecConfig")
    if isinstance(spec, SpecConfig) and spec.is_adaptive:
        raise ConfigError(
            f"{name} runs one draft length, but SpecConfig.num_steps is {spec.num_steps}. Pass one "
            "of SpecConfig.lengths, or use SpecStepRunner or SpeculativeEngine.",
            field="num_steps",
        )
    require_type(name, "sizes", sizes, BufferSizes, "a graphkit.BufferSizes")
    if isinstance(spec, SpecConfig) and isinstance(sizes, BufferSizes):
        vocabulary = sizes.draft_vocab_size or sizes.vocab_size
        if spec.topk > vocabulary:
            raise ConfigError(
                f"SpecConfig.topk is {spec.topk}, but the draft vocabulary has {vocabulary} "
                f"tokens. Set topk to {vocabulary} or less.",
                field="topk",
            )
    backends = (AttentionBackend, NoneType)
    require_type(name, "attention", attention, backends, "a graphkit.AttentionBackend or None")
    require_type(name, "check", check, (bool, NoneType), "True, False or None")


def check_callable(argument: str, value: object) -> None:
    """Check that an argument can be called."""
    if not callable(value):
        raise ConfigError(
            f"{argument} must be a function, got {short_repr(value)}.", field=argument
        )


def check_group(group: object) -> None:
    """Check that an argument is a group of ranks."""
    if group is None:
        return
    from graphkit.runners.ranks import RunnerGroup  # a runner of one process needs none of it

    if not isinstance(group, RunnerGroup):
        raise ConfigError(
            f"group must be a graphkit.RankGroup or None, got {short_repr(group)}. Pass "
            "RankGroup(process_group).",
            field="group",
        )


def check_forward(forward: Any) -> None:
    """Check that a forward, or each of several, is callable."""
    for layer in forward if isinstance(forward, tuple) else (forward,):
        if not callable(layer):
            raise ConfigError(
                f"forward must be callable, got {short_repr(layer)}. Pass a function from the "
                "mode's inputs "
                "to its output.",
                field="forward",
            )


def check_inputs_type(inputs_type: Any, base: type[StepInputs]) -> None:
    """Check that a class is a subclass of a mode's inputs that a runner can assign to."""
    if not (isinstance(inputs_type, type) and issubclass(inputs_type, base)):
        raise ConfigError(
            f"inputs_type must be a subclass of {base.__name__}, got {short_repr(inputs_type)}.",
            field="inputs_type",
        )
    if inputs_type.__setattr__ is not object.__setattr__:
        raise ConfigError(
            f"inputs_type {inputs_type.__name__} restricts assignment. The runner assigns "
            "attention metadata: do not freeze it, and do not define __setattr__.",
            field="inputs_type",
        )


def check_draft_token_map(token_map: Any, sizes: BufferSizes, device: torch.device) -> None:
    """Check the target tokens of a draft vocabulary; ``None`` is not a map. Waits for the device.

    Raises:
        ConfigError: It is not an int64 tensor of the right size on the device, or has a number that
            is not a target token.
    """
    if token_map is None:
        return
    size = sizes.draft_vocab_size or sizes.vocab_size
    expected = ((size,), torch.int64, device)
    is_tensor = isinstance(token_map, torch.Tensor)
    if not is_tensor or (token_map.shape, token_map.dtype, token_map.device) != expected:
        value = describe(token_map) if is_tensor else repr(token_map)
        raise ConfigError(
            f"draft_token_map is {value}, expected [{size}] int64 on {device}: the target token of "
            f"each of the {size} tokens of the draft vocabulary. BufferSizes.draft_vocab_size must "
            "be its length.",
            field="draft_token_map",
        )
    least, most = token_map.min().item(), token_map.max().item()
    if least < 0 or most >= sizes.vocab_size:
        raise ConfigError(
            f"draft_token_map has tokens from {least} to {most}, expected 0 to "
            f"{sizes.vocab_size - 1}. Pass target tokens; d2t of a checkpoint has the differences "
            "from draft to target tokens.",
            field="draft_token_map",
        )


def is_checking(check: bool | None) -> bool:
    """Return whether the checking mode is on; ``None`` reads ``GRAPHKIT_CHECK``."""
    return os.environ.get("GRAPHKIT_CHECK") == "1" if check is None else check


def value_limits(sizes: BufferSizes, attention: AttentionBackend | None) -> Limits:
    """Return the bounds of values, as far as the settings and the attention backend show them."""
    pool: object = getattr(attention, "kv_pool", None)
    requests: object = getattr(getattr(attention, "req_to_token_pool", None), "size", None)
    tokens: object = getattr(pool, "size", None)
    page_size: object = getattr(pool, "page_size", None)
    return Limits(
        sizes.max_context_len,
        sizes.vocab_size,
        requests + 1 if is_int(requests) else None,
        tokens + page_size if is_int(tokens) and is_int(page_size) else None,
    )


def prepare_attention(
    attention: AttentionBackend | None,
    mode: ForwardMode,
    sizes: BufferSizes,
    tokens_per_request: int,
    *,
    may_stay_eager: bool,
) -> str:
    """Prepare an attention backend for a runner.

    Args:
        attention: The backend, if the runner has one.
        mode: Mode under which the backend knows the step.
        sizes: Sizes of the buffers, with the largest captured batch size.
        tokens_per_request: Rows per request.
        may_stay_eager: Whether a backend without support is not an error.

    Returns:
        Why the backend cannot serve graphs; empty if it can.

    Raises:
        ConfigError: The backend does not support the mode, and the mode needs graphs.
    """
    if attention is None:
        return ""
    supports = attention.supports(mode)
    fact = f"attention backend {type(attention).__name__} does not support {mode.name}"
    if not supports and not may_stay_eager:
        raise ConfigError(
            f"{fact}. Pass a backend that does, or attention=None and attend in the forward.",
            field="attention",
        )
    attention.init_state(sizes, sizes.max_batch_size * tokens_per_request)
    return "" if supports else f"{fact} graphs"
