"""Settings of an engine: the optional ones by name, their checks, and the generation that runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from graphkit.config import BufferSizes, is_int
from graphkit.distributed import RankGroup
from graphkit.engine.kv.contracts import RequestPool
from graphkit.errors import ConfigError, short_repr
from graphkit.graphs import Backend
from graphkit.spec import Plan, SpecConfig

logger = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """Optional arguments of ``SpeculativeEngine``, for functions that pass them on.

    ``SpeculativeEngine`` documents them and has their defaults.
    """

    batch_sizes: Iterable[int] | None
    backend: Backend | None
    generation: Literal["v1", "v2", "v3"] | None
    steps_per_launch: int
    chunked_prefill_size: int | None
    prefill_sizes: Sequence[int] | None
    bos_token_id: int | None
    seed: int
    structured_output: bool
    debug: bool


def check_generation(generation: object) -> None:
    """Check the name of a generation; ``None`` selects one."""
    if generation not in ("v1", "v2", "v3", None):
        raise ConfigError(
            f"generation must be 'v1', 'v2', 'v3' or None, got {short_repr(generation)}.",
            field="generation",
        )


def check_tokens(seed: object, bos_token_id: object, vocab_size: int) -> None:
    """Check the seed and the BOS token of an engine."""
    if not is_int(seed):
        raise ConfigError(
            f"SpeculativeEngine.seed must be an int, got {short_repr(seed)}.", field="seed"
        )
    is_token = is_int(bos_token_id) and 0 <= bos_token_id < vocab_size
    if bos_token_id is not None and not is_token:
        raise ConfigError(
            "SpeculativeEngine.bos_token_id must be None or a token id from 0 to "
            f"{vocab_size - 1}, got {short_repr(bos_token_id)}.",
            field="bos_token_id",
        )


def check_free_rows(pool: RequestPool) -> None:
    """Check that an engine can admit a request."""
    if not pool.available:
        raise ConfigError(
            f"target.attention.req_to_token_pool is a {type(pool).__name__}: of its {pool.size} "
            "rows, none is free. SpeculativeEngine takes all free rows for its requests. Free the "
            "rows, or create a pool for the engine.",
            field="req_to_token_pool",
        )


def no_loop_reason(backend: Backend, spec: SpecConfig, group: RankGroup | None) -> str:
    """Return the reason why v3 cannot run for lack of loops, or an empty string."""
    if group is None:
        return backend.no_loop_reason
    if not (spec.is_adaptive and group.no_loop_reason):
        return ""  # each step is a launch of its own where ranks have no loops
    longest = "without loops, v3 runs the longest of several draft lengths alone"
    return f"{group.no_loop_reason}; {longest}: use v2, or one draft length"


def plan_generation(
    spec: SpecConfig, requested: Literal["v1", "v2", "v3"] | None, reason: str
) -> Plan:
    """Return the generation to run.

    Args:
        spec: Drafting and verification settings.
        requested: What the caller asked for; ``None`` selects one.
        reason: Why v3 cannot run, or an empty string.
    """
    if requested == "v3" and reason:
        raise ConfigError(f"generation 'v3' cannot run: {reason}.", field="generation")
    if requested is None and reason:
        logger.warning("The engine runs no device loops: %s. It runs generation v2.", reason)
    return spec.plan(reason) if requested is None else Plan(requested, "as requested")


def context_limit_of(sizes: BufferSizes, slots_ahead: int) -> int:
    """Return the most tokens of a request, behind which steps write ``slots_ahead`` tokens."""
    limit = sizes.max_context_len - slots_ahead
    if limit < 2:
        raise ConfigError(
            f"BufferSizes.max_context_len is {sizes.max_context_len}, but two steps may write "
            f"{slots_ahead} tokens ahead, and a request needs room for 2 tokens. Set it to at "
            f"least {slots_ahead + 2}.",
            field="max_context_len",
        )
    return limit
