"""The settings of a speculative run, and the generation of the step that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NoReturn, TypeGuard

from graphkit.config import require_int, require_type
from graphkit.errors import ConfigError, short_repr
from graphkit.spec.algorithms import Algorithm, check_methods, get_algorithm
from graphkit.spec.modes import ForwardMode
from graphkit.spec.signatures import call_override


@dataclass(frozen=True, slots=True)
class Plan:
    """The generation of the step that runs, and the reason.

    ``v1`` has the host in the loop; ``v2`` overlaps the scheduler with the device; ``v3`` loops on
    the device.
    """

    generation: Literal["v1", "v2", "v3"]
    reason: str


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """The settings of a speculative step.

    Attributes:
        algorithm: A name, in any case, or an algorithm; stored as the algorithm.
        num_steps: Draft steps (S); 0 verifies the root alone. A sequence of ints in ascending
            order, stored as a tuple, captures steps of all these draft lengths, and steps that
            verify a part of the longest chains; each step runs the one with the most expected
            tokens per time. See ``graphkit.ops.draft_length``.
        topk: Branches kept per draft step (K); 1 drafts a chain.
        num_draft_tokens: Tokens verified per request, the root included (W). With several draft
            lengths, one ascending int per length, or that of the longest: each other length then
            verifies the nodes that it can draft, at most so many.
        page_size: Tokens per KV page.
        is_draft_worker: True if the runner belongs to the draft model.
        linear_attention: True if the target has mamba or linear-attention layers. Such a target
            must commit the recurrent state of the accepted path.

    Raises:
        ConfigError: A value is out of range or contradicts another, or a method of a custom
            algorithm has other parameters than its interface; ``field`` names the setting.
    """

    algorithm: str | Algorithm
    num_steps: int
    topk: int
    num_draft_tokens: int
    page_size: int = 1
    is_draft_worker: bool = False
    linear_attention: bool = False

    if TYPE_CHECKING:
        # Only settings with several draft lengths hold tuples, and what reads an int gets one of
        # ``lengths``. So the two fields are ints, and only the constructor takes more.
        def __init__(
            self,
            algorithm: str | Algorithm,
            num_steps: int | Sequence[int],
            topk: int,
            num_draft_tokens: int | Sequence[int],
            page_size: int = 1,
            is_draft_worker: bool = False,
            linear_attention: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", get_algorithm(self.algorithm))
        check_methods(self.resolved)
        for field in ("topk", "page_size"):
            require_int("SpecConfig", field, getattr(self, field))
        for field in ("is_draft_worker", "linear_attention"):
            require_type("SpecConfig", field, getattr(self, field), bool, "True or False")
        if is_sequence(self.num_steps):
            self._check_lengths(self.num_steps, self.num_draft_tokens)
            return
        require_int("SpecConfig", "num_draft_tokens", self.num_draft_tokens)
        require_int("SpecConfig", "num_steps", self.num_steps, least=0)
        if self.resolved.is_eagle() or self.resolved.is_standalone():
            if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
                raise ConfigError(
                    f"SpecConfig.num_draft_tokens is {self.num_draft_tokens}, but topk == 1 drafts "
                    f"a chain: it must be num_steps + 1 = {self.num_steps + 1}.",
                    field="num_draft_tokens",
                )
            self.check_draft_steps()

    @property
    def resolved(self) -> Algorithm:
        """The algorithm object that ``algorithm`` names."""
        return get_algorithm(self.algorithm)

    @property
    def lengths(self) -> tuple[SpecConfig, ...]:
        """Settings of each draft length, the shortest first; of a single one, these settings.

        A plain step (``num_steps`` 0) is a chain of one node, whatever ``topk`` is.
        """
        steps, widths = self.num_steps, self.num_draft_tokens
        if not (is_sequence(steps) and is_sequence(widths)):
            return (self,)
        return tuple(
            replace(self, num_steps=count, num_draft_tokens=width, topk=self.topk if count else 1)
            for count, width in zip(steps, widths, strict=True)
        )

    @property
    def longest(self) -> SpecConfig:
        """Settings of the longest draft length, which has the widest buffers."""
        return self.lengths[-1]

    @property
    def is_adaptive(self) -> bool:
        """Whether there are several draft lengths."""
        return is_sequence(self.num_steps)

    def check_draft_steps(self) -> None:
        """Check that S steps of K branches create enough nodes for W, the root included.

        Raises:
            ConfigError: They do not.
        """
        steps, topk, width = self.num_steps, self.topk, self.num_draft_tokens
        most = _most_nodes(steps, topk)
        if width > most:
            raise ConfigError(
                f"SpecConfig.num_draft_tokens is {width}, but {steps} steps of topk {topk} give at "
                f"most 1 + K + (S - 1) * K * K = {most} nodes, the root included.",
                field="num_draft_tokens",
            )

    def plan(self, no_loop_reason: str = "") -> Plan:
        """Return the generation of the step that runs by default, and why.

        Every algorithm, topk and page size runs in v3. With ``linear_attention``, every generation
        needs a target that commits the recurrent state of the accepted path;
        ``SpeculativeEngine`` refuses a target without one.

        Args:
            no_loop_reason: Reason why the device cannot run the steps alone, or an empty string: a
                backend's ``no_loop_reason`` or a step's ``eager_reason``. With a reason, v2 runs.
        """
        reason = "a chain" if self.topk == 1 else "a tree"
        if self.linear_attention:
            reason += ", if the target commits the recurrent state of the accepted path"
        if no_loop_reason:
            return Plan("v2", f"{reason}; v3 cannot run: {no_loop_reason}")
        return Plan("v3", reason)

    def tokens_per_request(self, mode: ForwardMode) -> int:
        """Return the rows per request in a mode (SGLang's num_tokens_per_bs).

        Raises:
            ConfigError: The mode has no rows, or the algorithm returns less than one row.
        """
        require_type("tokens_per_request", "mode", mode, ForwardMode, "a graphkit.ForwardMode")
        if mode is ForwardMode.TARGET_VERIFY:
            return self._verify_width()
        if self.is_adaptive:
            return self.longest.tokens_per_request(mode)
        widths = {
            ForwardMode.DECODE: 1,
            ForwardMode.DRAFT: self.topk,
            ForwardMode.DRAFT_EXTEND: self.num_steps + 1,
            ForwardMode.DRAFT_EXTEND_V2: self.num_draft_tokens,
            ForwardMode.MULTI_LAYER_EAGLE: self.num_draft_tokens,
        }
        if mode not in widths:
            raise ConfigError(f"forward mode {mode.name} has no rows.", field="mode")
        return widths[mode]

    def _verify_width(self) -> int:
        width: int = call_override(
            self.resolved,
            "get_num_tokens_per_bs_for_target_verify",
            self.longest.num_draft_tokens,
            self.is_draft_worker,
            field="algorithm",
        )
        require_int(f"{self.resolved!r}", "get_num_tokens_per_bs_for_target_verify()", width)
        return width

    def _check_lengths(self, num_steps: Sequence[int], num_draft_tokens: object) -> None:
        """Check several draft lengths, and store steps and nodes of each as tuples."""
        steps, topk = tuple(num_steps), self.topk
        for count in steps:
            require_int("SpecConfig", "num_steps", count, least=0)
        if is_sequence(num_draft_tokens):
            widths = tuple(num_draft_tokens)
        else:
            require_int("SpecConfig", "num_draft_tokens", num_draft_tokens)
            most: int = num_draft_tokens  # type: ignore[assignment]  # checked
            widths = (*(min(most, _most_nodes(count, topk)) for count in steps[:-1]), most)
        if not steps or len(widths) != len(steps):
            raise ConfigError(
                f"SpecConfig.num_steps is {short_repr(num_steps)} and num_draft_tokens is "
                f"{short_repr(num_draft_tokens)}, expected at least one draft length, and a "
                "width for "
                "each.",
                field="num_steps",
            )
        object.__setattr__(self, "num_steps", steps)
        object.__setattr__(self, "num_draft_tokens", widths)
        _ = self.lengths  # checks each
        if any(one > other for one, other in pairwise(steps)):
            _refuse_order("num_steps", steps)
        if any(one >= other for one, other in pairwise(widths)):
            _refuse_order("num_draft_tokens", widths)


def is_sequence(value: object) -> TypeGuard[Sequence[int]]:
    """Return whether a setting has several values, such as the draft lengths of a step."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _most_nodes(steps: int, topk: int) -> int:
    """Return the most nodes that S steps of K branches create, the root included."""
    return 1 + topk + (steps - 1) * topk * topk if steps else 1


def _refuse_order(field: str, values: tuple[int, ...]) -> NoReturn:
    raise ConfigError(
        f"SpecConfig.{field} is {values} for several draft lengths, expected ascending numbers.",
        field=field,
    )


def default_spec(
    algorithm: str,
    num_steps: int | Sequence[int] = 3,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    page_size: int = 1,
    *,
    linear_attention: bool = False,
) -> SpecConfig:
    """Return the settings of an algorithm, with the usual number of draft tokens.

    Args:
        algorithm: Name of the algorithm. NONE verifies the root alone, whatever the next three are.
        num_steps: Draft steps, or several ascending numbers of them; see ``SpecConfig``.
        topk: Branches kept per draft step: 1 drafts chains, more drafts trees.
        num_draft_tokens: Tokens verified per request, the root included; ``None`` selects
            ``num_steps + 1`` for a chain, and for a tree twice that or all of its nodes.
        page_size: As for ``SpecConfig``.
        linear_attention: As for ``SpecConfig``.

    Raises:
        ConfigError: See ``SpecConfig``.
    """
    if str(algorithm).upper() == "NONE":
        num_steps, topk, num_draft_tokens = 0, 1, 1
    if num_draft_tokens is None:
        longest = [0, *num_steps][-1] if isinstance(num_steps, Sequence) else num_steps
        require_int("SpecConfig", "num_steps", longest, least=0)
        num_draft_tokens = longest + 1
        if topk != 1:
            require_int("SpecConfig", "topk", topk)
            num_draft_tokens = min(2 * num_draft_tokens, _most_nodes(longest, topk))
    return SpecConfig(
        algorithm, num_steps, topk, num_draft_tokens, page_size, linear_attention=linear_attention
    )
