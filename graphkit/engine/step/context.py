"""Options of a step, and the context that its verifier and drafter share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch

from graphkit.config import BufferSizes, require_int, require_type
from graphkit.distributed import RankGroup
from graphkit.engine.kv import RequestTable
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.request_state import RequestState
from graphkit.errors import ConfigError
from graphkit.graphs import Backend, SizeTable
from graphkit.ops import philox_uniform
from graphkit.runners.settings import is_checking
from graphkit.spec import ForwardMode, FutureMap, SpecConfig
from graphkit.spec.signatures import call_override


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of a step, which ``SpeculativeEngine`` and ``SpecStepRunner`` pass on whole.

    Attributes:
        backend: Backend of all runners.
        batch_sizes: Batch sizes to capture; ``None`` selects the default
            list.
        generation: ``"v1"`` (host in the loop), ``"v2"`` (overlapped) or ``"v3"`` (on the device).
        chunked_prefill_size: Most prompt tokens per forward; ``None`` selects them by device, see
            ``EngineContext.most_prefill_tokens``.
        prefill_sizes: Numbers of prompt tokens to capture, see ``PromptRunner``; ``None`` selects
            the default list on CUDA and none elsewhere.
        structured_output: Whether verify takes a token bitmask.
        debug: See ``FutureMap``.
        check: As for ``Runner``.
        is_greedy: Whether a ``SpecStepRunner`` captures steps without sampling.
        ring_entries: Most steps of loops that wait for the host to read them.
        group: Ranks that run the same requests together, if any.
    """

    backend: Backend
    batch_sizes: Iterable[int] | None = None
    generation: str = "v3"
    chunked_prefill_size: int | None = None
    prefill_sizes: Sequence[int] | None = None
    structured_output: bool = False
    debug: bool = False
    check: bool | None = None
    is_greedy: bool = False
    ring_entries: int = 256
    group: RankGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Settings and shared state of an engine, which ``Drafter.prepare`` receives.

    Valid until the engine is closed.

    Attributes:
        spec: The drafting and verification settings.
        sizes: Limits on batch and context.
        options: Options of the engine.
        state: State of the requests by row, such as their temperatures; a drafter may read it.
        future_map: Holds per-request results on the device until the next step reads them.
        req_to_token: KV slot of each token, int32 [rows, context]; the request pool's own table.
        kv_slots: Slots that every KV pool must have.
        runner_options: Keyword arguments that every runner of the engine takes: ``batch_sizes``,
            ``device``, ``backend`` and ``check``.
    """

    spec: SpecConfig
    sizes: BufferSizes
    options: StepOptions
    state: RequestState
    future_map: FutureMap
    req_to_token: torch.Tensor
    kv_slots: int
    runner_options: Mapping[str, Any]

    @classmethod
    def create(
        cls,
        target: EngineModel,
        spec: SpecConfig,
        sizes: BufferSizes,
        options: StepOptions,
        *,
        owner: str,
    ) -> EngineContext:
        """Create the context of a target, whose pools all models share.

        Args:
            target: The model whose output the requests receive.
            spec: The drafting and verification settings.
            sizes: Limits on batch and context.
            options: Options of the engine.
            owner: Name of the class whose arguments these are, for messages.

        Raises:
            ConfigError: An argument has a wrong type, settings and pools contradict each other, or
                ``create_future_map`` of the algorithm returns no ``FutureMap``.
        """
        require_type(owner, "target", target, EngineModel, "a graphkit.EngineModel")
        require_type(owner, "spec", spec, SpecConfig, "a graphkit.SpecConfig")
        require_type(owner, "sizes", sizes, BufferSizes, "a graphkit.BufferSizes")
        require_type(owner, "check", options.check, (bool, NoneType), "True, False or None")
        if options.chunked_prefill_size is not None:
            require_int(owner, "chunked_prefill_size", options.chunked_prefill_size)
        if options.prefill_sizes is not None:
            sizes_type = "a sequence of ints above 0, or None"
            require_type(owner, "prefill_sizes", options.prefill_sizes, Sequence, sizes_type)
            for count in options.prefill_sizes:
                require_int(owner, "prefill_sizes", count)
        require_int(owner, "ring_entries", options.ring_entries)
        target.check_kv_pools()
        target.check_recurrent_state(spec)
        pool, kv_pool = target.attention.req_to_token_pool, target.attention.kv_pool
        device = options.backend.device
        _check_pools(pool, spec, sizes, device)
        future_map = call_override(
            spec.resolved,
            "create_future_map",
            pool.size,
            most_prefill_tokens(options),
            sizes.max_context_len,
            device,
            field="algorithm",
        )
        if not isinstance(future_map, FutureMap):
            raise ConfigError(
                f"{spec.resolved!r}.create_future_map() returned {type(future_map).__name__}, "
                "expected a FutureMap. Return a FutureMap or a subclass of it.",
                field="algorithm",
            )
        future_map.debug = options.debug
        return cls(
            spec=spec,
            sizes=sizes,
            options=options,
            state=RequestState(pool.size, device, sizes.vocab_size),
            future_map=future_map,
            req_to_token=pool.req_to_token,
            kv_slots=kv_pool.size,
            runner_options={
                "batch_sizes": SizeTable(sizes.max_batch_size, options.batch_sizes).sizes,
                "device": device,
                "backend": options.backend,
                "check": is_checking(options.check),
            },
        )

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.options.backend.device

    @property
    def most_prefill_tokens(self) -> int:
        """Most prompt tokens per forward."""
        return most_prefill_tokens(self.options)

    @property
    def generation(self) -> str:
        """``"v1"`` (host in the loop), ``"v2"`` (overlapped) or ``"v3"`` (on the device)."""
        return self.options.generation

    @property
    def times_steps(self) -> bool:
        """Whether steps of several draft lengths are timed while they run.

        Ranks choose alike, so they keep the times that all have from the capture.
        """
        return self.device.type == "cuda" and self.options.group is None

    def at_length(self, spec: SpecConfig) -> EngineContext:
        """Return the context of one draft length, which shares everything but ``spec``."""
        return self if spec is self.spec else replace(self, spec=spec)

    def check(self, model: EngineModel) -> None:
        """Check that a draft model's pools match the target's.

        Raises:
            ConfigError: The model uses a different request pool, or its KV pools have too few slots
                or contradict each other.
        """
        model.check_kv_pools()
        attention = model.attention
        if attention.req_to_token_pool.req_to_token is not self.req_to_token:
            raise ConfigError(
                "the draft model's attention uses a different ReqToTokenPool than the target's. "
                "Create both attention backends over one ReqToTokenPool.",
                field="drafter",
            )
        if attention.kv_pool.size < self.kv_slots:
            raise ConfigError(
                f"the draft model's KV pool has {attention.kv_pool.size} slots, but the target's "
                f"has {self.kv_slots}. Give the draft model a KV pool of at least that size.",
                field="drafter",
            )

    @property
    def is_checking(self) -> bool:
        """Whether the checking mode is on; see ``Runner``."""
        return bool(self.runner_options["check"])

    @property
    def verify_width(self) -> int:
        """Nodes per request in TARGET_VERIFY (W), the bonus token included."""
        return self.spec.tokens_per_request(ForwardMode.TARGET_VERIFY)

    def draft_samples(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, draws: int
    ) -> torch.Tensor:
        """Draw uniform samples in [0, 1) for a drafter that samples its drafts.

        They depend on the request's seed, its position and the draw alone, so that drafts do not
        depend on the batch. They are independent of the samples that decide which drafts are
        accepted, as ``DraftTree.draft_probs`` requires. Enqueues only.

        Args:
            req_pool_indices: Request rows.
            seq_lens: Committed tokens, as ``Drafter.draft`` receives them.
            draws: Samples per request (n).

        Shapes:
            req_pool_indices: [B] int64. seq_lens: [B] int32. Returns [B, n] float32.

        Raises:
            ConfigError: ``draws`` is not an int of at least 1.
        """
        require_int("draft_samples", "draws", draws)
        # Rejection sampling uses draws 1 to W of this position. Draw 0 of every position belongs to
        # the target's own sample.
        used = self.verify_width + 1
        seeds = self.state.seeds[req_pool_indices]
        return philox_uniform(seeds, seq_lens, used + draws)[:, used:]


def most_prefill_tokens(options: StepOptions) -> int:
    """Return the most prompt tokens per forward: by default 2,048 on CUDA, and 512 elsewhere."""
    if options.chunked_prefill_size is not None:
        return options.chunked_prefill_size
    return 2048 if options.backend.device.type == "cuda" else 512


def _check_pools(
    pool: RequestTable, spec: SpecConfig, sizes: BufferSizes, device: torch.device
) -> None:
    """Check that the request pool, the spec, the sizes and the device agree."""
    if pool.req_to_token.device != device:
        raise ConfigError(
            f"the pools of the target are on {pool.req_to_token.device}, but the engine runs on "
            f"{device}. Move the target and its pools there, or pass "
            f"device={pool.req_to_token.device.type!r}.",
            field="device",
        )
    if pool.max_context_len < sizes.max_context_len or pool.size < sizes.max_batch_size:
        raise ConfigError(
            f"req_to_token_pool holds {pool.size} requests of {pool.max_context_len} tokens, but "
            f"BufferSizes has max_batch_size {sizes.max_batch_size} and max_context_len "
            f"{sizes.max_context_len}. Enlarge the pool, or reduce the sizes.",
            field="sizes",
        )
    if spec.page_size != sizes.page_size:
        raise ConfigError(
            f"SpecConfig.page_size is {spec.page_size}, but BufferSizes.page_size is "
            f"{sizes.page_size}. Set both to the page size of the KV pools.",
            field="page_size",
        )
