"""What a runner asks of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from graphkit.attention.metadata import AttentionMetadata
    from graphkit.config import BufferSizes
    from graphkit.spec.modes import ForwardMode


class AttentionInputs(Protocol):
    """The part of a mode's inputs that metadata is made from.

    Inputs may also have ``custom_mask``, bool or None: [B, W, W] in TARGET_VERIFY, where it stands
    for this step's rows, [B, W, at least W] in DRAFT, where it stands for the last of the keys.
    DRAFT_EXTEND reads ``num_accepted_tokens``, int32 [B], the rows of each request.

    Shapes:
        req_pool_indices: [B] int64. seq_lens: [B] int32, this step's rows not counted in DECODE,
        TARGET_VERIFY and DRAFT, counted in DRAFT_EXTEND and DRAFT_EXTEND_V2.
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
        """Rows of a request; in DRAFT_EXTEND, which alone reads it, the most that one may have."""


class AttentionBackend(ABC):
    """Makes the metadata of a batch; a model's layers read it as ``inputs.attention``.

    A backend whose kernels must be planned on the host defines one more method, which this class
    leaves out on purpose, since a runner calls it only where it finds it::

        def before_replay(self, mode, batch, padded_batch_size) -> None

    It runs before every replay and every capture, outside the graph, with the live batch and the
    captured size that will run. It must write in place into memory that the graph reads. A batch
    that falls back is not announced: ``metadata`` then runs outside any graph and may plan itself.

    Attributes:
        seq_len_fill_value: Length that pad rows get; at least 1, since no keys at all make NaN in
            most kernels.
    """

    seq_len_fill_value: int = 1

    @abstractmethod
    def supports(self, mode: ForwardMode) -> bool:
        """Whether a runner of this mode may use the backend."""

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
        """Make the metadata of a batch from its device tensors.

        Called inside the graph, after the refresh: it must not synchronise, and every Python number
        that it uses is frozen into the graph.

        Raises:
            AttentionError: The mode or the inputs do not fit.
        """
