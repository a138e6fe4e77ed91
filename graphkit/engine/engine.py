"""The engine: requests join and finish, and every step runs through graph runners."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, Self

import torch

from graphkit.config import BufferSizes, require_int, require_type
from graphkit.distributed import RankGroup
from graphkit.engine.call_broadcast import CallBroadcast
from graphkit.engine.continuous_batching import ContinuousBatching
from graphkit.engine.kv.contracts import check_request_pool
from graphkit.engine.kv.pool import PoolUse, check_unused
from graphkit.engine.request import FinishReason, NewTokens, Request
from graphkit.engine.request_memory import RequestMemory
from graphkit.engine.schedule import Schedule
from graphkit.engine.settings import (
    check_free_rows,
    check_generation,
    check_tokens,
    context_limit_of,
    no_loop_reason,
    plan_generation,
)
from graphkit.engine.stats import EngineStats
from graphkit.engine.step import (
    Admission,
    Drafter,
    EngineContext,
    EngineModel,
    SamplingParams,
    SpecStep,
    StepOptions,
)
from graphkit.engine.step.pad_steps import warm_up_steps
from graphkit.engine.step.step_requests import RequestChecks
from graphkit.engine.token_matcher import TokenMatcher
from graphkit.errors import InputError, ReplayError, short_repr
from graphkit.graphs import Backend, backend_for
from graphkit.graphs.compiles import CompileWatch
from graphkit.ops.inference import allocates
from graphkit.records import CaptureRecord, MemoryEstimate
from graphkit.runners.capture_checks import host_objects
from graphkit.runners.memory_estimate import estimate_memory
from graphkit.spec import SpecConfig

_REASONS_OF_CALLERS = FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.STOP_STRING
_ENDS_OF_TEXT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT


class SpeculativeEngine:
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
            selects 512, and on CUDA 2,048 while no request runs. Beside running requests a forward
            takes more than 512 tokens only if a graph runs them within 30 ms.
        prefill_sizes: Numbers of prompt tokens to capture, ascending. A forward of up to the
            largest number then replays a graph. ``None`` selects a list from 64 to 2,048 on CUDA,
            and none elsewhere. Targets whose recurrent layers run node by node, attention that
            plans on the host and engines with ``group`` run prompts without graphs.
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
        # v2 enqueues one more step after the one that finishes a request.
        self.context_limit = context_limit_of(sizes, spec_step.max_path + spec_step.slots_ahead)
        self._admission = Admission(spec_step, self.context_limit)
        self.device, self.group = context.device, group
        self.structured_output = structured_output
        self._calls = None if group is None else CallBroadcast(group)
        self._batching = batching = ContinuousBatching(
            spec_step,
            self._admission,
            RequestChecks(
                sizes.vocab_size, self.context_limit, seed=seed, bos_token_id=bos_token_id
            ),
            rows,
            attention.kv_pool,
            self.generation,
            steps_per_launch,
        )
        self.memory, self.runners = batching.memory, batching.schedule.runners
        self._closed = self._is_released = False
        # Last, so that an engine that could not be created does not hold its pools.
        self._use = PoolUse("SpeculativeEngine", spec_step.pools, allocates=True)
        # Not at exit: the modules and the CUDA context that it needs may be gone by then.
        weakref.finalize(self, _free, batching.schedule, self.memory).atexit = False
        self.memory.open()
        self._compiles = CompileWatch()

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
        self._compiles.stop()
        planned = [runner for runner in self.runners if runner.status != "captured"]
        if planned:
            host_objects(self._forward).check_weights(self.device)
        warms_up = planned and self.generation != "v3"  # the runner of v3 warms up itself
        if warms_up:
            self._admission.capture(self.runners[0].capturing_backend())
        for runner in planned:
            progress(f"capturing {runner.label}")
            runner.capture()
        if warms_up and self.device.type == "cuda":
            warm_up_steps(self._spec_step, self.runners[0].capturing_backend())
        if warms_up:
            self._batching.schedule.measure_lengths(self.runners[0].capturing_backend())
        self._compiles.start()

    @property
    def late_compiles(self) -> tuple[str, ...]:
        """The Triton kernels that were compiled after ``capture``, with their shapes.

        Requests waited for them, and each is a warning in the log. Kernels of other code in the
        process are among them.
        """
        return tuple(found.text for found in self._compiles.compiles)

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
        if record is None and is_planned:
            backend = self.runners[0].capturing_backend()
            self._admission.warm_up(backend)
            if self.generation != "v3":  # the runner of v3 warms up itself
                # Some state is allocated when it is first written.
                warm_up_steps(self._spec_step, backend)
        more = [self._spec_step.memory_parts()]
        prompts = self._spec_step.prompts
        # A record has no graphs of prompts: it may be that of a runner of v3. Captures begin with
        # prompts, whose memory the other graphs use again.
        runners = self.runners if prompts is None or record else (prompts, *self.runners)
        return estimate_memory(self.runners[0].backend, runners, record, more)

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        matcher: TokenMatcher | None = None,
    ) -> Request:
        """Queue a prompt. A later ``step`` admits it as soon as there is room.

        Args:
            prompt_ids: Token ids to continue.
            sampling: ``None`` selects the defaults of ``SamplingParams``.
            matcher: Constrains the output to a grammar, from its first token on. Needs
                ``structured_output``. The request ends when the matcher terminates. ``top_k``,
                ``top_p`` and ``min_p`` apply to the tokens that it allows.

        Returns:
            The request, whose ``output_ids`` grow with each ``step``.

        Raises:
            InputError: The prompt is empty without a ``bos_token_id``, contains something other
                than token ids, or is too long for the context or the KV pool. ``sampling`` is not a
                ``SamplingParams``, or has a stop token outside the vocabulary. The engine has no
                structured output, or the matcher is not a ``TokenMatcher``, has terminated, or is
                for another vocabulary.
            ReplayError: The engine is closed.
        """
        request = self._create(prompt_ids, sampling, matcher)
        self._put([request])
        return request

    def _create(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None,
        matcher: TokenMatcher | None,
    ) -> Request:
        """Check the arguments of ``submit``, and return a request that does not wait yet."""
        self._check_open()
        if matcher is not None and not self.structured_output:
            raise InputError(
                "submit got a matcher, but the engine was created without structured output. Pass "
                "structured_output=True to SpeculativeEngine.",
                field="matcher",
            )
        if matcher is not None and self.group is not None:
            raise InputError(
                "submit got a matcher, which an engine with several ranks cannot pass on. Use an "
                "engine without group.",
                field="matcher",
            )
        return self._batching.queue.create(prompt_ids, sampling, matcher)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORTED) -> None:
        """End a request. It keeps its tokens and gets no more.

        A waiting request leaves the queue. The row and the KV slots of a running one are freed by
        the next ``step``, before waiting requests join; device loops of v3 end after the steps
        that they run. Does nothing for a request that has finished, except that ``STOP_STRING``
        replaces ``STOP``, ``LENGTH`` and ``CONTEXT``: its last step may have gone on behind the
        string. Does not wait.

        Args:
            request: As returned by ``submit``.
            reason: Its ``finish_reason``: ``ABORTED``, ``DEADLINE`` or ``STOP_STRING``.

        Raises:
            InputError: ``request`` is not a ``Request``, or belongs to another engine, or
                ``reason`` is another one.
            ReplayError: The engine is closed.
        """
        self._check_open()
        if not isinstance(request, Request):
            raise InputError(
                f"abort got {short_repr(request)}, expected a Request that submit returned.",
                field="request",
            )
        if reason not in _REASONS_OF_CALLERS:
            names = ", ".join(allowed.name for allowed in _REASONS_OF_CALLERS)
            raise InputError(
                f"abort got the reason {short_repr(reason)}, expected a FinishReason of {names}.",
                field="reason",
            )
        if request not in self._batching.queue and request not in self._batching.tally:
            raise InputError(
                "abort got a request of another engine. Pass a Request that submit of this engine "
                "returned.",
                field="request",
            )
        if request.is_finished:
            if reason is FinishReason.STOP_STRING and request.finish_reason in _ENDS_OF_TEXT:
                self._batching.tally.change_reason(request, reason)
            return
        self._batching.abort(request, reason)
        if self._calls is not None:
            self._calls.aborted(request)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._batching.queue)

    @property
    def stats(self) -> EngineStats:
        """Counts over all requests so far, as a snapshot."""
        batching = self._batching
        seconds = batching.schedule.seconds
        return batching.tally.stats(batching.queue, self.memory, self.runners, seconds)

    def step(self) -> NewTokens:
        """Admit waiting requests, prefill, run one step for all running ones, remove finished ones.

        At most one forward prefills prompts, with up to ``chunked_prefill_size`` tokens of all
        admitted requests together, so that running requests wait for one chunk at most. If the KV
        pool runs out, the requests that were admitted last are preempted: they wait again, before
        all others, and their text does not change.

        v1 drafts and verifies, waits for the accepted tokens, then catches up on them. It returns
        the tokens of this step.

        v2 enqueues the whole step, then waits for the tokens of the previous step and returns them.
        The call that finishes the last request returns all remaining tokens.

        v3 launches a loop if none runs, and the next one if no request waits. It returns the tokens
        of all completed steps, at least one. A waiting request ends the loops as soon as it has
        room, and joins when they have ended. While prompts are prefilled, a call runs one step.

        A batch with a matcher waits for its drafts, and for all earlier tokens, before it verifies.

        A request whose prefill or matcher raises an exception ends with ``FinishReason.FAILED``.
        The step completes for all other requests, then raises the exception.

        Returns:
            The new tokens of each request that has some. After a step that raised, the next call
            also returns the tokens that it had delivered.
        """
        return self._advance()[0]

    @torch.no_grad()
    def _advance(self) -> tuple[NewTokens, list[Request]]:
        """Do what ``step`` does; return the requests that ended since the last call, too."""
        return self._step() if self.group is None else self.group.guard(self._step)

    def _step(self) -> tuple[NewTokens, list[Request]]:
        self._check_open()
        if self._calls is None:
            return self._batching.step()
        self._calls.step()
        new_tokens, ended = self._batching.step()
        self._calls.check(new_tokens, ended)
        return new_tokens, ended

    def worker_loop(self) -> None:
        """Repeat the calls of rank 0 until it closes its engine. For the other ranks of ``group``.

        Raises:
            RankError: A rank has ended, or generated other tokens than rank 0.
            ReplayError: The engine has no group, is closed, or this is rank 0.
        """
        self._check_open()
        if self.group is None or self._calls is None or not self.group.rank:
            raise ReplayError(
                "worker_loop() is for ranks other than 0 of an engine with group=. "
                "Call submit and step."
            )
        self._calls.worker_loop(self.submit, self.abort, self.step)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Request]:
        """Continue all prompts until they finish; return the requests in the same order.

        If a step raises an exception, all requests of this call are aborted.

        Raises:
            InputError: As for ``submit``, or ``prompts`` cannot be iterated. No prompt is queued.
            ReplayError: The engine is closed.
        """
        self._check_open()
        if not isinstance(prompts, Iterable):
            raise InputError(
                f"generate got {short_repr(prompts)}, expected a sequence of prompts.",
                field="prompts",
            )
        requests = [self._batching.queue.create(prompt, sampling) for prompt in prompts]
        self._put(requests)
        try:
            while self.has_work:
                self.step()
        except BaseException:
            for request in requests:  # the caller cannot: they were not returned
                self.abort(request)
            raise
        return requests

    def close(self) -> None:
        """Close all runners and free what unfinished requests hold. May be called repeatedly.

        Unfinished requests keep the tokens generated so far, with ``finish_reason`` ``None``.

        Raises:
            RankError: A rank of ``group`` fails meanwhile, or generated other tokens. Everything is
                closed and freed nevertheless. After a failure of a rank, ``close`` does not wait.
        """
        if self._is_released:
            return
        self._closed, batching = True, self._batching
        self._compiles.stop()
        with ExitStack() as last_first:  # closes and frees everything, also if a rank has failed
            last_first.callback(batching.queue.close)
            for runner in reversed(self.runners):
                last_first.callback(runner.close)
            last_first.callback(self._use.end)
            last_first.callback(batching.release, resets=self.group is None)
            if self._calls is not None:
                self._calls.close()
            if not batching.is_interrupted:
                batching.is_interrupted = True
                if self.group is None:
                    batching.schedule.drain()
                elif not self.group.is_lost:  # after a failure of a rank, no tokens arrive
                    self.group.guard(batching.schedule.drain)
        self._is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self.group is not None:
            self.group.leave(error)
        self.close()

    def _put(self, requests: Sequence[Request]) -> None:
        self._batching.queue.put(requests)
        if self._calls is not None:
            for request in requests:
                self._calls.submitted(request)

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayError(
                "the engine is closed: it takes no requests and no capture. Create a new engine."
            )


def _free(schedule: Schedule, memory: RequestMemory) -> None:
    """Free the memory of an engine that was dropped without ``close``."""
    schedule.interrupt()
    memory.close()
