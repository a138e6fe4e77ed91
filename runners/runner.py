"""Runner of a forward mode: settings, capture and replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch

from graphkit.buffers import AttentionBackend, InputBuffers, StepInputs, runner_capacity
from graphkit.config import BufferSizes
from graphkit.errors import InputError, ReplayError, short_repr
from graphkit.graphs import Attribution, Backend, SizeTable, backend_for, caller_line, environment
from graphkit.graphs.snapshot import check_restorable
from graphkit.graphs.streams import note_eager_step
from graphkit.ops.inference import allocates
from graphkit.records import CaptureRecord, ReplayStats, SizeRecord
from graphkit.runners.capture import SizeCapture, close_graphs, mode_record
from graphkit.runners.capture_checks import check_attention, host_objects
from graphkit.runners.captured_graphs import _CapturedGraphs
from graphkit.runners.dispatch import Decision, Dispatch
from graphkit.runners.outputs import Output
from graphkit.runners.replayer import NO_REPLAYS
from graphkit.runners.sample_batch import sample_batch
from graphkit.runners.settings import (
    check_callable,
    check_draft_token_map,
    check_forward,
    check_group,
    check_inputs_type,
    check_types,
    is_checking,
    prepare_attention,
    value_limits,
)
from graphkit.runners.staged import StagedBatch, stage
from graphkit.spec import ForwardMode, SpecConfig

if TYPE_CHECKING:
    from graphkit.runners.observe import ObservedReplay
    from graphkit.runners.ranks import AgreedSize, RunnerGroup
    from graphkit.runners.replay_consensus import ReplayConsensus

InputsT = TypeVar("InputsT", bound=StepInputs)
OutputT = TypeVar("OutputT", bound=Output)
ResultT = TypeVar("ResultT")


class Runner(_CapturedGraphs[OutputT], Generic[InputsT, OutputT]):
    """Captures a forward once per batch size and replays it for live batches.

    A replay writes one mailbox entry and launches one graph. The first nodes of the graph copy the
    inputs into place and pad them.

    Life: ``planned`` -> ``capture()`` -> ``captured`` -> ``close()`` -> ``closed``. A runner is a
    context manager that closes itself. One thread at a time may use it. Replays may be issued on
    several streams; each waits for the one before.

    Args:
        forward: The model's step. It takes the mode's inputs, padded to a captured size, and
            returns the mode's output with a row for each input row. It runs during capture, and
            for batches that fall back. It must not write into its inputs.
        spec: How the algorithm drafts and verifies.
        sizes: Sizes of the buffers.
        batch_sizes: Sizes to capture; ``None`` takes the default list up to the largest.
        device: ``auto``, ``cpu`` or ``cuda``.
        backend: Backend that captures. Runners that share one share its memory pool. ``None``
            selects the default of the device.
        attention: Backend that makes ``inputs.attention``; ``None`` if the forward has its own.
        multiple_of: Captured sizes are multiples of it.
        optional_fields: Optional fields that every batch brings; ``None`` selects what ``spec``
            implies.
        inputs_type: Subclass of the mode's inputs that declares further fields.
        bound_fields: Storage of fields that another graph writes in place. Batches omit them.
        mutable_state: Tensors that a step changes. Capture restores them.
        check: Whether to check values, too: indices in range, no duplicate KV slots, finite
            numbers. Values on the host are checked before a replay. Values on the device are
            checked inside the graph, and the next call raises ``InputError``. A replay raises
            ``ReplayError`` if a host number has changed, or a weight was replaced, since capture
            and the graph keeps it, see ``frozen_values``; not with ``group``. A capture logs a
            warning if the forward leaves a tensor in an object. ``None`` reads the environment
            variable ``GRAPHKIT_CHECK``. Only ``False`` lets ``capture`` skip the comparison of what
            the attention backend computes for trees and packed prefills with chains.
        draft_token_map: Target token of each id of a reduced draft vocabulary (d2t in other
            engines, there as differences), int64 [V] on the device with V =
            ``sizes.draft_vocab_size``. The logits of a draft model's forward then have V columns;
            modes that choose tokens from them return target tokens, and feed these to further
            draft steps. Probabilities are over the draft vocabulary. ``None``: columns are tokens.
        group: Ranks whose forwards have collectives with each other. Captures are then collective,
            and replays are agreed on; see ``RankGroup``. All ranks create their runners in the same
            order and with the same settings.

    Raises:
        ConfigError: A setting contradicts another one, or the device.
        DeviceError: The device does not exist.
    """

    @allocates
    def __init__(
        self,
        forward: Any,
        *,
        spec: SpecConfig,
        sizes: BufferSizes,
        batch_sizes: Iterable[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        attention: AttentionBackend | None = None,
        multiple_of: int = 1,
        optional_fields: Collection[str] | None = None,
        inputs_type: type[InputsT] | None = None,
        bound_fields: Mapping[str, torch.Tensor] | None = None,
        mutable_state: Mapping[str, torch.Tensor] | None = None,
        check: bool | None = None,
        draft_token_map: torch.Tensor | None = None,
        group: RunnerGroup | None = None,
    ) -> None:
        check_types(type(self), spec, sizes, attention, check)
        check_group(group)
        check_forward(forward)
        self._check_spec(spec)
        if inputs_type is not None:
            check_inputs_type(inputs_type, self.inputs_type)
        self.spec, self.sizes, self.attention = spec, sizes, attention
        self._compares_attention = check is not False
        self.table = SizeTable(sizes.max_batch_size, batch_sizes, multiple_of=multiple_of)
        self.backend = backend_for(device, backend)
        self.device = self.backend.device
        check_draft_token_map(draft_token_map, sizes, self.device)
        self.draft_token_map = draft_token_map
        self.tokens_per_request = self._rows_per_request(spec)
        self.eager_reason = prepare_attention(
            attention,
            self.attention_mode or self.mode,
            replace(sizes, max_batch_size=self.table.largest),
            self.tokens_per_request,
            may_stay_eager=self.may_stay_eager,
        )
        self.buffers = InputBuffers(
            runner_capacity(
                spec,
                sizes,
                requests=self.table.largest,
                tokens_per_request=self.tokens_per_request,
                seq_len_fill=1 if attention is None else attention.seq_len_fill_value,
                ragged=self.ragged,
                front_tokens=self.num_front_tokens,
            ),
            self.device,
            inputs_type=inputs_type or self.inputs_type,
            optional_fields=(self.implied_fields() if optional_fields is None else optional_fields),
            without=self.unused_fields(),
            bound_fields=bound_fields,
            check_device=self.backend.check_device,
            wait_for_device=self.backend.wait_for_device,
            limits=value_limits(sizes, attention) if is_checking(check) else None,
        )
        self.mutable_state = check_restorable({} if mutable_state is None else mutable_state)
        self.step = self.step_type(
            forward,
            self.mode,
            self.attention_mode or self.mode,
            spec,
            sizes,
            self.output_type,
            self.buffers,
            attention,
            draft_token_map,
        )
        self.dispatch = Dispatch(self.table, self.buffers, self.inputs_type, self.eager_reason)
        self.group = None
        self._consensus: ReplayConsensus | None = None
        if group is not None:
            self.join(group)
        self._replayer = None
        self._forward = forward
        self._frozen = None
        self._captured_at = ""
        self._captured_mode = None

    # Life.

    def join(self, group: RunnerGroup) -> None:
        """Let a planned runner capture and replay with other ranks, as ``group=`` does.

        Raises:
            ConfigError: ``group`` is not a ``RankGroup``.
            ReplayError: The runner is not ``planned``, or has a group.
        """
        from graphkit.runners.replay_consensus import ReplayConsensus

        check_group(group)
        if self.status != "planned" or self.group is not None:
            state = self.status if self.group is None else "in a group"
            raise ReplayError(f"join() needs a planned runner without group; this one is {state}.")
        self.group = group
        self._consensus = ReplayConsensus(group, group.add(self), self.step, self.dispatch)

    def capture(
        self,
        progress: Callable[[SizeRecord], None] | None = None,
        *,
        attribution: Attribution | None = None,
    ) -> CaptureRecord:
        """Capture every size, the largest first.

        A runner whose attention backend does not support graphs of its mode captures nothing if
        the mode allows that. The record then has no sizes, and every batch falls back.

        Args:
            progress: Called after each size.
            attribution: Records which module, operation and line creates each node, for
                ``inspect``. Captures take longer with it; replays do not.

        Raises:
            AttentionError: The attention backend supports a mode, but computes it differently: a
                tree or a packed prefill has other logits than a chain of the same tokens.
            CaptureError: A size cannot be captured. The attempt is undone: the runner is still
                ``planned`` and may capture again. With ``group`` all ranks raise it, with the rank
                that failed; if others were in the middle of an NCCL collective, that process group
                is aborted and cannot be used again.
            ConfigError: ``progress`` cannot be called, all weights of the forward are on another
                device, or settings differ between ranks.
            ReplayError: The runner is not ``planned``.
        """
        if self.status != "planned":
            raise ReplayError(
                f"capture() needs a planned runner, but this one is {self.status}. "
                "Create a new runner."
            )
        if progress is not None:
            check_callable("progress", progress)
        objects = host_objects(self._forward)
        objects.check_weights(self.device)
        if self._compares_attention and self.attention is not None:
            check_attention(self)
        self._captured_at = caller_line()
        sizes: Sequence[SizeRecord] = ()
        if not self.eager_reason:
            capture = SizeCapture(
                self.step, self.table, self.capturing_backend(), self.mutable_state, attribution
            )
            graphs = capture.capture(progress)
            try:
                self._frozen = objects.frozen_values(self)
                if self.buffers.value_checks is not None:
                    objects.warn_of_side_outputs(self.label, graphs[min(graphs)])
                self._replayer = self.make_replayer(graphs)
            except BaseException:
                close_graphs(graphs.values())
                raise
            sizes = capture.records
            self._replayer.consensus = self._consensus
            if self.buffers.value_checks is not None and self.group is None:
                self._replayer.frozen = self._frozen  # with a group, a comparison is collective
        mode = mode_record(self.step, sizes, self.eager_reason)
        record = CaptureRecord(
            target=self.step.name,
            backend=self.backend.name,
            environment=environment(self.device),
            modes=(mode,),
        )
        self._captured_mode = mode
        if not self.eager_reason:
            self.status = "captured"
        return record

    def close(self) -> None:
        """Close all graphs. May be called again. Outputs must not be used afterwards.

        With ``group`` every rank closes the runner, before its process group is destroyed. Nothing
        is compared after a rank has failed.

        Raises:
            RankError: Another rank does not close, or replayed more or fewer steps. The graphs are
                closed.
            ReplayError: The process group was destroyed before. The graphs are closed.
        """
        is_captured, self.status = self.status == "captured", "closed"
        try:
            if is_captured and self.group is not None and not self.group.has_raised:
                assert self._consensus is not None, "a member of a group has a consensus"
                self._consensus.close(self.stats.replays)
        finally:
            if self._replayer is not None:
                self._replayer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self.group is not None:
            self.group.leave(error)
        self.close()

    # Replay.

    def replay(
        self, batch: InputsT, *, padded_batch_size: int | None = None, clone: bool = False
    ) -> OutputT:
        """Replay the graph of the smallest size that holds the batch.

        Enqueues on the current stream. Does not synchronise and does not allocate device memory.
        Waits only if as many replays as the mailbox has entries are in flight.

        Args:
            batch: Inputs of the mode with live rows: device tensors, CPU tensors or numpy arrays.
                Device tensors are read in stream order and may be released at once.
            padded_batch_size: Captured size to run at, instead of the smallest that fits. An idle
                batch replays pads with it, and launches nothing without.
            clone: Whether to copy the output out of graph memory.

        Returns:
            The live rows. They alias graph memory and are valid until the next replay in that pool.

        Raises:
            InputError: A field is missing or wrong, or fields contradict each other as far as the
                host can read them; the name is in the text.
            SizeError: The batch is larger than the largest size.
            ReplayError: The runner is not ``captured``. With ``group`` it is a ``RankError`` if
                another rank cannot replay, refused its batch, or left.
        """
        if self._replayer is None or self.status != "captured":
            self._require_captured("replay")
        if self._consensus is not None:
            return self._consensus.run(self._replay_on_ranks, batch, padded_batch_size, clone)
        output: OutputT = self._replayer.replay(batch, padded_batch_size)  # type: ignore[union-attr]
        return output.clone() if clone else output

    def sample_batch(self, batch_size: int, seed: int = 0) -> InputsT:
        """Return a valid random batch, for a first ``replay``; the same for the same arguments.

        Token ids, positions and lengths are in range, and each row writes a KV slot of its own.
        Prefixes are made up: the KV cache does not hold them. A replay writes into the slots.
        Integer fields of your own get their pad value, because their range is unknown.

        Args:
            batch_size: Number of requests.
            seed: Seed of all values, an int from 0 on.

        Raises:
            ConfigError: ``max_context_len`` or the KV pool has no room for a step.
            InputError: An argument is not an int, or the buffers cannot hold so many requests.
        """
        batch: InputsT = sample_batch(self, batch_size, seed)
        return batch

    def stage(self, batch_size: int, num_tokens: int | None = None) -> StagedBatch[OutputT]:
        """Return the next mailbox entry, for the scheduler to write directly.

        Args:
            batch_size: Number of live requests.
            num_tokens: Number of live rows of a ragged batch; by default every row of every
                request.

        Raises:
            InputError: An argument is not an int, or the mode does not have ``num_tokens`` rows.
            SizeError: The batch is larger than the largest size, or empty.
            ReplayError: The runner is not ``captured``, or its attention backend plans on the host.
        """
        if self._replayer is None or self.status != "captured":
            self._require_captured("stage")
        return stage(self._replayer, batch_size, num_tokens)  # type: ignore[arg-type]

    def run(
        self, batch: InputsT, *, padded_batch_size: int | None = None, clone: bool = False
    ) -> OutputT:
        """Replay the batch, or fall back and count the reason. Does not change the batch's tensors.

        With ``group`` all ranks replay or all fall back, and one without requests runs pads.

        Args:
            batch: As for ``replay``.
            padded_batch_size: As for ``replay``; not used by a batch that falls back.
            clone: As for ``replay``.

        Raises:
            InputError: A field is missing or wrong, so the batch cannot run eagerly either.
            ReplayError: The runner is closed.
        """
        if self._consensus is not None and self.status != "closed":
            call = self._run_on_ranks if self._consensus.agrees else self._run_alone
            return self._consensus.run(call, batch, padded_batch_size, clone)
        return self._run_alone(batch, padded_batch_size, clone)

    def _run_alone(self, batch: InputsT, padded_batch_size: int | None, clone: bool) -> OutputT:
        reason = self.dispatch.eager_reason(batch, self.status)
        if reason is None:
            return self.replay(batch, padded_batch_size=padded_batch_size, clone=clone)
        if not reason.has_eager_way:
            raise ReplayError(f"{self.dispatch.explain(reason, batch, self.status)}.")
        output = self.fall_back(batch)
        if batch.batch_size:  # an idle batch needs no graph
            explain = partial(self.dispatch.explain, reason, batch, self.status)
            self.dispatch.count_fallback(reason.value, self.mode.name, explain)
        return output

    def fall_back(self, batch: InputsT, *, without: Collection[str] = ()) -> OutputT:
        """Run the forward on copies of the live rows, without padding and without a graph.

        Allocates memory, and synchronises if the forward does.

        Args:
            batch: As for ``replay``. With ``lengths`` and ``width``, the rows are packed: chunks of
                prompts of different lengths. ``attention`` must support DRAFT_EXTEND then.
            without: Optional fields that this batch omits, such as the mask of a tree in a prefill.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
            OutputError: The forward returned something other than its mode's output.
        """
        return self._on_ranks(self._fall_back, batch, without)

    def _fall_back(self, batch: InputsT, without: Collection[str]) -> OutputT:
        self.dispatch.require_inputs(batch)
        if not isinstance(without, Collection):
            raise InputError(
                f"without must be names of fields, got {short_repr(without)}.", field="without"
            )
        if batch.batch_size:
            note_eager_step(self.device)
            return self.step.unpadded(batch, without)
        self.buffers.checks.check_idle(batch)
        if self._replayer is not None and self.status == "captured":
            return self._replayer.idle()
        empty: OutputT = self.output_type.empty(self.spec, self.sizes, self.device)
        return empty

    def run_padded(self, batch: InputsT, *, padded_batch_size: int | None = None) -> OutputT:
        """Run the captured functions for a batch without a graph: refresh, padding and forward.

        The result equals the output of ``replay`` bit for bit unless the graph is wrong. It is not
        counted as a replay. Works before ``capture``, too.

        Args:
            batch: As for ``replay``.
            padded_batch_size: Captured size to run at; by default the smallest that fits.

        Returns:
            The live rows.

        Raises:
            InputError: A field is missing or wrong; its name is in the text.
            SizeError: The batch does not fit the size.
            ReplayError: The runner is closed.
        """
        if self.status == "closed":
            raise ReplayError("the runner is closed. Create a new runner.")
        return self._on_ranks(self._run_padded, batch, padded_batch_size)

    def _run_padded(self, batch: InputsT, padded_batch_size: int | None) -> OutputT:
        self.dispatch.require_inputs(batch)
        if not batch.batch_size:
            return self.fall_back(batch)
        size = self.dispatch.checked_size(batch, padded_batch_size)
        self.backend.wait_for_replays()
        output = self.step.padded(batch, size)
        return output.live(batch.batch_size, self.buffers.checks.count_tokens(batch))

    def run_pads(self, agreed: AgreedSize) -> None:
        """Run pads as agreed with the other ranks; see ``RankGroup.idle``."""
        assert self._consensus is not None, "a member of a group has a consensus"
        self._consensus.counted(agreed)
        if agreed.can_replay:
            self._require_captured("idle").pads(agreed.padded_batch_size)
        else:
            self._consensus.run(self._pads_without_graph)

    def can_replay(self, batch: InputsT) -> Decision:
        """Return whether ``replay`` accepts the batch, and if not, why. Launches nothing."""
        return self.dispatch.decide(batch, self.status)

    def observe(
        self, observer: Callable[[ObservedReplay[OutputT]], OutputT]
    ) -> AbstractContextManager[None]:
        """Pass every replay of a block through an observer.

        ``observer(replay)`` is called after a batch was written and before its graph is launched,
        by ``replay``, ``run`` and staged batches. It calls ``replay()`` once and returns the
        output. Blocks may be nested; the innermost observer is called first. Idle batches and
        batches that fall back are not observed.

        Raises:
            ConfigError: ``observer`` cannot be called.
            ReplayError: The runner is not ``captured``.
        """
        replayer = self._require_captured("observe")
        check_callable("observer", observer)
        from graphkit.runners.observe import observed

        return observed(replayer, observer)

    @contextmanager
    def without_stats(self) -> Iterator[None]:
        """Leave the replays and fallbacks of a block out of ``stats`` when it has ended."""
        replayer, counts_fallbacks = self._replayer, self.dispatch.counts_fallbacks
        before = {} if replayer is None else replayer.counts()
        self.dispatch.counts_fallbacks = False
        try:
            yield
        finally:
            self.dispatch.counts_fallbacks = counts_fallbacks
            if self._replayer is not None:
                self._replayer.reset_counts(before)

    @property
    def stats(self) -> ReplayStats:
        """Replays and fallbacks so far; also after ``close``."""
        stats, consensus = self._replayer.stats() if self._replayer else NO_REPLAYS, self._consensus
        return replace(
            stats,
            fallbacks=dict(self.dispatch.fallbacks),
            agreements=consensus.agreements if consensus else 0,
            idle=consensus.idle if consensus else 0,
        )

    def _on_ranks(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Make a call that all ranks of the group make."""
        return call(*arguments) if self.group is None else self.group.run(call, *arguments)

    def _replay_on_ranks(
        self, batch: InputsT, padded_batch_size: int | None, clone: bool
    ) -> OutputT:
        """Replay as all ranks do."""
        assert self._consensus is not None, "a member of a group has a consensus"
        size = self._consensus.size_to_replay(batch, self.status, padded_batch_size)
        output: OutputT = self._require_captured("replay").replay(batch, size)
        return output.clone() if clone else output

    def _run_on_ranks(self, batch: InputsT, padded_batch_size: int | None, clone: bool) -> OutputT:
        """Replay or fall back, as all ranks do."""
        assert self._consensus is not None, "a member of a group has a consensus"
        agreed = self._consensus.agree(batch, self.status, padded_batch_size)
        if agreed.mode is ForwardMode.IDLE:
            return self._fall_back(batch, ())
        if agreed.can_replay:
            replayer = self._require_captured("run")
            output: OutputT = replayer.replay(batch, agreed.padded_batch_size)
            return output.clone() if clone else output
        if not batch.batch_size:
            return self._consensus.run(self._pads_without_graph)
        reason = self._consensus.explain(agreed)
        self.dispatch.count_fallback(reason, self.mode.name, lambda: reason)
        return self.fall_back(batch)

    def _pads_without_graph(self) -> OutputT:
        """Run a padded step on pads alone, for collectives that others run eagerly."""
        self.backend.wait_for_replays()
        return self.step.padded(None, self.table.sizes[0]).live(0, 0)
