"""The cache of transformers: how a model uses it, and what takes its place in a prepared model.

Everything that graphkit assumes of the interface is here, checked on transformers 5.17 to 5.24.
The argument that takes the cache is ``cache`` from 5.24 on, and ``past_key_values`` or
``cache_params`` before. Modules with recurrent states read them by ``get_conv_state`` and
``get_recurrent_state`` from 5.21 on; before, they reached into the layers of the cache.
"""

# ruff: noqa: ARG002 - the signatures are those of transformers.Cache
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from graphkit.errors import ConfigError
from graphkit.models.running import IndexBatch, hooked
from graphkit.models.versions import RECURRENT
from graphkit.models.wrapper.model_logits import cache_argument

_STATE_METHODS = (
    "get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state",
)  # fmt: skip


class CacheUse:
    """An empty cache of a model, and what the modules of the model do with it in a forward.

    Attributes:
        mixers: Module that reads the recurrent states of a layer, and its argument that takes the
            cache, by index of the layer.
        indexers: The same of index keys.
        length_arguments: Argument of the modules that read how many tokens are cached.
        stored: Argument, keys and values of the modules that store these.
        has_index_keys: Whether a layer of the cache keeps index keys.

    Raises:
        ConfigError: transformers creates no cache for the configuration.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        try:
            self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        except Exception as error:  # what a damaged setting leads to
            raise ConfigError(
                f"transformers creates no cache for {type(model).__name__}: "
                f"{type(error).__name__}: {error}. Check its configuration.",
                field="folder_or_model",
            ) from error
        self._argument = cache_argument(model)
        self.mixers: dict[int, tuple[nn.Module, str]] = {}
        self.indexers: dict[int, tuple[nn.Module, str]] = {}
        self.length_arguments: dict[nn.Module, str] = {}
        self.stored: dict[nn.Module, tuple[str, torch.Tensor, torch.Tensor]] = {}
        layers = self._cache.layers
        self.has_index_keys = any(hasattr(layer, "update_indexer") for layer in layers)
        self._running: list[tuple[nn.Module, str]] = []

    def passed(self) -> dict[str, Any]:
        """Return the cache as an argument of the model; empty if the model takes none."""
        return {self._argument: self._cache} if self._argument else {}

    @contextmanager
    def observed(self, check: Callable[[nn.Module, Any], None]) -> Iterator[None]:
        """Note what modules do with the cache, and call ``check`` with each and its result."""
        cache, running = self._cache, self._running

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append((module, _receiver(module, args, kwargs)))

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            running.pop()
            if output is not None:
                check(module, output)

        def noting(method: Any, modules: dict[int, tuple[nn.Module, str]]) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                passed = signature(method).bind(*args, **kwargs).arguments
                modules.setdefault(passed["layer_idx"], running[-1])
                return method(*args, **kwargs)

            return call

        count_tokens, store = cache.get_seq_length, cache.update

        def update(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            module, argument = running[-1]
            self.stored[module] = argument, keys, values
            return store(keys, values, *args, **kwargs)

        def get_seq_length(*args: Any, **kwargs: Any) -> int:
            self.length_arguments.update(running[-1:])
            return count_tokens(*args, **kwargs)

        for name in filter(partial(hasattr, cache), _STATE_METHODS):
            setattr(cache, name, noting(getattr(cache, name), self.mixers))
        if hasattr(cache, "update_indexer"):
            cache.update_indexer = noting(cache.update_indexer, self.indexers)  # type: ignore[method-assign]
        cache.get_seq_length = get_seq_length  # type: ignore[method-assign]
        cache.update = update  # type: ignore[method-assign, assignment]
        with hooked(self._model.modules(), enter, leave, always_call=True):
            yield

    def cached_layers(self) -> int:
        """Return how many layers cached keys and values."""
        return sum(1 for layer in self._cache.layers if getattr(layer, "keys", None) is not None)

    def recurrent_states(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the states of one sequence, by index of the layer, and by kind and number.

        Raises:
            ConfigError: The interface of states is that of an older version.
        """
        states = {}
        for index, layer in enumerate(self._cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                if not hasattr(self._cache, "get_conv_state"):
                    oldest = ".".join(map(str, RECURRENT))
                    raise ConfigError(
                        f"{type(self._model).__name__} has recurrent layers, which need "
                        f"transformers {oldest} or newer; this is {transformers.__version__}.",
                        field="folder_or_model",
                    )
                states[index] = {
                    f"{kind}{number}": state[0]
                    for kind in ("conv", "recurrent")
                    for number, state in getattr(layer, f"{kind}_states").items()
                    if state is not None
                }
        return states

    def index_keys(self, layer: int) -> torch.Tensor:
        """Return the index keys of a layer that has some."""
        keys: torch.Tensor = self._cache.layers[layer].indexer_keys  # type: ignore[union-attr]
        return keys


def _receiver(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the parameter of a module's forward that received the cache, or an empty string."""
    passed = [*kwargs.items(), *zip(signature(module.forward).parameters, args, strict=False)]
    return next((name for name, value in passed if isinstance(value, Cache)), "")


class PastLength:
    """A cache with a length and no contents, for a module that counts positions from its length.

    Args:
        positions: Position of each row in its request, [T].
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the difference between the position and the index of each row, [T]."""
        return self._positions - torch.arange(
            len(self._positions), dtype=self._positions.dtype, device=self._positions.device
        )

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return keys and values; graphkit's attention stores them."""
        return keys, values


class LatentCache:
    """The cache that one module with latent attention sees.

    Attributes:
        rows: Latents and rotated keys of the rows, [1, 1, T, R] and [1, 1, T, P]; ``None`` before
            the module stores them.
    """

    def __init__(self) -> None:
        self.rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, latents: torch.Tensor, rotated: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the latents of the rows, and return those of the first one."""
        self.rows = latents, rotated
        return latents[:, :, :1], rotated[:, :, :1]


class IndexCache:
    """The cache that one indexer sees."""

    def __init__(self, batch: IndexBatch, number: int) -> None:
        self._batch, self._number = batch, number

    def update_indexer(
        self, keys: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Store the index keys of the rows, [B, W, I], and return those of all positions."""
        (pool, layer), layout = self._batch.pools[self._number], self._batch.layout
        pool.set_index_k_buffer(layer, self._batch.out_cache_loc, layout.pack(keys))
        (key_of_all,) = layout.keys(pool.get_index_k_buffer(layer))
        return key_of_all


class StateCache:
    """The cache that one recurrent layer sees while it computes rows.

    Args:
        states: States before the rows, ``[B, *shape]``, by kind and number, such as ``conv0``;
            that of a new request is zeros, as in transformers. Without any, the rows look like a
            prompt: the functions of the layer have the states.

    Attributes:
        states: States after the rows.
    """

    def __init__(self, states: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        self.states, self._has_states = dict(states), bool(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last columns of the convolution's input, or ``None`` without any."""
        return self.states.get(f"conv{state_idx}")

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Append columns, and return all that the convolution reads."""
        if not self._has_states:
            return conv_states
        before = self.states[f"conv{state_idx}"]
        columns = torch.cat([before, conv_states.to(before.dtype)], -1)
        self.states[f"conv{state_idx}"] = columns[..., -before.shape[-1] :]
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state, or ``None`` without one."""
        return self.states.get(f"recurrent{state_idx}")

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Set the recurrent state, and return it."""
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return whether there are states before the rows."""
        return self._has_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Return false: states are those after the last row."""
        return False
