"""The interface between runners and attention backends.

The modes of ``APPENDING`` and ``EXTENDING`` are all that attention knows: a runner of any other
mode declares one of them as its ``attention_mode``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from graphkit.spec import ForwardMode

if TYPE_CHECKING:
    import torch

    from graphkit.config import BufferSizes

APPENDING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT)
"""Modes whose ``seq_lens`` excludes this step's rows."""

EXTENDING = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
"""Modes whose ``seq_lens`` includes them."""


class AttentionInputs(Protocol):
    """Fields of a mode's inputs that metadata is computed from.

    Inputs may also have ``custom_mask``, bool or None: [B, W, W] in TARGET_VERIFY, over this
    step's rows, or [B, W, C] with C >= W in DRAFT, over the last C keys. DRAFT_EXTEND reads
    ``num_accepted_tokens``, int32 [B], the rows of each request.

    Shapes:
        req_pool_indices: [B] int64. seq_lens: [B] int32, without this step's rows in DECODE,
        TARGET_VERIFY and DRAFT, with them in DRAFT_EXTEND and DRAFT_EXTEND_V2.
    """

    @property
    def req_pool_indices(self) -> torch.Tensor:
        """Row of each request in the request pool."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each request."""

    @property
    def batch_size(self) -> int:
        """Requests, pads included (B)."""

    @property
    def num_tokens(self) -> int:
        """Rows, pads included (T)."""

    @property
    def tokens_per_request(self) -> int:
        """Most rows of one request; only DRAFT_EXTEND reads it."""


class AttentionBackend(ABC):
    """Computes the metadata of a batch; a model's layers read it as ``inputs.attention``.

    A backend whose kernels must be planned on the host defines one more method. This class has
    none of that name, since a runner calls it only on backends that define it::

        def before_replay(self, mode, batch, padded_batch_size) -> None

    It runs before every replay and every capture, outside the graph, with the live batch and the
    captured size that will run. It must write in place into memory that the graph reads. It does
    not run for a batch that falls back: ``metadata`` then runs outside any graph and may plan.

    Attributes:
        seq_len_fill_value: Length of pad rows; at least 1, since most kernels return NaN for no
            keys.
    """

    seq_len_fill_value: int = 1

    @abstractmethod
    def supports(self, mode: ForwardMode) -> bool:
        """Return whether the backend computes metadata for a mode.

        The mode is one that attention knows: DECODE, TARGET_VERIFY, DRAFT, DRAFT_EXTEND or
        DRAFT_EXTEND_V2. A runner of any other mode declares as its ``attention_mode`` the one
        whose rows its own are like, so a new mode needs no change here or in a backend.
        """

    @abstractmethod
    def init_state(self, sizes: BufferSizes, max_tokens: int) -> None:
        """Prepare for batches up to these sizes, before a runner captures.

        May be called once per runner that shares the backend: memory that an earlier runner has
        captured must stay where it is.

        Args:
            sizes: The runner's buffer sizes.
            max_tokens: Most rows of one batch, over all its requests.

        Raises:
            ConfigError: The backend cannot serve these sizes.
        """

    @abstractmethod
    def metadata(self, mode: ForwardMode, inputs: AttentionInputs) -> Any:
        """Compute the metadata of a batch from its device tensors.

        Called inside the graph, after the refresh: it must not synchronise, and every Python number
        that it uses is a constant of the graph.

        Returns:
            What the layers of the model read as ``inputs.attention``. Nothing else reads it. The
            backends of graphkit return an ``AttentionMetadata``.

        Raises:
            AttentionError: The mode or the inputs do not fit.
        """


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


def kv_pools(attention: Any) -> tuple[Any, ...]:
    """Return the ``kv_pool`` and ``window_kv_pool`` of any backend; one pool if they are equal."""
    pools = (getattr(attention, name, None) for name in ("kv_pool", "window_kv_pool"))
    return tuple({id(pool): pool for pool in pools if pool is not None}.values())
