"""Targets: the forwards of a model, with everything that is needed to capture and check them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from graphkit.buffers import AttentionBackend, StepInputs
from graphkit.config import BufferSizes
from graphkit.errors import TargetError, short_repr
from graphkit.graphs import Backend
from graphkit.graphs.capture_failure import describe_exception
from graphkit.runners import RUNNERS, Output, Runner
from graphkit.runners.capture_checks import RecurrentStates
from graphkit.runners.targets.argument_checks import check_arguments, has_runner
from graphkit.spec import ForwardMode, SpecConfig

if TYPE_CHECKING:
    from graphkit.runners.ranks import RunnerGroup

Forward = Callable[[Any], Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CaptureTarget:
    """A model and its draft models, with everything that commands, audits and tests need.

    Commands take a target as ``package.module:attribute``, or a function that returns one. The
    function is called with ``device=`` and ``group=`` if it takes them.
    ``tools/examples/own_target.py`` is a complete example.

    ``attention``, ``optional_fields``, ``inputs_type`` and ``output_type`` apply to all modes, or
    are mappings from a mode to its value; a mode that is not in the mapping has none.

    Attributes:
        name: Name for messages and records.
        spec: How the algorithm drafts and verifies.
        sizes: Sizes of the buffers.
        forwards: Forward of each mode, as the mode's runner takes it; see
            ``graphkit.runners.RUNNERS``. For modes that take layers, such as MULTI_LAYER_EAGLE, a
            sequence or an ``nn.ModuleList`` with one forward per step.
        sample_batch: ``sample_batch(mode, batch_size, seed)`` returns a live batch, the same for
            the same arguments: the mode's inputs as numpy arrays or CPU tensors, with hidden
            states on the target's device. ``None`` draws random batches, see
            ``Runner.sample_batch``, whose prefixes are not in the KV pools.
        weights: A module, or tensors by name; constant while graphs exist.
        mutable_state: Tensors that a step of any mode may change, by name, such as KV pools.
        persistent_tensors: Tensors that forwards allocate during a capture, and whose contents
            must last from replay to replay because no node writes them, by name; or a function
            that returns them. Read after the capture, so a dict may be filled by the forwards. The
            owner must fill them again after anything that overwrites graph memory, such as a sleep.
        host_values: Host values that a graph must not keep, by name: a setter, and two or more
            values for it. A value applies from the next step on, whether that is a replay or not.
        attention: Attention backend that forwards read ``inputs.attention`` from. A draft model
            has its own KV pool, hence its own backend.
        batch_sizes: Sizes to capture in addition to the largest; ``None`` selects the default list.
        optional_fields: Optional fields that batches bring; ``None`` selects what the spec implies,
            such as ``custom_mask`` for trees.
        inputs_type: Subclass of the mode's inputs that declares further fields.
        output_type: Class of the output of STEP, which has no fixed one.
        draft_token_map: Target token of each id of a reduced draft vocabulary, as ``Runner`` takes
            it; ``None`` without one.
        served_modes: Modes that this target serves; an audit warns of each that has no graph, and
            of no other. ``None`` selects the modes of ``forwards``; an audit then notes which
            further modes the algorithm runs.
        engine: ``engine(batch_sizes=..., device=..., backend=...)`` returns a new
            ``SpeculativeEngine`` with these arguments, for ``sizes.max_batch_size`` requests. It
            has pools of its own; models may be shared. Its whole step, captured as one graph, is
            then the target's STEP. Commands admit requests with random prompts to it, and close it.
        group: Ranks whose forwards have collectives with each other; see ``Runner``. Every rank
            runs the commands, with a target that samples the same batches.
        model: The model that TARGET_VERIFY and DECODE wrap: a causal language model of
            transformers, or any function from token ids, int64 [1, N] on the device, to logits
            [1, N, V], or to an object with ``logits``. It must not run through the wrapper.
            Commands and audits compare the forwards with it, as ``testing.check_wrapper`` does.
        recurrent_state: States of the recurrent layers that the forwards read and write. The
            comparison with ``model`` commits them after a prompt.
        kv_slots: KV slot of each position of each row of the request pool, int [rows, context],
            for the comparison with ``model``; 0 where a position has none. ``None`` reads the
            ``req_to_token_pool`` of ``attention``.

    Raises:
        TargetError: An argument has a wrong type, a forward cannot be called, ``forwards`` has a
            key without a runner, or STEP has both a forward and an engine.
    """

    name: str
    spec: SpecConfig
    sizes: BufferSizes
    forwards: Mapping[ForwardMode, Forward | Sequence[Forward]]
    sample_batch: Callable[[ForwardMode, int, int], Any] | None = None
    weights: nn.Module | Mapping[str, torch.Tensor] | None = None
    mutable_state: Mapping[str, torch.Tensor] | None = None
    persistent_tensors: (
        Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]] | None
    ) = None
    host_values: Mapping[str, tuple[Callable[[Any], None], Sequence[Any]]] = field(
        default_factory=dict
    )
    attention: AttentionBackend | Mapping[ForwardMode, AttentionBackend] | None = None
    batch_sizes: Sequence[int] | None = None
    optional_fields: Sequence[str] | Mapping[ForwardMode, Sequence[str]] | None = None
    inputs_type: type[StepInputs] | Mapping[ForwardMode, type[StepInputs]] | None = None
    output_type: type[Output] | Mapping[ForwardMode, type[Output]] | None = None
    draft_token_map: torch.Tensor | None = None
    served_modes: Collection[ForwardMode] | None = None
    engine: Callable[..., Any] | None = None
    group: RunnerGroup | None = None
    model: Callable[[torch.Tensor], Any] | None = None
    recurrent_state: RecurrentStates | None = None
    kv_slots: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_arguments(vars(self))

    @property
    def modes(self) -> tuple[ForwardMode, ...]:
        """The modes of ``forwards``, then STEP if there is an ``engine``."""
        return (*self.forwards, *([ForwardMode.STEP] if self.engine is not None else ()))

    def resolved_persistent_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of ``persistent_tensors`` as it is now, by name.

        Raises:
            TargetError: It has, or returns, something other than tensors by name.
        """
        declared = self.persistent_tensors
        kept = declared() if callable(declared) else declared
        if kept is None:
            return {}
        is_mapping = isinstance(kept, Mapping)
        if not is_mapping or not all(isinstance(one, torch.Tensor) for one in kept.values()):
            raise TargetError(
                f"target {self.name!r}: persistent_tensors is {short_repr(kept)}. Pass tensors by "
                "name, or a function that returns them."
            )
        return dict(kept)

    def batch(self, mode: ForwardMode, batch_size: int, seed: int) -> Any:
        """Return a batch of ``sample_batch``, checked, or a random one without it.

        Raises:
            TargetError: ``mode`` is no forward mode; ``sample_batch`` raised an error, or returned
                something other than inputs of the mode with ``batch_size`` requests.
        """
        _check_is_mode(mode)
        if self.sample_batch is None:
            return self._runner(mode, device="cpu").sample_batch(batch_size, seed)
        try:
            batch = self.sample_batch(mode, batch_size, seed)
        except Exception as error:
            raise TargetError(
                f"target {self.name!r}: sample_batch({mode.name}, {batch_size}, {seed}) failed: "
                f"{describe_exception(error)}."
            ) from error
        inputs_type = RUNNERS[mode].inputs_type
        if not isinstance(batch, inputs_type):
            raise TargetError(
                f"target {self.name!r}: sample_batch returned a {type(batch).__name__} for "
                f"{mode.name}. Return graphkit.{inputs_type.__name__}."
            )
        if batch.batch_size != batch_size:
            raise TargetError(
                f"target {self.name!r}: sample_batch({mode.name}, {batch_size}, {seed}) returned "
                f"{batch.batch_size} requests instead of {batch_size}."
            )
        return batch

    def check_mode(self, mode: ForwardMode) -> None:
        """Check that the target has a forward for a mode, or an engine for STEP.

        Raises:
            TargetError: It has none, or ``mode`` is not a ``ForwardMode``.
        """
        _check_is_mode(mode)
        if mode not in self.modes:
            names = ", ".join(mode.name for mode in self.modes) or "none"
            raise TargetError(
                f"target {self.name!r} has no forward for {mode.name}; it has {names}."
            )

    def runner(
        self,
        mode: ForwardMode,
        *,
        batch_sizes: Sequence[int] | None = None,
        device: torch.device | str = "auto",
        backend: Backend | None = None,
        check: bool | None = None,
    ) -> Runner[Any, Any]:
        """Return a planned runner for one of the modes of ``forwards``.

        See ``Runner`` for the arguments.

        Raises:
            TargetError: The target has no forward for the mode.
        """
        return self._runner(
            mode,
            batch_sizes=self.batch_sizes if batch_sizes is None else batch_sizes,
            device=device,
            backend=backend,
            mutable_state=self.mutable_state,
            draft_token_map=self.draft_token_map,
            group=self.group,
            check=check,
        )

    def _runner(self, mode: ForwardMode, **settings: Any) -> Runner[Any, Any]:
        """Return a runner with the fields and the attention of a mode, and further settings."""
        self.check_mode(mode)
        if mode not in self.forwards:
            raise TargetError(
                f"target {self.name!r} has no forward for STEP, but an engine. Use "
                "graphkit.capture_target, or the runner of a SpeculativeEngine."
            )
        kind, attention = RUNNERS[mode], _for_mode(self.attention, mode)
        settings |= kind.constructor_kwargs(
            _for_mode(self.inputs_type, mode), _for_mode(self.output_type, mode)
        )
        if attention is not None:
            settings["attention"] = attention
        return kind(
            self.forwards[mode],
            spec=self.spec,
            sizes=self.sizes,
            optional_fields=_for_mode(self.optional_fields, mode),
            **settings,
        )


def selected_modes(target: object, modes: object = None) -> list[ForwardMode]:
    """Return the modes to work on, each once.

    Args:
        target: A ``CaptureTarget``.
        modes: Modes of the target; ``None`` selects all of it.

    Raises:
        TargetError: ``target`` is not a target or has no mode, or ``modes`` has something other
            than its modes.
    """
    if not isinstance(target, CaptureTarget):
        raise TargetError(
            f"a target must be a graphkit.CaptureTarget, got {short_repr(target)}. To audit a "
            "runner, pass a CaptureTarget of its spec, sizes, attention and forward."
        )
    if not isinstance(modes, (Iterable, type(None))) or isinstance(modes, str):
        raise TargetError(f"modes must be graphkit.ForwardMode members, got {short_repr(modes)}.")
    chosen = list(modes or target.modes)
    if not chosen:
        raise TargetError(f"target {target.name!r} has no forward. Give it one for a mode.")
    for mode in chosen:
        target.check_mode(mode)
    return list(dict.fromkeys(chosen))


def _check_is_mode(mode: object) -> None:
    if not has_runner(mode):
        raise TargetError(f"a mode must be a graphkit.ForwardMode with a runner, got {mode!r}.")


def _for_mode(value: T | Mapping[ForwardMode, T] | None, mode: ForwardMode) -> T | None:
    return value.get(mode) if isinstance(value, Mapping) else value
