"""How many query rows each request of a batch has, mode by mode.

Suffixes: B requests, W most rows of a request, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkit.errors import AttentionError
from graphkit.spec.modes import ForwardMode

if TYPE_CHECKING:
    import torch

    from graphkit.attention.backend import AttentionInputs

APPENDING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT)
"""Modes whose ``seq_lens`` does not count this step's rows."""

EXTENDING = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
"""Modes whose ``seq_lens`` counts them."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The query rows of one batch.

    Attributes:
        width: Rows of each request (W); an upper bound where ``lengths`` says how many.
        appended: Rows per request that ``seq_lens`` does not count.
        lengths: Rows of each request where they vary; int32 [B].
        mask: Which of the last keys each row sees; bool [B, W, at least W].
    """

    width: int
    appended: int = 0
    lengths: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def query_rows(mode: ForwardMode, inputs: AttentionInputs) -> QueryRows:
    """Read the rows off a batch.

    Widths come from the batch, never from a configuration, which may not be this batch's. The one
    exception is DRAFT_EXTEND: its rows are packed, so only their bound is known to the host.

    Raises:
        AttentionError: Rows, requests and mask do not fit each other or the mode.
    """
    if inputs.batch_size == inputs.num_tokens == 0:
        return QueryRows(1)
    if mode in APPENDING:
        width = _uniform_width(mode, inputs)
        return QueryRows(width, appended=width, mask=_mask(mode, inputs, width))
    if mode not in EXTENDING:
        modes = ", ".join(each.name for each in APPENDING + EXTENDING)
        raise AttentionError(
            f"no paged attention metadata for {mode.name}: it takes {modes}. "
            "Ask supports(mode) first."
        )
    if getattr(inputs, "custom_mask", None) is not None:
        raise AttentionError(f"{mode.name} extends chains: leave custom_mask out.")
    if mode is ForwardMode.DRAFT_EXTEND:
        return _packed(inputs)
    return QueryRows(_uniform_width(mode, inputs))


def _uniform_width(mode: ForwardMode, inputs: AttentionInputs) -> int:
    requests, rows = inputs.batch_size, inputs.num_tokens
    if requests < 1 or rows < requests or rows % requests:
        raise AttentionError(
            f"a {mode.name} batch of {requests} requests has {rows} rows: each request must have "
            "the same number of rows, at least 1. Pad the requests to one width; a width that the "
            "batch does not show is never guessed."
        )
    return rows // requests


def _packed(inputs: AttentionInputs) -> QueryRows:
    requests, rows, width = inputs.batch_size, inputs.num_tokens, inputs.tokens_per_request
    lengths: torch.Tensor | None = getattr(inputs, "num_accepted_tokens", None)
    if lengths is None:
        raise AttentionError(
            "a DRAFT_EXTEND batch has no num_accepted_tokens: give the rows of each request, "
            "int32 [B], on the device."
        )
    if width < 1 or rows > requests * width:
        raise AttentionError(
            f"a DRAFT_EXTEND batch of {requests} requests has {rows} rows, but tokens_per_request "
            f"is {width}: set it to the most rows that one request may have."
        )
    return QueryRows(width, lengths=lengths)


def _mask(mode: ForwardMode, inputs: AttentionInputs, width: int) -> torch.Tensor | None:
    mask: torch.Tensor | None = getattr(inputs, "custom_mask", None)
    if mask is None:
        return None
    shape, square = list(mask.shape), [inputs.batch_size, width, width]
    wide = mode is ForwardMode.DRAFT and len(shape) == 3 and shape[2] > width
    if shape != square and not (wide and shape[:2] == square[:2]):
        raise AttentionError(
            f"custom_mask has shape {shape}: a {mode.name} batch of {inputs.batch_size} requests "
            f"of {width} rows takes {square}, or None for a chain; in DRAFT the last may be larger."
        )
    return mask
