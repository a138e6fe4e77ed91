"""The query rows that attention metadata comes from, by mode.

Suffixes: B requests, W most rows of a request, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkit.buffers.attention import APPENDING, EXTENDING
from graphkit.errors import AttentionError
from graphkit.spec.modes import ForwardMode

if TYPE_CHECKING:
    import torch

    from graphkit.buffers.attention import AttentionInputs


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The query rows of one batch.

    Attributes:
        width: Rows of each request (W); an upper bound if ``lengths`` is a tensor.
        appended: Rows per request that ``seq_lens`` excludes.
        lengths: Rows of each request if they are ragged; int32 [B].
        mask: True where a row sees one of the last keys; bool [B, W, C], C >= W.
    """

    width: int
    appended: int = 0
    lengths: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def query_rows(mode: ForwardMode, inputs: AttentionInputs) -> QueryRows:
    """Return the query rows of a batch.

    Widths come from the batch and not from a configuration, which may be another batch's. In
    DRAFT_EXTEND rows are packed, so the host knows only their bound, ``tokens_per_request``.

    Raises:
        AttentionError: Rows, requests and mask contradict each other or the mode.
    """
    if inputs.batch_size == inputs.num_tokens == 0:
        return QueryRows(1)
    if mode in APPENDING:
        width = _uniform_width(mode, inputs)
        return QueryRows(width, appended=width, mask=_mask(mode, inputs, width))
    if mode not in EXTENDING:
        modes = ", ".join(known.name for known in APPENDING + EXTENDING)
        raise AttentionError(
            f"no paged attention metadata for {mode.name}: expected one of {modes}. "
            "Declare one of these as the runner's attention_mode."
        )
    if getattr(inputs, "custom_mask", None) is not None:
        raise AttentionError(
            f"a {mode.name} batch has a custom_mask, but the mode extends chains: pass None."
        )
    if mode is ForwardMode.DRAFT_EXTEND:
        return _packed(inputs)
    return QueryRows(_uniform_width(mode, inputs))


def _uniform_width(mode: ForwardMode, inputs: AttentionInputs) -> int:
    requests, rows = inputs.batch_size, inputs.num_tokens
    if requests < 1 or rows < requests or rows % requests:
        raise AttentionError(
            f"a {mode.name} batch of {requests} requests has {rows} rows: expected the same number "
            "of rows per request, at least 1. Pad the requests to one width."
        )
    return rows // requests


def _packed(inputs: AttentionInputs) -> QueryRows:
    requests, rows, width = inputs.batch_size, inputs.num_tokens, inputs.tokens_per_request
    lengths: torch.Tensor | None = getattr(inputs, "num_accepted_tokens", None)
    if lengths is None:
        raise AttentionError(
            "a DRAFT_EXTEND batch has no num_accepted_tokens: pass the rows of each request, "
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
            f"of {width} rows takes {square}, or None for a chain; in DRAFT the last dimension may "
            "be larger."
        )
    return mask
