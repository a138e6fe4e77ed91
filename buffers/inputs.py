"""Live inputs of a captured step: the base class, and the inputs of TARGET_VERIFY and DECODE.

A batch that a caller builds holds torch tensors, on the device or the CPU, or numpy arrays. The
view that a forward receives holds device tensors at fixed addresses, padded to a captured size.
Pad rows are the last rows. A field that is used as an index pads to 0, because row 0 of the
request pool and KV slot 0 are reserved for pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.layout import MODEL_DTYPE, Axis, Pad, Rows, declare, fields_of
from graphkit.errors import InputError

if TYPE_CHECKING:
    from graphkit.buffers.attention import AttentionMetadata


@dataclass(kw_only=True, eq=False)
class StepInputs:
    """Base of the inputs of a captured step.

    A subclass declares each field once, with ``declare``. At least one field has a row per request.

    Attributes:
        attention: Metadata from the attention backend. Set for the forward.
        width: Largest number of rows of a request. Set where requests have different numbers.
        lengths: Rows of each request, int32 [B] on the device. Set in a prefill, whose rows are
            packed: those of a request follow those of the one before it.
        spans: Positions of the rows of each request, on the host. Optional, beside ``lengths``.
        logit_rows: Rows whose logits are read, int64 [N] on the device; ``None`` for all. Set in a
            prefill. A forward may return the logits of these rows alone.
        packs_nodes: Whether packed rows are the first nodes of chains in a verify: recurrent layers
            then keep the state after each row. Not set in a prefill.
    """

    counted_by: ClassVar[tuple[str, ...]] = ()
    """Fields whose length is the number of tokens; all fields per token if empty."""
    width_is_fixed: ClassVar[bool] = False
    """Whether an eager run has the captured number of rows per request, too."""

    attention: AttentionMetadata | None = None
    width: int | None = None
    lengths: torch.Tensor | None = None
    spans: Sequence[range] | None = None
    logit_rows: torch.Tensor | None = None
    packs_nodes: bool | None = None

    @property
    def batch_size(self) -> int:
        """Number of requests (B).

        Raises:
            InputError: No field per request is present.
        """
        return self._count(_counting(type(self), Axis.REQUEST))

    @property
    def num_tokens(self) -> int:
        """Number of rows (T).

        Raises:
            InputError: No field per token is present.
        """
        names = self.token_fields()
        is_given = any(getattr(self, name) is not None for name in names)
        if names and (is_given or self.batch_size):
            return self._count(names)
        return self.batch_size * (self.width or 1)

    @property
    def tokens_per_request(self) -> int:
        """Number of rows per request; 0 for an idle batch."""
        if self.width is not None:
            return self.width
        return self.num_tokens // self.batch_size if self.batch_size else 0

    @classmethod
    def token_fields(cls) -> tuple[str, ...]:
        """Return the fields whose length is the number of tokens."""
        return cls.counted_by or _counting(cls, Axis.TOKEN)

    @classmethod
    def row_counts(cls, batch: Any) -> NDArray[np.int64] | None:  # noqa: ARG003
        """Return the rows of each request of a ragged batch, int64 [B], if the host can read them.

        Args:
            batch: Live rows.
        """
        return None

    @classmethod
    def check(
        cls, batch: Any, tokens: int, width: int, ragged: bool, front_tokens: int | None = None
    ) -> None:
        """Refuse a batch whose fields contradict each other, as far as the host can read them.

        Args:
            batch: Live rows, each field as an attribute. Bound fields may be missing.
            tokens: Number of rows of the batch.
            width: Largest number of rows of a request.
            ragged: Whether requests may have fewer rows.
            front_tokens: Rows of each request before its accepted ones; ``None`` if unknown.

        Raises:
            InputError: The fields contradict each other; ``field`` names one of them.
        """

    def _count(self, names: tuple[str, ...]) -> int:
        """Return the length of the first field that is present."""
        for name in names:
            shape = getattr(getattr(self, name), "shape", ())
            if shape:
                return int(shape[0])
        raise InputError(
            f"field {names[0]!r} is missing or is not an array. Pass a tensor or a numpy array.",
            field=names[0],
        )


def _counting(inputs: type, axis: Axis) -> tuple[str, ...]:
    """Return the fields whose first dimension counts the rows of an axis."""
    if (inputs, axis) not in _COUNTING:
        fields = (field for field in fields_of(inputs) if field.axis is axis)
        names = tuple(field.name for field in fields if not field.lead and not field.flat)
        _COUNTING[inputs, axis] = names
    return _COUNTING[inputs, axis]


_COUNTING: dict[tuple[type, Axis], tuple[str, ...]] = {}
"""Cache of ``_counting``: batches ask in every replay."""


@dataclass(kw_only=True, eq=False)
class Inputs(StepInputs):
    """Fields that the inputs of all forward modes share."""

    counted_by: ClassVar[tuple[str, ...]] = ("input_ids", "positions", "out_cache_loc")

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

    @property
    def batch_size(self) -> int:
        """Number of requests (B).

        Raises:
            InputError: No field per request is present.
        """
        try:  # this runs in every replay
            return self.req_pool_indices.shape[0]  # type: ignore[no-any-return]
        except (AttributeError, IndexError, TypeError):
            return self._count(("req_pool_indices", "seq_lens"))

    @property
    def num_tokens(self) -> int:
        """Number of rows (T). An idle batch may leave the fields per token out.

        Raises:
            InputError: No field per token is present.
        """
        try:
            return self.input_ids.shape[0]  # type: ignore[no-any-return]
        except (AttributeError, IndexError, TypeError):
            is_given = any(getattr(self, name) is not None for name in self.counted_by)
            return self._count(self.counted_by) if is_given or self.batch_size else 0


@dataclass(kw_only=True, eq=False)
class TargetVerifyInputs(Inputs):
    """Drafted tokens that the target scores. DECODE is the case of one token per request.

    ``seq_lens`` counts the committed tokens, without the rows of this step.

    Shapes:
        req_pool_indices: [B] int64. seq_lens: [B] int32.
        input_ids, positions, out_cache_loc: [T] int64, T = B * W.
        custom_mask: [B, W, W] bool, query by key; True is visible. It covers the tree alone.
        input_embeds: [T, H] in the model's dtype. mrope_positions: [3, T] int64.
        token_bitmask: [T, ceil(V / 32)] int32, as ``ops.apply_token_bitmask`` reads it. The runner
        applies it to the forward's logits, in place.
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
        by_address=True,
    )
    mrope_positions: Rows = declare(
        Axis.TOKEN, torch.int64, "temporal, height and width positions", lead=3, optional=True
    )
    token_bitmask: Rows = declare(
        Axis.TOKEN,
        torch.int32,
        "tokens that may follow, a bit for each token of the vocabulary",
        pad=-1,  # every token
        row=("M",),
        optional=True,
        by_address=True,
    )
