"""The loop of an engine: requests join a batch between its steps, and leave it."""

from __future__ import annotations

from graphkit.engine.kv import KVPool, RequestPool
from graphkit.engine.queue import RequestQueue
from graphkit.engine.request import FinishReason, NewTokens, Request
from graphkit.engine.request_memory import RequestMemory, SlotReservation, StepSlots
from graphkit.engine.schedule import DeviceSchedule, RunningBatch, Schedule
from graphkit.engine.stats import Tally
from graphkit.engine.step import Admission, SpecStep, SpecStepRunner
from graphkit.engine.step.step_requests import RequestChecks


class ContinuousBatching:
    """Runs steps for all requests that have room.

    Args:
        step: The step, whose drafter is prepared.
        admission: Prefills prompts.
        checks: Checks new requests.
        rows: Request pool. ``memory.open`` takes its free rows.
        kv_pool: Pool of the KV slots.
        generation: The generation that runs.
        steps_per_launch: Most steps of one launch.

    Attributes:
        queue: Requests that wait and that are admitted.
        schedule: Runs the steps.
        slots: Reserves the KV slots of the steps.
        memory: Rows and KV slots.
        tally: Counts of requests.
        is_interrupted: Whether a step has begun and not ended.
    """

    def __init__(
        self,
        step: SpecStep,
        admission: Admission,
        checks: RequestChecks,
        rows: RequestPool,
        kv_pool: KVPool,
        generation: str,
        steps_per_launch: int,
    ) -> None:
        sizes, group = step.context.sizes, step.context.options.group
        step_slots = StepSlots(step.max_path, step.slots_ahead)
        self.memory = memory = RequestMemory(rows, kv_pool.size, kv_pool.page_size)
        most_slots = sizes.max_batch_size * memory.whole_pages(sizes.max_context_len)
        self.slots = SlotReservation(memory, step_slots, steps_per_launch, most_slots)
        self.schedule: Schedule
        if generation == "v3":
            self.schedule = DeviceSchedule(SpecStepRunner.from_step(step), self.slots)
        else:
            if group is not None:
                for runner in step.runners:
                    runner.join(group)
            self.schedule = Schedule(step, self.slots, waits=generation == "v1")
        self.queue = RequestQueue(
            checks,
            admission,
            memory,
            step_slots,
            max_running=sizes.max_batch_size,
            spare_steps=steps_per_launch,
            fails_alone=group is None,
        )
        self.tally = Tally()
        self.is_interrupted = False
        self._device = step.context.device
        self._batch: RunningBatch | None = None

    def abort(self, request: Request, reason: FinishReason) -> None:
        """End a request that waits or runs. Does not wait."""
        request.finish_reason = reason  # first: an interrupted call ends it, too
        if self.queue.drop(request):
            self.tally.end([request])
        else:
            self.schedule.interrupt()

    def step(self) -> tuple[NewTokens, list[Request]]:
        """Admit, prefill and run a step; see ``SpeculativeEngine.step``.

        Returns:
            New tokens, and the requests that have ended since the last call.
        """
        if self.is_interrupted:
            self._restart()
        self.is_interrupted = True
        self._remove_finished()  # requests that were aborted
        if self.queue.prefilling or self.queue.can_admit:
            self.schedule.interrupt()
            if self.schedule.can_admit:
                self.queue.admit()
                if self.queue.prefilling:
                    self.queue.prefill(self.schedule.begin)
                self._remove_finished()  # requests that failed
        if self.schedule.can_admit:
            self._make_room()
        if self.queue.running:
            self.schedule.advance(
                self._running_batch(),
                is_anyone_waiting=self.queue.num_waiting > 0,
                is_prefilling=bool(self.queue.prefilling),
            )
            self._remove_finished()
        if not self.queue.running:
            self.schedule.drain()
        self.is_interrupted = False
        self.tally.raise_error()
        return self.tally.take_new_tokens(self.queue.started)

    def release(self, *, resets: bool) -> None:
        """Free what unfinished requests hold, and give up the rows.

        Args:
            resets: Whether tokens on their way to the host are discarded first.
        """
        if resets:
            self.schedule.reset()
        self._requeue()
        for request in self.queue.clear():
            self.tally.add(request)
        self.memory.close()

    def _make_room(self) -> None:
        """Reserve KV slots for the next step, and preempt requests if the pool has too few."""
        if not self.queue.running or self.schedule.make_room(self._running_batch()):
            return
        self.schedule.drain()  # after that, the host knows what each request needs
        self._remove_finished()
        if self.queue.running:
            self.slots.give_back(self.queue.running)
        while self.queue.running and not self.schedule.make_room(self._running_batch()):
            self.queue.preempt()
            self._batch = None

    def _remove_finished(self) -> None:
        finished = [request for request in self.queue.admitted if request.is_finished]
        self.tally.end(finished)
        self.queue.remove(finished)

    def _restart(self) -> None:
        """Requeue the running requests. An interrupted step leaves their device state unknown."""
        self.schedule.reset()
        self._requeue()
        self._batch = None

    def _requeue(self) -> None:
        """Let the admitted requests wait again, and end those that have finished."""
        self.queue.requeue()
        self.tally.end(self.queue.admitted)
        self.queue.drop_finished()

    def _running_batch(self) -> RunningBatch:
        """Return the running requests, a new batch only when they have changed."""
        running = self.queue.running
        if self._batch is None or self._batch.requests != running:
            self._batch = RunningBatch(running, self._device)
        return self._batch
