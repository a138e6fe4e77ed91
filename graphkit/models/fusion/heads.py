"""Replaces attention modules, of any class, that rotate all of their heads.

Suffixes: T rows, N query heads, M key-value heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, permutations
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphkit.engine.attention import ProjectedHeads
from graphkit.models.fusion.latents import LatentAttention, latent_candidates
from graphkit.models.fusion.linears import MergedLinears
from graphkit.models.fusion.norms import Norm
from graphkit.models.fusion.observation import ModuleCall, agree, random_rows, run_at
from graphkit.models.layout import AttentionLayer
from graphkit.models.quantization.linear import QuantizedLinear
from graphkit.models.running import AttentionCall, running_forward


@dataclass(frozen=True, slots=True, eq=False)
class RotatedAttention:
    """Attention over heads that are projected at once, normalised and rotated.

    Attributes:
        call: An observed call of the attention, without latents and selected keys. Its rows are
            replaced by those of the forward.
        place: Index or name of the argument with the hidden states.
        qkv: Projects to queries, keys and values of rows side by side, in parts on request.
        frequencies: Angle per position of each pair of elements, [D / 2] float32; zeros rotate
            nothing, and fill the place of elements that are not rotated.
        norms: Norms of queries and keys; ``None`` without.
        out: The projection of the attended values.
        form: Form of the module's output, whose only tensor is the projected one.
        buffer: The frequencies of rotated elements, in the memory of the model.
        rotated: Elements of a head that are rotated; 0 for all.
        gated: Whether the sigmoid of a gate behind each query multiplies its attended values.
        factor: Factor of cosine and sine.
    """

    call: AttentionCall
    place: int | str
    qkv: Callable[..., torch.Tensor]
    frequencies: torch.Tensor
    norms: tuple[Norm, Norm] | None
    out: nn.Module
    form: TreeSpec
    buffer: torch.Tensor
    rotated: int = 0
    gated: bool = False
    factor: float = 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; takes its arguments."""
        running, (query_norm, key_norm) = running_forward(), self.norms or (None, None)
        rows = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        parts = self.qkv(rows) if self.gated else self.qkv(rows, split_k_partials=True)
        heads = ProjectedHeads(
            parts.reshape(*parts.shape[: not self.gated], -1, parts.shape[-1]),
            running.positions,
            self.frequencies,
            self.call.query.shape[1],
            self.call.key.shape[1],
            query_norm.weight if query_norm else None,
            key_norm.weight if key_norm else None,
            query_norm.eps if query_norm else 0.0,
            rows.dtype,
            self.rotated,
            self.gated,
            self.factor,
        )
        attended = running.attend(replace(self.call, heads=heads))
        leaves = [None] * self.form.num_leaves
        flat = attended.flatten(2)
        if self.gated:
            both = parts[..., : 2 * flat.shape[-1]].unflatten(-1, (heads.query_heads, 2, -1))
            flat = flat * torch.sigmoid(both[..., 1, :]).flatten(2)
        leaves[0] = self.out(flat)
        return tree_unflatten(leaves, self.form)


def find_rotated_attention(
    calls: Sequence[tuple[ModuleCall, torch.Tensor]],
    latents: Mapping[nn.Module, AttentionLayer],
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
    norms: Mapping[nn.Module, Norm],
) -> dict[nn.Module, RotatedAttention | LatentAttention]:
    """Return the called modules that are attention of rotated heads, or over latents.

    Args:
        calls: Observed calls of the model, each with its positions.
        latents: Modules with latent attention, and what the layout has of them.
        linears: Modules that are products.
        merged: Those of them that are merged, with their group.
        norms: Modules that are norms.
    """
    root = calls[0][0]
    by_module: dict[nn.Module, list[tuple[ModuleCall, torch.Tensor]]] = defaultdict(list)
    for observed, positions in calls:
        for call in observed.walk():
            if call.attention and "forward" not in vars(call.module):
                by_module[call.module].append((call, positions))
    frequencies = _frequencies(root.module)
    replacements: dict[nn.Module, RotatedAttention | LatentAttention] = {}
    for module, observations in by_module.items():
        call = observations[0][0]
        candidates: Iterator[RotatedAttention | LatentAttention] = chain(
            _candidates(call, linears, merged, norms, frequencies),
            latent_candidates(call, latents.get(module), linears, norms, frequencies),
        )
        for candidate in candidates:
            if all(_computes_the_same(candidate, *observation) for observation in observations):
                replacements[module] = candidate
                break
    return replacements


def _candidates(
    call: ModuleCall,
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
    norms: Mapping[nn.Module, Norm],
    frequencies: Sequence[tuple[torch.Tensor, float]],
) -> Iterator[RotatedAttention]:
    """Yield what an attention module may compute; its first and its last product are in all."""
    used = [inner for inner in call.calls if inner.module in linears]
    leaves, form = tree_flatten(call.output)
    if len(call.attention) != 1 or len(used) < 2 or any(leaf is not None for leaf in leaves[1:]):
        return
    (attention,), first, out = call.attention, used[0], used[-1].module
    (_, heads, _, size), key_heads = attention.query.shape, attention.key.shape[1]
    rows = first.only_input()
    place = None if rows is None else call.place(rows)
    qkv = merged.get(first.module, first.module)
    layers = qkv.layers if isinstance(qkv, MergedLinears) else (first.module,)
    columns = [len(layer.weight) for layer in layers]  # type: ignore[arg-type]
    split = [heads * size, key_heads * size, key_heads * size]
    with_gates = [2 * heads * size, *split[1:]]
    gated = columns in (with_gates, [sum(with_gates)])
    if place is None or not (gated or columns in (split, [sum(split)])) or out in layers:
        return
    if attention.latents is not None or attention.selected is not None:
        return
    if not isinstance(first.module, nn.Linear | QuantizedLinear):
        return
    if attention.key.shape[-1] != size or attention.value.shape[-1] != size or attention.others:
        return
    if any(isinstance(value, dict | list) for value in (*call.args, *call.kwargs.values())):
        return  # the module may write into it, such as keys that other layers read (Gemma 3n)
    of_heads = [
        norms[inner.module]
        for inner in call.calls
        if inner.module in norms and len(norms[inner.module].weight) == size
    ]
    pairs: list[tuple[Norm, Norm] | None] = [
        (one, other) for one, other in permutations(of_heads, 2) if one.eps == other.eps
    ]
    for pair in pairs or [None]:
        for angles, factor in frequencies:
            rotated = 2 * len(angles)
            if rotated <= size and (rotated == size or size % 2 == 0):
                missing = size // 2 - len(angles)
                padded = pad(angles, (0, missing)) if missing else angles
                yield RotatedAttention(
                    attention, place, qkv, padded, pair, out, form, angles, rotated % size, gated,
                    factor,
                )  # fmt: skip


def _computes_the_same(
    candidate: RotatedAttention | LatentAttention, call: ModuleCall, positions: torch.Tensor
) -> bool:
    """Compare a candidate with its module on random rows."""
    args, kwargs = list(call.args), dict(call.kwargs)
    arguments: Any = args if isinstance(candidate.place, int) else kwargs
    arguments[candidate.place] = random_rows(arguments[candidate.place], seed=0)
    output, (attention,) = run_at(positions, call.module.forward, *args, **kwargs)
    got, (other,) = run_at(positions, candidate, *args, **kwargs)
    return agree((output, *_values(attention)), (got, *_values(other.expanded())))


def _values(call: AttentionCall) -> list[Any]:
    return [getattr(call, field.name) for field in fields(call) if field.name != "module"]


def _frequencies(model: nn.Module) -> list[tuple[torch.Tensor, float]]:
    """Return what may be frequencies of a rotation, and the factor of its cosine and sine.

    Frequencies are float buffers of one dimension, or zeros. Modules of rotations have the factors
    as attributes, one or one per type of layer.
    """
    vectors, seen = list[tuple[torch.Tensor, float]](), set[int]()
    for module in model.modules():
        factors = {
            float(value): None
            for name, value in vars(module).items()
            if name.endswith("attention_scaling") and isinstance(value, int | float)
        }
        for buffer in module.buffers(recurse=False):
            if buffer.dim() == 1 and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                vectors += [(buffer.float(), factor) for factor in factors or {1.0: None}]
    zeros = {len(vector): torch.zeros_like(vector) for vector, _ in vectors}
    return [*vectors, *((vector, 1.0) for vector in zeros.values())]
