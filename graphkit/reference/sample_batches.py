"""Sample batches of each forward mode, drawn from prefilled requests.

Hidden states are on the device, as in an engine. All other fields are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphkit.buffers import (
    AcceptedCounts,
    DraftExtendInputs,
    DraftInputs,
    Inputs,
    MultiLayerDraftExtendInputs,
    TargetVerifyInputs,
)
from graphkit.reference.prefilled_requests import PrefilledRequests
from graphkit.spec import ForwardMode

Chosen = NDArray[np.int64]
"""Indices of the requests in a batch, [B]."""

IntArray = NDArray[np.integer[Any]]


class SampleBatches:
    """Draws batches of random requests, deterministic for the same arguments.

    Half of the draft tokens continue the text, as correct drafts do; the others are random bytes.

    Args:
        requests: Prefilled by the models of all modes that are drawn.
    """

    def __init__(self, requests: PrefilledRequests) -> None:
        self.requests, self._spec = requests, requests.spec
        self._samplers: dict[ForwardMode, Callable[[Chosen, np.random.Generator], Inputs]] = {
            ForwardMode.DECODE: self._decode,
            ForwardMode.TARGET_VERIFY: self._verify,
            ForwardMode.DRAFT: self._draft,
            ForwardMode.DRAFT_EXTEND: self._extend,
            ForwardMode.DRAFT_EXTEND_V2: self._extend_v2,
            ForwardMode.MULTI_LAYER_EAGLE: self._multi_layer,
        }

    def __call__(self, mode: ForwardMode, batch_size: int, seed: int) -> Inputs:
        """Return a batch, as ``CaptureTarget.sample_batch`` requires."""
        random = np.random.default_rng([seed, batch_size, list(self._samplers).index(mode)])
        chosen = random.permutation(self.requests.count)[:batch_size]
        return self._samplers[mode](chosen, random)

    def _decode(self, chosen: Chosen, _random: np.random.Generator) -> Inputs:
        positions = self.requests.lengths[chosen]
        return TargetVerifyInputs(
            **self._committed(chosen),
            input_ids=self.requests.texts[chosen, positions],
            positions=positions,
            out_cache_loc=self.requests.slots[chosen, positions],
        )

    def _verify(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        width = self._spec.num_draft_tokens
        request, positions = chosen[:, None], self._positions(chosen, width)
        mask, depth = None, np.arange(width)
        if self._spec.topk > 1:
            mask, depth = random_trees(len(chosen), width, random)
        tokens, is_drafted = self.requests.texts[request, positions], np.arange(width) > 0
        return TargetVerifyInputs(
            **self._committed(chosen),
            input_ids=_corrupt_half(tokens, is_drafted, random).ravel(),
            positions=(positions[:, :1] + depth).ravel(),
            out_cache_loc=self.requests.slots[request, positions].ravel(),
            custom_mask=mask,
        )

    def _draft(self, chosen: Chosen, _random: np.random.Generator) -> Inputs:
        """Return a DRAFT batch; each branch has S consecutive slots."""
        requests, topk = self.requests, self._spec.topk
        positions = self._positions(chosen, topk * self._spec.num_steps)
        return DraftInputs(
            **self._committed(chosen),
            topk_p=requests.topk_p[chosen],
            topk_index=requests.topk_index[chosen],
            hidden_states=requests.hidden_states[requests.on_device(chosen)],
            positions=requests.lengths[chosen].repeat(topk),
            out_cache_loc=requests.slots[chosen[:, None], positions].ravel(),
        )

    def _extend(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        """Return a DRAFT_EXTEND batch of the accepted tokens alone, packed."""
        accepted, width = self._accepted(chosen, random), self._spec.num_steps + 1
        positions = self._positions(chosen, width)[np.arange(width) < accepted[:, None]]
        return DraftExtendInputs(
            **self._extending(chosen, accepted, positions, accepted),
            input_ids=self.requests.texts[chosen.repeat(accepted), positions + 1],
        )

    def _extend_v2(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        return DraftExtendInputs(**self._all_rows(chosen, random))

    def _multi_layer(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        fields = self._all_rows(chosen, random)
        starts = np.arange(len(chosen)) * self._spec.num_draft_tokens
        select_index = starts + fields["num_accepted_drafts"]
        return MultiLayerDraftExtendInputs(**fields, select_index=select_index)

    def _all_rows(self, chosen: Chosen, random: np.random.Generator) -> dict[str, Any]:
        """Return the fields of W rows per request; rows behind the accepted ones are arbitrary."""
        accepted, width = self._accepted(chosen, random), self._spec.num_draft_tokens
        positions = self._positions(chosen, width)
        whole = np.full(len(chosen), width, dtype=np.int32)
        tokens = self.requests.texts[chosen[:, None], positions + 1]
        is_rejected = np.arange(width) >= accepted[:, None]
        fields = self._extending(chosen, whole, positions.ravel(), accepted)
        return fields | {"input_ids": _corrupt_half(tokens, is_rejected, random).ravel()}

    def _extending(
        self, chosen: Chosen, lengths: IntArray, positions: IntArray, accepted: IntArray
    ) -> dict[str, Any]:
        """Return the fields of draft-extend: ``lengths`` rows of each request at ``positions``."""
        requests, request = self.requests, chosen.repeat(lengths)
        return {
            "req_pool_indices": requests.rows[chosen],
            "seq_lens": requests.lengths[chosen].astype(np.int32) + lengths,
            "extend_seq_lens": lengths,
            "positions": positions,
            "out_cache_loc": requests.slots[request, positions],
            "hidden_states": requests.features[
                requests.on_device(request), requests.on_device(positions)
            ],
            **AcceptedCounts.from_tokens(accepted).fields(),
        }

    def _committed(self, chosen: Chosen) -> dict[str, Any]:
        """Return the fields of modes whose ``seq_lens`` count committed tokens only."""
        lengths = self.requests.lengths[chosen].astype(np.int32)
        return {"req_pool_indices": self.requests.rows[chosen], "seq_lens": lengths}

    def _positions(self, chosen: Chosen, width: int) -> NDArray[np.int64]:
        """Return the positions behind each prefix, [B, width]."""
        return self.requests.lengths[chosen][:, None] + np.arange(width)

    def _accepted(self, chosen: Chosen, random: np.random.Generator) -> IntArray:
        """Draw the number of accepted tokens, from the bonus token alone to a whole path."""
        return random.integers(1, self._spec.num_steps + 2, len(chosen)).astype(np.int32)


def random_trees(
    count: int, width: int, random: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Draw trees in which each node's parent is a random earlier node.

    Returns:
        The mask, bool [B, W, W], set at [b, i, j] if j is i or an ancestor of i; and the depth of
        each node, int64 [B, W].
    """
    mask = np.zeros((count, width, width), dtype=np.bool_)
    depth = np.zeros((count, width), dtype=np.int64)
    each = np.arange(count)
    mask[:, 0, 0] = True
    for node in range(1, width):
        parent = random.integers(0, node, count)
        mask[:, node] = mask[each, parent]
        mask[:, node, node] = True
        depth[:, node] = depth[each, parent] + 1
    return mask, depth


def _corrupt_half(
    tokens: NDArray[np.int64], is_drafted: NDArray[np.bool_], random: np.random.Generator
) -> NDArray[np.int64]:
    """Replace half of the draft tokens by random bytes."""
    is_replaced = (random.random(tokens.shape) < 0.5) & is_drafted
    return np.where(is_replaced, random.integers(0, 128, tokens.shape), tokens)
