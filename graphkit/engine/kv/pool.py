"""Base of the KV pools: buffers by layer, several pools as one, and who uses a pool."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from graphkit.config import is_int, require_int, require_type
from graphkit.engine.kv.contracts import require_device
from graphkit.errors import AttentionError, ConfigError, short_repr
from graphkit.ops.inference import allocates
from graphkit.ops.kv_cache import buffer_table, move_kv


class PoolUse:
    """The use of pools by an engine or a runner, until ``end`` or until the object is gone.

    An engine allocates rows and slots of its pools by itself. Two engines would allocate the same
    ones, so an engine is the only user of its pools. Runners leave rows and slots to their caller,
    who may use several runners over one pool.

    Args:
        user: Name of the user's class.
        pools: Its pools, of any class.
        allocates: Whether the user allocates rows and slots.

    Raises:
        ConfigError: See ``check_unused``.
    """

    def __init__(self, user: str, pools: Iterable[object], *, allocates: bool) -> None:
        self.user, self.pools, self.allocates = user, tuple(pools), allocates
        check_unused(user, self.pools, allocates=allocates)
        _OPEN[id(self)] = self

    def end(self) -> None:
        """Let others use the pools. May be called repeatedly."""
        _OPEN.pop(id(self), None)


_OPEN: WeakValueDictionary[int, PoolUse] = WeakValueDictionary()
"""All uses that have not ended, by id."""


def check_unused(user: str, pools: Iterable[object], *, allocates: bool) -> None:
    """Check that nothing else allocates from pools.

    Raises:
        ConfigError: An open engine uses a pool, or the user is an engine and anything uses it.
    """
    for pool in pools:
        if _other_user(pool, allocates) is not None:
            gc.collect()  # a user may have been dropped in a reference cycle
        other = _other_user(pool, allocates)
        if other is not None:
            raise ConfigError(
                f"{user} cannot use this {type(pool).__name__}: an open {other.user} uses it, and "
                f"{'both' if other.allocates and allocates else 'the engine'} would allocate rows "
                f"and KV slots that the other one writes to. Close the {other.user} first, or "
                "create pools for each.",
                field="target",
            )


def _other_user(pool: object, allocates: bool) -> PoolUse | None:
    uses = [use for reference in _OPEN.valuerefs() if (use := reference()) is not None]
    for use in uses:
        if (allocates or use.allocates) and any(pool is other for other in use.pools):
            return use
    return None


class TokenToKVPool:
    """Buffers addressed by token slot, at least one per layer.

    Slots ``page_size`` to ``page_size + size - 1`` are for tokens. The first page is the dummy that
    pad rows write to and read from; its contents are undefined. Buffers have whole pages, at least
    ``size + page_size`` slots, and keep their addresses for the life of the pool, so captured
    graphs may hold them.

    Subclasses are dataclasses, whose fields are the arguments of their constructors: further sizes
    beside these. ``_allocate`` makes their buffers.

    Args:
        size: Tokens that the pool holds.
        page_size: Slots per page.
        dtype: float16, bfloat16 or float32.
        layer_num: Layers; 0 for a model without a KV cache.
        device: Device of the buffers.

    Attributes:
        dtypes: Data types that a pool of this class may have.

    Raises:
        ConfigError: An argument is out of range; ``field`` names it.
    """

    device: torch.device
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str,
    ) -> None:
        self.size, self.page_size, self.dtype, self.layer_num = size, page_size, dtype, layer_num
        self.__post_init__(device)

    @allocates
    def __post_init__(self, device: torch.device | str) -> None:
        name = type(self).__name__
        for field, value in vars(self).items():  # the arguments, all sizes but one
            if field != "dtype":
                require_int(name, field, value, least=int(field != "layer_num"))
        if self.dtype not in self.dtypes:
            *names, last = (str(known).removeprefix("torch.") for known in self.dtypes)
            raise ConfigError(
                f"{name}.dtype must be {', '.join(names)} or {last}, got {short_repr(self.dtype)}.",
                field="dtype",
            )
        self.device = require_device(name, device)
        self._tensors: dict[str, torch.Tensor] = {}
        self._allocate()

    def _allocate(self) -> None:
        """Make the buffers with ``_add_buffers``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by its kind and layer, such as ``key.0``."""
        return dict(self._tensors)

    def get_scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of the keys and the values of a layer, [M] float32 each.

        A key is its stored number multiplied by the scale. ``None`` where a pool stores keys and
        values without a scale.

        Raises:
            AttentionError: There is no such layer.
        """
        self._checked(layer)
        return None, None

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots ``src_loc`` to slots ``tgt_loc`` in every buffer of every layer.

        Every source is read before any target is written, so the slots may overlap. A slot is a
        target at most once, except slot 0 as its own source, which is padding. Two launches on the
        current stream, none without layers or slots. Never synchronises; may be captured.

        Shapes:
            tgt_loc, src_loc: one shape, int64.

        Raises:
            AttentionError: A tensor has the wrong shape, dtype or device, or, on the CPU, a slot is
                outside the pool. On CUDA such a pair moves nothing.
        """
        if self._tensors and (tgt_loc.numel() or src_loc.numel()):
            move_kv(list(self._tensors.values()), self._table, tgt_loc, src_loc)

    def _add_buffers(
        self, kind: str, *row: int, dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Allocate a buffer of zeros per layer and add it to ``tensors`` and ``move_kv_cache``."""
        pages = 1 + -(-self.size // self.page_size)
        shape = (pages * self.page_size, *row)
        buffers = [
            torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
            for _ in range(self.layer_num)
        ]
        self._tensors |= {f"{kind}.{layer}": buffer for layer, buffer in enumerate(buffers)}
        if self._tensors:
            self._table = buffer_table(list(self._tensors.values()))
        return buffers

    def _checked(self, layer: int) -> int:
        if not is_int(layer) or not 0 <= layer < self.layer_num:
            raise AttentionError(
                f"KV pool has no layer {short_repr(layer)}: it has {self.layer_num}, counted from "
                "0. Construct the pool with the model's layer_num."
            )
        return layer


class LayerGroupKVPool:
    """A ``KVPool`` of groups of layers; a token has the same slot in all of them.

    Args:
        groups: One pool per group, of the same size, page size and device.

    Attributes:
        size: Tokens that each of the pools holds.
        page_size: Slots per page.

    Raises:
        ConfigError: There is no group, one is no ``TokenToKVPool``, or two of them differ.
    """

    def __init__(self, groups: Sequence[TokenToKVPool]) -> None:
        name, expected = type(self).__name__, "a KV pool"
        require_type(name, "groups", groups, Sequence, "a sequence of KV pools")
        for number, pool in enumerate(groups):
            require_type(name, f"groups[{number}]", pool, TokenToKVPool, expected)
        shapes = {(pool.size, pool.page_size, pool.device) for pool in groups}
        if len(shapes) != 1:
            raise ConfigError(
                f"the pools have (size, page_size, device) {sorted(map(str, shapes))}, expected "
                "one. Create all pools with the same values.",
                field="groups",
            )
        self.groups = tuple(groups)
        self.size, self.page_size, self.device = shapes.pop()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every buffer by group, kind and layer, such as ``0.key.3``."""
        return {
            f"{group}.{name}": tensor
            for group, pool in enumerate(self.groups)
            for name, tensor in pool.tensors().items()
        }

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots in every buffer of every layer; see ``TokenToKVPool.move_kv_cache``."""
        for pool in self.groups:
            pool.move_kv_cache(tgt_loc, src_loc)
