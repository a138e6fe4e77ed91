"""Metadata of a batch for attention kernels, and the query rows that it comes from, by mode.

The modes here are all that attention knows: a runner of any other mode declares one of them as its
``attention_mode``.

Suffixes: B requests, W most rows of a request, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkit.errors import AttentionError
from graphkit.spec.modes import ForwardMode

if TYPE_CHECKING:
    import torch

    from graphkit.engine.attention.backend import AttentionInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Lengths, page table and mask of one batch, all on its device.

    Tensors computed inside a captured graph are graph memory, valid until the next replay in that
    pool.

    Attributes:
        cache_seqlens: Keys of each request, this step's rows included; int32 [B].
        cu_seqlens_q: Running sum of query rows, from 0; int32 [B + 1].
        cu_seqlens_k: Running sum of ``cache_seqlens``, from 0; int32 [B + 1].
        page_table: Page of every page_size keys, 0 behind the last; int32 [B, pages].
        window_page_table: The page table of layers with a window, whose pool may be another one;
            otherwise ``page_table``.
        mask: True where a row sees one of its request's last keys; bool, [B, W, W] in a verify and
            [B, W, C] with C > W in a draft tree. ``None`` for a chain.
        max_seqlen_q: Query rows per request (W). In DRAFT_EXTEND an upper bound, since only the
            device knows the rows; those behind ``cu_seqlens_q[B]`` belong to no request. 1 if
            there are no requests.
        max_seqlen_k: Upper bound of ``cache_seqlens``, fixed at capture.
    """

    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor
    window_page_table: torch.Tensor
    mask: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


APPENDING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT)
"""Modes whose ``seq_lens`` excludes this step's rows."""

EXTENDING = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
"""Modes whose ``seq_lens`` includes them."""


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
