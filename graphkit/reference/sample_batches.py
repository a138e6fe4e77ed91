"""A realistic live batch of each mode, of requests in the middle of a text.

What the device makes in an engine (hidden states) lies on the device, the rest is numpy.
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
from graphkit.reference.sample_requests import SampleRequests
from graphkit.spec import ForwardMode

Chosen = NDArray[np.int64]
"""Which of the requests are in a batch, [B]."""

Numbers = NDArray[np.integer[Any]]


class SampleBatches:
    """Makes batches of random requests; the same for the same arguments.

    Half of the drafted tokens continue the text, as good drafts do; the others are random bytes.

    Args:
        requests: Read by the models whose modes are asked for.
    """

    def __init__(self, requests: SampleRequests) -> None:
        self.requests, self._spec = requests, requests.spec
        self._makers: dict[ForwardMode, Callable[[Chosen, np.random.Generator], Inputs]] = {
            ForwardMode.DECODE: self._decode,
            ForwardMode.TARGET_VERIFY: self._verify,
            ForwardMode.DRAFT: self._draft,
            ForwardMode.DRAFT_EXTEND: self._extend,
            ForwardMode.DRAFT_EXTEND_V2: self._extend_v2,
            ForwardMode.MULTI_LAYER_EAGLE: self._multi_layer,
        }

    def __call__(self, mode: ForwardMode, batch_size: int, seed: int) -> Inputs:
        """A batch, as ``CaptureTarget.sample_batch`` wants it."""
        random = np.random.default_rng([seed, batch_size, list(self._makers).index(mode)])
        chosen = random.permutation(self.requests.count)[:batch_size]
        return self._makers[mode](chosen, random)

    def _decode(self, chosen: Chosen, _random: np.random.Generator) -> Inputs:
        place = self.requests.lengths[chosen]
        return TargetVerifyInputs(
            **self._committed(chosen),
            input_ids=self.requests.texts[chosen, place],
            positions=place,
            out_cache_loc=self.requests.slots[chosen, place],
        )

    def _verify(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        width = self._spec.num_draft_tokens
        owner, place = chosen[:, None], self._places(chosen, width)
        mask, depth = None, np.arange(width)
        if self._spec.topk > 1:
            mask, depth = random_trees(len(chosen), width, random)
        is_drafted = np.arange(width) > 0
        return TargetVerifyInputs(
            **self._committed(chosen),
            input_ids=_half_wrong(self.requests.texts[owner, place], is_drafted, random).ravel(),
            positions=(place[:, :1] + depth).ravel(),
            out_cache_loc=self.requests.slots[owner, place].ravel(),
            custom_mask=mask,
        )

    def _draft(self, chosen: Chosen, _random: np.random.Generator) -> Inputs:
        """Each branch has S slots in a row."""
        requests, topk = self.requests, self._spec.topk
        place = self._places(chosen, topk * self._spec.num_steps)
        return DraftInputs(
            **self._committed(chosen),
            topk_p=requests.topk_p[chosen],
            topk_index=requests.topk_index[chosen],
            hidden_states=requests.hidden_states[requests.on_device(chosen)],
            positions=requests.lengths[chosen].repeat(topk),
            out_cache_loc=requests.slots[chosen[:, None], place].ravel(),
        )

    def _extend(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        """The accepted tokens alone, packed."""
        accepted, width = self._accepted(chosen, random), self._spec.num_steps + 1
        place = self._places(chosen, width)[np.arange(width) < accepted[:, None]]
        return DraftExtendInputs(
            **self._extending(chosen, accepted, place, accepted),
            input_ids=self.requests.texts[chosen.repeat(accepted), place + 1],
        )

    def _extend_v2(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        return DraftExtendInputs(**self._all_rows(chosen, random))

    def _multi_layer(self, chosen: Chosen, random: np.random.Generator) -> Inputs:
        fields = self._all_rows(chosen, random)
        starts = np.arange(len(chosen)) * self._spec.num_draft_tokens
        select_index = starts + fields["num_accepted_drafts"]
        return MultiLayerDraftExtendInputs(**fields, select_index=select_index)

    def _all_rows(self, chosen: Chosen, random: np.random.Generator) -> dict[str, Any]:
        """W rows of every request; those behind the accepted ones are what verify left there."""
        accepted, width = self._accepted(chosen, random), self._spec.num_draft_tokens
        place, whole = self._places(chosen, width), np.full(len(chosen), width, dtype=np.int32)
        tokens = self.requests.texts[chosen[:, None], place + 1]
        is_left = np.arange(width) >= accepted[:, None]
        fields = self._extending(chosen, whole, place.ravel(), accepted)
        return fields | {"input_ids": _half_wrong(tokens, is_left, random).ravel()}

    def _extending(
        self, chosen: Chosen, lengths: Numbers, place: Numbers, accepted: Numbers
    ) -> dict[str, Any]:
        """What a draft model catches up on: ``lengths`` rows of each request, at ``place``."""
        requests, owner = self.requests, chosen.repeat(lengths)
        return {
            "req_pool_indices": requests.rows[chosen],
            "seq_lens": requests.lengths[chosen].astype(np.int32) + lengths,
            "extend_seq_lens": lengths,
            "positions": place,
            "out_cache_loc": requests.slots[owner, place],
            "hidden_states": requests.features[
                requests.on_device(owner), requests.on_device(place)
            ],
            **AcceptedCounts.from_tokens(accepted).fields(),
        }

    def _committed(self, chosen: Chosen) -> dict[str, Any]:
        """The fields of modes that append to what is committed."""
        lengths = self.requests.lengths[chosen].astype(np.int32)
        return {"req_pool_indices": self.requests.rows[chosen], "seq_lens": lengths}

    def _places(self, chosen: Chosen, width: int) -> NDArray[np.int64]:
        """The positions behind each prefix, [B, width]."""
        return self.requests.lengths[chosen][:, None] + np.arange(width)

    def _accepted(self, chosen: Chosen, random: np.random.Generator) -> Numbers:
        """Accepted tokens, the bonus token included: anything from it alone to a whole path."""
        return random.integers(1, self._spec.num_steps + 2, len(chosen)).astype(np.int32)


def random_trees(
    count: int, width: int, random: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Trees whose every node hangs on an earlier one: mask bool [B, W, W] and depth int64 [B, W].

    mask[b, i, j] says that node i sees node j: j is i or one of its ancestors.
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


def _half_wrong(
    tokens: NDArray[np.int64], is_drafted: NDArray[np.bool_], random: np.random.Generator
) -> NDArray[np.int64]:
    """The tokens, half of the drafted ones replaced by random bytes."""
    is_guess = (random.random(tokens.shape) < 0.5) & is_drafted
    return np.where(is_guess, random.integers(0, 128, tokens.shape), tokens)
