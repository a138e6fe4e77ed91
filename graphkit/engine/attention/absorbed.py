"""The absorbed projections of multi-head latent attention.

Suffixes: T rows, N heads, D = P + E head size of queries, P elements without position, E rotated
elements, R rank of the latents, V head size of values.
"""

# ruff: noqa: N803, N806 - suffixes of tensor names are dimensions
from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkit.config import require_int
from graphkit.errors import ConfigError
from graphkit.ops.decoder import with_norm
from graphkit.ops.latent_heads import rotate_pairs, store_latent_heads
from graphkit.ops.linear import multiply_heads


class AbsorbedProjections:
    """Applies the up-projection of latents to queries and results, so that attention reads latents.

    A model with multi-head latent attention makes the keys and values of its heads from latents by
    one matrix, ``kv_b_proj``. Since attention is linear in both, the matrix may act on queries and
    results instead (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Then all heads share the latents
    as keys and values, and the cache is an ``MLATokenToKVPool``::

        attended = backend.attend(layer, absorbed.query(query), latents, rotated, slots, metadata)
        out = absorbed.value(attended)

    The methods enqueue a matrix product per head on the current stream. They never synchronise and
    may be captured.

    Args:
        weight: Weight of ``kv_b_proj``, [N * (P + V), R]: rows of each head's keys, then of its
            values. It is kept, not copied.
        num_heads: Heads (N).
        qk_nope_head_dim: Elements of a key that a latent is projected to (P).

    Raises:
        ConfigError: The weight has no row for values, or does not divide into heads.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, qk_nope_head_dim: int) -> None:
        require_int("AbsorbedProjections", "num_heads", num_heads)
        require_int("AbsorbedProjections", "qk_nope_head_dim", qk_nope_head_dim)
        rows, rest = divmod(weight.shape[0], num_heads) if weight.dim() == 2 else (0, 0)
        if rest or rows <= qk_nope_head_dim:
            raise ConfigError(
                f"AbsorbedProjections.weight is {list(weight.shape)}: expected num_heads x "
                f"(qk_nope_head_dim + v_head_dim) rows with num_heads {num_heads} and "
                f"qk_nope_head_dim {qk_nope_head_dim}. Pass the weight of kv_b_proj.",
                field="weight",
            )
        self._key_NPR, self._value_NVR = weight.view(num_heads, rows, -1).split(
            [qk_nope_head_dim, rows - qk_nope_head_dim], 1
        )

    def query(self, query_TND: torch.Tensor) -> torch.Tensor:
        """Return queries of latents.

        Shapes:
            query_TND: [T, N, P + E], the rotated part last. Returns [T, N, R + E].
        """
        latent_NTR, rotated_TNE = self.query_parts(query_TND)
        return torch.cat((latent_NTR.transpose(0, 1), rotated_TNE), -1)

    def query_parts(self, query_TND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of ``query``, [N, T, R] and [T, N, E]; the latter is a view."""
        plain_TNP, rotated_TNE = query_TND.tensor_split([self._key_NPR.shape[1]], -1)
        return multiply_heads(plain_TNP.transpose(0, 1), self._key_NPR), rotated_TNE

    def keys_and_values(self, latent_T1R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of latents without their rotated part, and the values.

        Shapes:
            latent_T1R: [T, 1, R]. Returns [T, N, P] and [T, N, V].
        """
        latent_NTR = latent_T1R.transpose(0, 1).expand(len(self._key_NPR), -1, -1)
        key_NTP = multiply_heads(latent_NTR, self._key_NPR.transpose(1, 2))
        value_NTV = multiply_heads(latent_NTR, self._value_NVR.transpose(1, 2))
        return key_NTP.transpose(0, 1), value_NTV.transpose(0, 1)

    def value(self, attended_TNR: torch.Tensor) -> torch.Tensor:
        """Return the values of attended latents.

        Shapes:
            attended_TNR: [T, N, R]. Returns [T, N, V].
        """
        value_NTV = multiply_heads(attended_TNR.transpose(0, 1), self._value_NVR.transpose(1, 2))
        return value_NTV.transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """Projected rows of a layer with latent attention, before they are normalised and rotated.

    Attributes:
        query: [T, N, P + E], the part that is rotated last.
        latents: Latents and the keys that are rotated, [T, R + E].
        positions: [T] int32 or int64.
        frequencies: Angle per position of each pair, [E / 2] float32.
        weight: Weight of the norm of the latents, [R].
        eps: Of the norm.
        factor: See ``store_latent_heads``, like the next two.
        interleaved: Whether neighbours are a pair.
        splits: Whether interleaved pairs are split.
        projections: The projections of the layer.
    """

    query: torch.Tensor
    latents: torch.Tensor
    positions: torch.Tensor
    frequencies: torch.Tensor
    weight: torch.Tensor
    eps: float
    factor: float
    interleaved: bool
    splits: bool
    projections: AbsorbedProjections

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries, [T, N, P + E], latents, [T, 1, R], and keys, [T, 1, E]."""
        rank, size = len(self.weight), 2 * len(self.frequencies)
        rotation = (
            self.positions, self.frequencies, self.factor, self.interleaved, self.splits
        )  # fmt: skip
        plain, rotated = self.query.split([self.query.shape[-1] - size, size], -1)
        latent, key = self.latents.split([rank, size], -1)
        query = torch.cat((plain, rotate_pairs(rotated, *rotation)), -1)
        latent, key = with_norm(latent, self.weight, self.eps), rotate_pairs(key, *rotation)
        return query, latent[:, None], key[:, None]

    def store(self, cache: torch.Tensor, loc_T: torch.Tensor) -> torch.Tensor:
        """Store latents and keys, and return queries of latents, [T, N, R + E].

        Shapes:
            cache: [slots, 1, R + E], of an ``MLATokenToKVPool``. loc_T: [T] int64.
        """
        return store_latent_heads(
            cache, loc_T, *self.projections.query_parts(self.query), self.latents, self.positions,
            self.frequencies, self.weight, self.eps, self.factor, self.interleaved, self.splits,
        )  # fmt: skip
