"""Attention backends over pools, and their checks."""

from __future__ import annotations

from graphkit.buffers.attention import AttentionBackend
from graphkit.engine.kv import KVPool, RequestTable
from graphkit.engine.kv.contracts import check_kv_pool, check_request_table
from graphkit.errors import ConfigError


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
        skips_absent_rows: Whether attention over packed rows costs next to nothing for requests
            without rows, and for the rows that a request has fewer than the longest one.
        is_row_invariant: Whether the bits of a row do not depend on the other rows.
    """

    skips_absent_rows: bool = False
    is_row_invariant: bool = False

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
