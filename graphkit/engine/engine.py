"""The engine: requests join and finish, and every step runs through graph runners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from graphkit.config import BufferSizes, require_int, require_type
from graphkit.distributed import RankGroup
from graphkit.engine.call_broadcast import CallBroadcast, LocalCalls
from graphkit.engine.continuous_batching import _ContinuousBatching
from graphkit.engine.device_schedule import DeviceSchedule
from graphkit.engine.kv.contracts import check_request_pool
from graphkit.engine.kv.pool_use import PoolUse, check_unused
from graphkit.engine.queue import RequestQueue
from graphkit.engine.request_memory import RequestMemory, SlotReservation, StepSlots
from graphkit.engine.schedule import Schedule
from graphkit.engine.settings import (
    check_free_rows,
    check_generation,
    check_tokens,
    context_limit_of,
    no_loop_reason,
    plan_generation,
)
from graphkit.engine.step import (
    Admission,
    Drafter,
    EngineContext,
    EngineModel,
    SpecStep,
    SpecStepRunner,
    StepOptions,
)
from graphkit.engine.step.request_checks import RequestChecks
from graphkit.graphs import Backend, backend_for
from graphkit.ops.inference import allocates
from graphkit.records import CaptureRecord, MemoryEstimate
from graphkit.runners.capture_checks import host_objects
from graphkit.runners.memory_estimate import estimate_memory
from graphkit.spec import SpecConfig


class SpeculativeEngine(_ContinuousBatching):
    """Generates text by drafting, verifying, accepting and catching up with captured graphs.

    Output equals the target's own decoding token for token, greedy or sampled, unless drafts are
    accepted by rejection sampling (``DraftTree.draft_probs``). Every step runs eagerly until
    ``capture`` has been called, and is counted as a fallback then.

    The engine allocates rows and KV slots from the target's pools and frees them when a request
    finishes or the engine closes. Nothing else may allocate from these pools until then. It is a
    context manager that closes on exit, and is not thread-safe. An engine that is dropped without
    ``close`` frees its pools when Python collects it.

    An exception ends only the requests that caused it. If a ``step`` is interrupted, for example by
    a ``KeyboardInterrupt``, the next one prefills prompt and output of the running requests again
    and continues them.

    Args:
        target: The model whose output the requests receive.
        drafter: Proposes draft tokens; ``None`` decodes one token per step. Belongs to one engine.
        spec: Drafting and verification settings.
        sizes: Limits on batch and context. ``max_context_len`` includes the slots that two steps
            may write ahead; see ``context_limit``.
        batch_sizes: Batch sizes to capture; ``None`` selects the default list up to
            ``sizes.max_batch_size``.
        device: As for ``Runner``; all runners share it.
        backend: As for ``Runner``; all runners share it.
        generation: ``"v1"`` waits for each step's tokens. ``"v2"`` enqueues a step before it reads
            the previous one's tokens. ``"v3"`` runs up to ``steps_per_launch`` steps in one launch,
            see ``SpecStepRunner``; it needs a drafter and a backend that do not need the host
            between steps and, on CUDA, cuda-bindings. ``None`` selects v3 where it can run, else
            v2; see ``plan``.
        steps_per_launch: Most steps of one launch of v3. In all generations, KV slots are reserved
            for so many steps at a time, or for fewer if the pool is short.
        chunked_prefill_size: Most prompt tokens per forward, of all requests together. ``None``
            selects 2,048 on CUDA, of which a forward beside running requests takes as many as its
            graph runs within 30 ms, and 512 elsewhere.
        prefill_sizes: Numbers of prompt tokens to capture, ascending. A forward of up to the
            largest number then replays a graph. ``None`` selects a list from 64 to 2,048 on CUDA,
            and none elsewhere. Targets with recurrent layers, attention that plans on the host and
            engines with ``group`` run prompts without graphs.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.
        seed: Any int. Gives a different seed to each request that has none.
        structured_output: Whether requests may have a matcher. Verify then takes a token bitmask,
            which costs a row of V / 8 bytes per token. Matchers run on the host, so v3 cannot run.
        group: Ranks that run the same requests together, such as the ranks of a model that is split
            over GPUs: ``RankGroup(same_batch=True)``. All ranks call ``capture``. Then rank 0 calls
            ``submit`` and ``step`` while the others run ``worker_loop``, or all ranks make the same
            calls.
            On CUDA, v3 runs loops with ``RankGroup(one_shot=True)``, and otherwise one step per
            launch. A launch of one step has one draft length: with several, v2 runs instead. A
            request joins after the running loops. Matchers are not supported.
        debug: Check that each result in the future map is read exactly once. Waits for the device
            at every read.

    Attributes:
        spec: As passed.
        sizes: As passed.
        structured_output: As passed.
        plan: The generation that runs, and why.
        generation: The generation that runs.
        device: The device of all tensors.
        runners: The runner of each mode, the target's first; in v3, one ``SpecStepRunner``.
        context_limit: Most tokens of a request's prompt and output together.
        max_path: Most tokens that one verify step accepts for a request, the bonus token included.
        memory: Rows and KV slots of the running requests.
        group: As passed.

    Raises:
        ConfigError: An argument has a wrong type, settings or pools contradict each other, an open
            engine or ``SpecStepRunner`` uses the pools, no row is free, the drafter or the
            algorithm does not implement its interface, ``generation="v3"`` cannot run, or
            ``spec.linear_attention`` is set for a target without ``recurrent_state``: rejected
            drafts would stay in its state.
    """

    @allocates
    def __init__(
        self,
        target: EngineModel,
        drafter: Drafter | None = None,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        generation: Literal["v1", "v2", "v3"] | None = None,
        steps_per_launch: int = 16,
        chunked_prefill_size: int | None = None,
        prefill_sizes: Sequence[int] | None = None,
        bos_token_id: int | None = None,
        seed: int = 0,
        structured_output: bool = False,
        debug: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        if group is not None:
            require_type("SpeculativeEngine", "group", group, RankGroup, "a graphkit.RankGroup")
        require_int("SpeculativeEngine", "steps_per_launch", steps_per_launch)
        check_generation(generation)
        options = StepOptions(
            backend=backend_for(device, backend),
            batch_sizes=batch_sizes,
            generation=generation or "v3",  # whose runners serve v2, too, if v3 cannot run
            chunked_prefill_size=chunked_prefill_size,
            prefill_sizes=prefill_sizes,
            structured_output=structured_output,
            debug=debug,
            ring_entries=4 * steps_per_launch,
            group=group,
        )
        context = EngineContext.create(target, spec, sizes, options, owner="SpeculativeEngine")
        check_tokens(seed, bos_token_id, sizes.vocab_size)
        self.spec, self.sizes, self._forward = spec, sizes, target.forward
        attention = target.attention
        rows = check_request_pool("target.attention.req_to_token_pool", attention.req_to_token_pool)
        check_unused("SpeculativeEngine", target.pools, allocates=True)
        check_free_rows(rows)
        self._spec_step = spec_step = SpecStep(target, drafter, context)
        reason = spec_step.eager_reason or no_loop_reason(options.backend, spec, group)
        self.plan = plan_generation(spec, generation, reason)
        self.generation = self.plan.generation
        self.max_path = spec_step.max_path
        slots = StepSlots(spec_step.max_path, spec_step.slots_ahead)
        # v2 enqueues one more step after the one that finishes a request.
        self.context_limit = context_limit_of(sizes, slots.max_path + slots.ahead)
        kv_pool = attention.kv_pool
        memory = RequestMemory(rows, kv_pool.size, kv_pool.page_size)
        self._admission = Admission(spec_step, self.context_limit)
        calls = LocalCalls() if group is None else CallBroadcast(group)
        most_slots = sizes.max_batch_size * memory.whole_pages(sizes.max_context_len)
        reservation = SlotReservation(memory, slots, steps_per_launch, most_slots)
        schedule: Schedule
        if self.generation == "v3":
            schedule = DeviceSchedule(SpecStepRunner.from_step(spec_step), reservation)
        else:
            if group is not None:
                for step_runner in spec_step.runners:
                    step_runner.join(group)
            schedule = Schedule(spec_step, reservation, waits=self.generation == "v1")
        queue = RequestQueue(
            RequestChecks(
                sizes.vocab_size, self.context_limit, seed=seed, bos_token_id=bos_token_id
            ),
            self._admission,
            memory,
            slots,
            max_running=sizes.max_batch_size,
            spare_steps=steps_per_launch,
            fails_alone=group is None,
        )
        super().__init__(
            queue,
            schedule,
            reservation,
            memory,
            # Last, so that an engine that could not be created does not hold its pools.
            PoolUse("SpeculativeEngine", spec_step.pools, allocates=True),
            device=context.device,
            group=group,
            calls=calls,
            structured_output=structured_output,
        )

    def capture(self, progress: Callable[[str], None] = lambda _message: None) -> None:
        """Capture the graphs of all runners that have not been captured yet.

        Also compiles the kernels of prompts, and on CUDA those between the graphs of a step, so
        that the first request does not wait for them. May be called while requests are running.
        Waits for the device.

        Args:
            progress: Called with a short message before each runner is captured.

        Raises:
            AttentionError: The target's attention backend computes a tree or a packed prefill
                differently from a chain; without ``capture``, the first prefill raises it.
            CaptureError: A forward cannot be captured. Runners captured before it keep their
                graphs; call ``capture`` again to continue.
            ConfigError: ``progress`` cannot be called, or all weights of the target are on another
                device than the engine.
            ReplayError: The engine is closed.
        """
        self._check_open()
        require_type("capture", "progress", progress, Callable, "a function of a message")  # type: ignore[arg-type]
        planned = [runner for runner in self.runners if runner.status != "captured"]
        if planned:
            host_objects(self._forward).check_weights(self.device)
        warms_up = planned and self.generation != "v3"  # the runner of v3 warms up itself
        if warms_up:
            self._admission.warm_up(self.runners[0].capturing_backend())
        for runner in planned:
            progress(f"capturing {runner.label}")
            runner.capture()
        if warms_up and self.device.type == "cuda":
            self._spec_step.warm_up_steps(self.runners[0].capturing_backend())
        if warms_up:
            self._schedule.measure_lengths(self.runners[0].capturing_backend())

    def estimate(self, record: CaptureRecord | None = None) -> MemoryEstimate:
        """Return the device memory that the engine takes once it is captured.

        KV pools, states and buffers exist already, so their bytes are exact. The memory of the
        graphs of all runners, loops of v3 included, is predicted from the captures of a few sizes,
        which are closed again; see ``Runner.estimate``. All runners share a pool, so that their
        captures are kept until the last one. After ``capture``, returns what the graphs took.

        Waits for the device. With ``group`` all ranks call this.

        Args:
            record: Record of an earlier capture of the same models and settings, of any sizes, to
                predict from; ``None`` captures.

        Raises:
            CaptureError: A size cannot be captured.
            ConfigError: ``record`` is not a ``CaptureRecord``.
            RecordError: ``record`` has no graphs of one of the runners.
            ReplayError: The engine is closed.
        """
        self._check_open()
        is_planned = any(runner.status == "planned" for runner in self.runners)
        if record is None and is_planned and self.generation != "v3":
            backend = self.runners[0].capturing_backend()
            self._admission.warm_up(backend)
            # Some state is allocated when it is first written.
            self._spec_step.warm_up_steps(backend)
        more = [self._spec_step.memory_parts()]
        prompts = self._spec_step.prompts
        # A record has no graphs of prompts: it may be that of a runner of v3.
        runners = self.runners if prompts is None or record else (*self.runners, prompts)
        return estimate_memory(self.runners[0].backend, runners, record, more)
