"""The live inputs of each mode.

Everything used as an index pads to 0: row 0 and slot 0 are reserved for pads, which stand at the
tail.

A batch that a caller builds may hold torch tensors, on the device or the CPU, or numpy arrays.
The view that a forward receives holds device tensors at fixed addresses, padded to a captured size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.fields import MODEL_DTYPE, Axis, Pad, Rows, declare
from graphkit.errors import InputError

if TYPE_CHECKING:
    from graphkit.attention import AttentionMetadata


@dataclass(kw_only=True, eq=False)
class Inputs:
    """What the inputs of all modes share.

    Attributes:
        attention: The attention backend's metadata of this batch; set for the forward.
        width: Most rows of a request, set where they vary from request to request.
    """

    counted_by: ClassVar[tuple[str, ...]] = ("input_ids", "positions", "out_cache_loc")
    """Fields that tell how many rows a batch has."""
    width_is_fixed: ClassVar[bool] = False
    """Whether rows per request are the captured ones without a graph, too."""

    req_pool_indices: Rows = declare(
        Axis.REQUEST, torch.int64, "row of the request in the request pool; row 0 is the dummy"
    )
    seq_lens: Rows = declare(
        Axis.REQUEST, torch.int32, "tokens of the request, as its mode counts them", pad=Pad.SEQ_LEN
    )
    input_ids: Rows = declare(Axis.TOKEN, torch.int64, "token ids")
    positions: Rows = declare(Axis.TOKEN, torch.int64, "position of each token in its request")
    out_cache_loc: Rows = declare(
        Axis.TOKEN, torch.int64, "KV slot that each token writes; slot 0 is the dummy"
    )
    attention: AttentionMetadata | None = None
    width: int | None = None

    @property
    def batch_size(self) -> int:
        """Requests (B).

        Raises:
            InputError: No field per request says how many.
        """
        try:
            return self.req_pool_indices.shape[0]  # type: ignore[no-any-return]
        except (AttributeError, IndexError, TypeError):
            return self._count("req_pool_indices", "seq_lens")

    @property
    def num_tokens(self) -> int:
        """Rows (T); an idle batch may leave them out.

        Raises:
            InputError: No field per token says how many.
        """
        try:
            return self.input_ids.shape[0]  # type: ignore[no-any-return]
        except (AttributeError, IndexError, TypeError):
            is_given = any(getattr(self, name) is not None for name in self.counted_by)
            return self._count(*self.counted_by) if is_given or self.batch_size else 0

    @property
    def tokens_per_request(self) -> int:
        """Rows per request, from the batch itself; 0 for an idle batch."""
        if self.width is not None:
            return self.width
        return self.num_tokens // self.batch_size if self.batch_size else 0

    @classmethod
    def row_counts(cls, batch: Any) -> NDArray[np.int64] | None:  # noqa: ARG003
        """Rows of each request where they vary, int64 [B], if the host can see them."""
        return None

    @classmethod
    def check(cls, batch: Any, tokens: int, width: int, ragged: bool) -> None:
        """Refuse a batch whose fields contradict each other, as far as the host can see.

        Args:
            batch: Live rows, each field as an attribute; bound ones may be missing.
            tokens: How many rows it has.
            width: Most rows of a request.
            ragged: Whether requests may have fewer.

        Raises:
            InputError: They do; ``field`` names one.
        """

    def _count(self, *names: str) -> int:
        """Rows of the first field that is there; bound fields are left out of a batch."""
        for name in names:
            shape = getattr(getattr(self, name), "shape", ())
            if shape:
                return int(shape[0])
        raise InputError(
            f"field {names[0]!r} is missing, or is no array. Give a tensor or a numpy array.",
            field=names[0],
        )


@dataclass(kw_only=True, eq=False)
class TargetVerifyInputs(Inputs):
    """The drafted tokens that the target scores; DECODE is the case of one token per request.

    ``seq_lens`` counts the committed tokens before this step's rows.

    Shapes:
        req_pool_indices: [B] int64. seq_lens: [B] int32.
        input_ids, positions, out_cache_loc: [T] int64, T = B * W.
        custom_mask: [B, W, W] bool, query by key; True is visible. It covers the tree alone.
        input_embeds: [T, H] in the model's dtype. mrope_positions: [3, T] int64.
    """

    custom_mask: Rows = declare(
        Axis.REQUEST,
        torch.bool,
        "which drafted tokens each drafted token sees",
        pad=True,  # a row that sees nothing would make a softmax NaN
        row=("W", "W"),
        optional=True,
    )
    input_embeds: Rows = declare(
        Axis.TOKEN,
        MODEL_DTYPE,
        "embeddings in place of input_ids",
        row=("H",),
        optional=True,
        on_device=True,
    )
    mrope_positions: Rows = declare(
        Axis.TOKEN, torch.int64, "temporal, height and width positions", lead=3, optional=True
    )
