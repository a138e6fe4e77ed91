"""The interface between runners and attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from graphkit.attention.metadata import AttentionMetadata
    from graphkit.config import BufferSizes
    from graphkit.spec.modes import ForwardMode


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
    def metadata(self, mode: ForwardMode, inputs: AttentionInputs) -> AttentionMetadata:
        """Compute the metadata of a batch from its device tensors.

        Called inside the graph, after the refresh: it must not synchronise, and every Python number
        that it uses is a constant of the graph.

        Raises:
            AttentionError: The mode or the inputs do not fit.
        """
