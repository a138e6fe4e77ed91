"""The layout of a transformers model, learnt from one forward.

No architecture is known by name: keys and values are those that reach the attention, and recurrent
states and index keys are those that the model's own cache holds after the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine.attention import AbsorbedProjections
from graphkit.errors import ConfigError, GraphkitError
from graphkit.models.cache import CacheUse
from graphkit.models.fusion.observation import agree
from graphkit.models.layout import (
    AttentionLayer,
    IndexLayer,
    LatentSizes,
    ModelLayout,
    RecurrentLayer,
)
from graphkit.models.running import AttentionCall, LatentRows, attending
from graphkit.ops.paged_attention import MAX_HEAD_DIM, MAX_REST_DIM


def learn_layout(model: PreTrainedModel) -> ModelLayout:
    """Run a model over two tokens with its own cache, and return what the cache then holds.

    The model attends through the registry's ``graphkit``, see ``attention``.

    Raises:
        ConfigError: A layer keeps something that graphkit has no pool for.
    """
    cache = CacheUse(model)
    probe = _Probe(model, cache)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    inputs = {"input_ids": ids, "position_ids": positions, **cache.passed()}
    if cache.has_index_keys:
        probe.mask = ids.new_ones(1, 1, 2, 2, dtype=torch.bool).tril()
        inputs["attention_mask"] = probe.mask
    attend = attending(probe.attend, positions[0])
    with torch.no_grad(), cache.observed(probe.check), attend:
        _run_alone(model, inputs)
    cached = cache.cached_layers()
    if cached > len(probe.attention):
        raise ConfigError(
            f"{type(model).__name__} caches keys and values in {cached} layers, but "
            f"{len(probe.attention)} attend through the attention registry of transformers. "
            "graphkit cannot serve the others.",
            field="folder_or_model",
        )
    recurrent = probe.recurrent_layers()
    if not probe.attention and not recurrent:
        raise ConfigError(
            f"{type(model).__name__} keeps nothing that graphkit has a pool for: it does not "
            "attend through the attention registry of transformers, and has no recurrent states in "
            "its cache.",
            field="folder_or_model",
        )
    return ModelLayout(tuple(probe.attention), recurrent, probe.index_layers())


def _run_alone(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Run a model that was not changed but for its attention.

    Raises:
        ConfigError: It fails.
    """
    try:
        model(use_cache=True, **inputs)
    except GraphkitError:
        raise
    except Exception as error:  # the code of a model may raise anything
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{type(model).__name__} fails for two tokens: {type(error).__name__}: {reason}. Check "
            "its configuration; graphkit cannot serve a model with a cache or a mask of its own.",
            field="folder_or_model",
        ) from error


@dataclass
class _Probe:
    model: PreTrainedModel
    cache: CacheUse
    attention: list[AttentionLayer] = field(default_factory=list)
    mask: torch.Tensor | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        name = self._name(call.module)
        others = [key for key, value in call.others.items() if value is not self.mask]
        if call.selected is not None and call.window:
            others += ["indices and sliding_window together"]
        if others:
            raise ConfigError(
                f"{name} ({type(call.module).__name__}) passes {', '.join(others)} to its "
                "attention, which graphkit does not compute.",
                field="folder_or_model",
            )
        _, key_heads, _, key_size = call.key.shape
        layer = AttentionLayer(
            name, key_heads, key_size, call.value.shape[-1], call.scaling, call.window,
            self.cache.length_arguments.get(call.module, ""), self._latent(call),
        )  # fmt: skip
        self.attention.append(layer)
        _, heads, rows, _ = call.query.shape
        return call.query.new_zeros(1, rows, heads, call.value.shape[-1])

    def check(self, module: nn.Module, output: Any) -> None:
        """Check what a module returns, if it uses recurrent states or index keys."""
        is_tensor, name = isinstance(output, torch.Tensor), f"({type(module).__name__})"
        if module in dict(self.cache.indexers.values()) and not (
            is_tensor
            and not output.is_floating_point()
            and output.dtype != torch.bool
            and output.shape[:2] == (1, 2)
        ):
            raise ConfigError(
                f"{self._name(module)} {name} caches index keys, but does not return the positions "
                "of the keys that each row selects, which graphkit needs.",
                field="folder_or_model",
            )
        if module in dict(self.cache.mixers.values()) and not is_tensor:
            raise ConfigError(
                f"{self._name(module)} {name} has recurrent states and returns a "
                f"{type(output).__name__}: graphkit runs such modules if they return one tensor.",
                field="folder_or_model",
            )

    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]:
        layers = []
        for index, states in self.cache.recurrent_states().items():
            module, argument = self.cache.mixers.get(index, (self.model, ""))
            if not argument:
                raise ConfigError(
                    f"layer {index} of {type(self.model).__name__} has recurrent states, but no "
                    "module that takes the cache reads them from it.",
                    field="folder_or_model",
                )
            layers.append(
                RecurrentLayer(
                    name=self._name(module),
                    cache_argument=argument,
                    shapes={kind: tuple(state.shape) for kind, state in states.items()},
                    dtypes={kind: state.dtype for kind, state in states.items()},
                )
            )
        return tuple(layers)

    def index_layers(self) -> tuple[IndexLayer, ...]:
        layers = []
        for index, (module, argument) in self.cache.indexers.items():
            keys = self.cache.index_keys(index)
            layers.append(IndexLayer(self._name(module), argument, keys.shape[-1], keys.dtype))
        return tuple(layers)

    def _latent(self, call: AttentionCall) -> LatentSizes | None:
        """Return what a module stores if keys and values are linear in it."""
        argument, latents, rotated = self.cache.stored.pop(call.module, ("", call.key, call.value))
        rank, size = latents.shape[-1], rotated.shape[-1]
        heads, plain = call.key.shape[1], call.key.shape[-1] - size
        is_shared = latents.shape[1] == rotated.shape[1] == 1 and call.query.shape[1] == heads
        fits = plain > 0 and rank <= MAX_HEAD_DIM and size <= MAX_REST_DIM
        if not (argument and is_shared and fits):
            return None
        for name, linear in call.module.named_modules():
            shape = (heads * (plain + call.value.shape[-1]), rank)
            if not isinstance(linear, nn.Linear) or getattr(linear, "bias", None) is not None:
                continue
            weight: Any = linear.weight
            if type(weight.data) is not torch.Tensor or tuple(weight.shape) != shape:
                continue
            rows = LatentRows(latents, rotated, AbsorbedProjections(weight, heads, plain))
            made = replace(call, latents=rows).expanded()
            if agree((call.key, call.value), (made.key, made.value)):
                path = f"{self._name(call.module)}.{name}"
                return LatentSizes(rank, size, path, argument)
        return None

    def _name(self, module: nn.Module) -> str:
        return next((name for name, each in self.model.named_modules() if each is module), "?")
