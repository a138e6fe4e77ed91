"""The interface between runners and attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from graphkit.engine.kv import KVPool, RequestTable
from graphkit.engine.kv.contracts import check_kv_pool, check_request_table
from graphkit.errors import ConfigError

if TYPE_CHECKING:
    import torch

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


class PooledAttention(AttentionBackend):
    """An attention backend over pools, as ``EngineModel`` takes it. Base of own ones.

    A whole step assigns slots, moves the accepted path of trees and checks sizes through these
    pools. Set both attributes in ``__init__``. An ``AttentionBackend`` that has them without this
    base is accepted, too.

    Attributes:
        req_to_token_pool: Slots of each request: a ``ReqToTokenPool``, or an own ``RequestTable``
            for ``SpecStepRunner``, ``RequestPool`` for ``SpeculativeEngine``. All models of a step
            share one.
        kv_pool: Keys and values of the model: a pool of graphkit, or an own ``KVPool``.
    """

    req_to_token_pool: RequestTable
    kv_pool: KVPool


def check_pooled_attention(owner: str, attention: object) -> None:
    """Check that a backend has the attributes of ``PooledAttention``.

    Args:
        owner: Name of the argument, for messages.
        attention: The backend.

    Raises:
        ConfigError: It is not an ``AttentionBackend``, or a pool or a member of one is missing or
            has the wrong type or device; ``field`` names the attribute.
    """
    if not isinstance(attention, AttentionBackend):
        raise ConfigError(
            f"{owner} is a {type(attention).__name__}, expected a graphkit.AttentionBackend with "
            "the attributes of graphkit.PooledAttention.",
            field=owner.rpartition(".")[2],
        )
    checks = {"req_to_token_pool": check_request_table, "kv_pool": check_kv_pool}
    for name, check in checks.items():
        if not hasattr(attention, name):
            raise ConfigError(
                f"{owner} is a {type(attention).__name__} without {name}, which a whole step "
                "reads. Derive it from graphkit.PooledAttention, and set its attributes.",
                field=name,
            )
        check(f"{owner}.{name}", getattr(attention, name))
    table, pool = attention.req_to_token_pool, attention.kv_pool  # type: ignore[attr-defined]
    device = table.req_to_token.device
    for name, buffer in pool.tensors().items():
        if buffer.device != device:
            raise ConfigError(
                f"{owner}.kv_pool.tensors()[{name!r}] is on {buffer.device}, but "
                f"req_to_token_pool is on {device}. Make both on one device.",
                field="kv_pool",
            )
