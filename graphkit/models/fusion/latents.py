"""Replaces attention modules, of any class, that attend over latents (DeepSeek-V2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphkit.engine.attention import AbsorbedProjections, LatentHeads
from graphkit.models.fusion.norms import Norm
from graphkit.models.fusion.observation import ModuleCall
from graphkit.models.layout import AttentionLayer
from graphkit.models.running import AttentionCall, running_forward

_PAIRS = (False, False), (True, False), (True, True)
"""Forms of rotations: whether neighbours are a pair, and whether pairs are split."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Attention over latents that are projected with the keys that are rotated.

    Attributes:
        call: An observed call of the attention. Its rows are replaced by those of the forward.
        place: Index or name of the argument with the hidden states.
        query: Modules that make the queries of the hidden states, one after the other.
        latents: Projects to latents and the keys that are rotated, side by side.
        norm: Norm of the latents.
        projection: Linear layer that makes keys and values of latents.
        sizes: Query heads, and elements of a query without its rotated part.
        buffer: Angle per position of each pair, [E / 2] float32.
        out: The projection of the attended values.
        form: Form of the module's output, whose only tensor is the projected one.
        factor: Factor of cosine and sine.
        interleaved: Whether neighbours are a pair.
        splits: Whether interleaved pairs are split.
    """

    call: AttentionCall
    place: int | str
    query: Sequence[nn.Module]
    latents: nn.Module
    norm: Norm
    projection: nn.Module
    sizes: tuple[int, int]
    buffer: torch.Tensor
    out: nn.Module
    form: TreeSpec
    factor: float
    interleaved: bool
    splits: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; takes its arguments."""
        running = running_forward()
        rows = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        query = rows
        for module in self.query:
            query = module(query)
        heads = LatentHeads(
            query[0].unflatten(-1, (self.sizes[0], -1)),
            self.latents(rows)[0],
            running.positions,
            self.buffer,
            self.norm.weight,
            self.norm.eps,
            self.factor,
            self.interleaved,
            self.splits,
            AbsorbedProjections(self.projection.get_parameter("weight"), *self.sizes),
        )
        attended = running.attend(replace(self.call, heads=heads))
        leaves = [None] * self.form.num_leaves
        leaves[0] = self.out(attended.flatten(2))
        return tree_unflatten(leaves, self.form)


def latent_candidates(
    call: ModuleCall,
    layer: AttentionLayer | None,
    linears: Collection[nn.Module],
    norms: Mapping[nn.Module, Norm],
    frequencies: Sequence[tuple[torch.Tensor, float]],
) -> Iterator[LatentAttention]:
    """Yield what an attention module may compute over latents; ``layer`` is its part of the layout.

    The queries are one product of the hidden states, or a product of normalised ones.
    """
    leaves, form = tree_flatten(call.output)
    used = [inner for inner in call.calls if inner.module in linears]
    if layer is None or layer.latent is None or len(call.attention) != 1 or len(used) < 3:
        return
    (attention,), out, size = call.attention, used[-1].module, layer.latent.rotated_size
    if any(leaf is not None for leaf in leaves[1:]):
        return
    if attention.others or attention.selected is not None:
        return
    by_columns: dict[int, list[ModuleCall]] = {}
    for inner in used:
        by_columns.setdefault(inner.output.shape[-1], []).append(inner)
    projection = call.module.get_submodule(layer.latent.projection.removeprefix(f"{layer.name}."))
    no_angles = torch.zeros(size // 2, device=leaves[0].device), 1.0
    fitting = [pair for pair in (*frequencies, no_angles) if 2 * len(pair[0]) == size]
    last_of_query = by_columns.get(layer.heads * layer.key_size, [])
    for latents, last in product(by_columns.get(layer.latent.rank + size, []), last_of_query):
        rows, norm = latents.only_input(), _norm_behind(call, latents, norms)
        place = None if rows is None else call.place(rows)
        query = None if rows is None else _path(call, last, rows)
        if place is None or query is None or norm is None:
            continue
        for (angles, factor), (interleaved, splits) in product(fitting, _PAIRS):
            yield LatentAttention(
                attention, place, query, latents.module, norm, projection,
                (layer.heads, layer.key_size - size), angles, out, form, factor, interleaved,
                splits,
            )  # fmt: skip


def _norm_behind(
    call: ModuleCall, latents: ModuleCall, norms: Mapping[nn.Module, Norm]
) -> Norm | None:
    """Return the norm whose input is part of the output of a call."""
    storage = latents.output.untyped_storage().data_ptr()
    for inner in call.calls:
        rows = inner.only_input()
        shares = rows is not None and rows.untyped_storage().data_ptr() == storage
        if shares and inner.module in norms:
            return norms[inner.module]
    return None


def _path(call: ModuleCall, last: ModuleCall, rows: torch.Tensor) -> list[nn.Module] | None:
    """Return the modules through which rows reach the output of a call; ``None`` if none do."""
    path, value = [last.module], last.only_input()
    while value is not rows:
        before = next((inner for inner in call.calls if inner.output is value), None)
        if before is None or before.only_input() is None:
            return None
        path, value = [before.module, *path], before.only_input()
    return path
