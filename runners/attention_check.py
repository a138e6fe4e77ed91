"""Comparison of trees and packed prefills with plain chains, before graphs are captured.

An attention backend may return ``True`` from ``supports`` for modes that it does not compute. The
text would be wrong, but no call would fail.

Shape letters: B requests, W rows of a step, L tokens of a short text, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from graphkit.buffers import TargetVerifyInputs
from graphkit.buffers.attention import kv_pools
from graphkit.errors import AttentionError
from graphkit.graphs import StateSnapshot
from graphkit.runners.ranks import RunnerGroup
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)
Call = Callable[[Callable[[], Any]], Any]
"""Calls a forward, together with all ranks, and returns its result."""
_MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
_SERVED = frozenset(
    ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc", "custom_mask",
     "token_bitmask")
)  # fmt: skip
"""Fields that the batches fill or omit."""
_OMITTED = "custom_mask", "token_bitmask"
_LIMIT, _LIMIT_OF_HALF = 2e-3, 0.1
"""Norm of the difference of two rows of logits, relative to that of a row, that is not rounding. In
dtypes of two bytes, rounding may choose other experts."""


@runtime_checkable
class RecurrentStates(Protocol):
    """States of recurrent layers by request row; ``graphkit.RecurrentStatePool`` has these members.

    Attributes:
        width: Most rows of a request whose states a step keeps.
        device: Device of the states.
    """

    width: int
    device: torch.device

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every buffer by name, [rows, ...]."""

    def reset(self, req_pool_indices: torch.Tensor) -> None:
        """Set the states of request rows, int64 [B], to those before any token."""

    def commit(self, req_pool_indices: torch.Tensor, nodes: torch.Tensor) -> None:
        """Keep the states behind row ``nodes[i]``, int64 [B], of each request's last step."""


def check_attention(
    runner: Any, states: RecurrentStates | None = None, group: RunnerGroup | None = None
) -> None:
    """Compare how the attention of a runner treats chains, trees and packed rows.

    Runs the forward eagerly on a short text in the first request rows and KV slots, and restores
    both. Nothing is compared with attention of graphkit, which has tests of its own, without
    attention over pools, where the forward reads fields that are not served here or raises an
    exception, or with blocks of DFLASH, whose rows see later ones.

    Args:
        runner: Runner of TARGET_VERIFY or DECODE. Others are not compared.
        states: Recurrent states of the model.
        group: Ranks that all call this; ``None`` selects those of the runner.

    Raises:
        AttentionError: Half of the rows of a request, or more, differ beyond rounding, on any rank.
    """
    if not _is_comparable(runner, states):
        return
    group = runner.group if group is None else group
    wrong: str | None = None
    try:
        with _calling_together(runner, group) as call:
            memory = _text_memory(runner, states)
            if group is not None and group.on_any(memory is None):
                return
            if memory is not None:
                wrong = _first_wrong(runner, states, memory, call, ends_early=group is not None)
    except Exception as error:  # the capture, or a batch, raises it where it belongs
        logger.info("The attention of %s was not compared: %r.", runner.label, error)
        return
    if group is not None and group.on_any(wrong is not None) and wrong is None:
        wrong = "computes other logits for a tree or a packed prefill on another rank, see there."
    if wrong is not None:
        raise AttentionError(f"{type(runner.attention).__name__} {wrong}")


@contextmanager
def _calling_together(runner: Any, group: RunnerGroup | None) -> Iterator[Call]:
    """Yield what calls a forward, on all ranks of a group at once as warm-ups do."""
    if group is None:
        yield lambda forward: forward()
        return
    backend = group.capturing_backend(runner.backend, {"the attention": runner.label})

    def together(forward: Callable[[], Any]) -> Any:
        results = []
        backend.warm_up(lambda: results.append(forward()))
        return results[-1]

    with backend.session():
        yield together


def _text_memory(
    runner: Any, states: RecurrentStates | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
    """Return what runs on a short text change, and the KV slots of the text, int64 [B, L].

    ``None`` if the pools have no room for it.
    """
    table, pools = runner.attention.req_to_token_pool.req_to_token, kv_pools(runner.attention)
    width, page = runner.tokens_per_request, pools[0].page_size
    length = width + 2 if width > 1 else 4
    pages = -(-length // page)
    room = min(pool.size // page for pool in pools) // pages
    requests = min(2, runner.sizes.max_batch_size, len(table) - 1, room)
    if requests < 1 or length > min(table.shape[1], runner.sizes.max_context_len):
        return None
    end = page * (1 + pages * requests)
    changed = {"table": table[1 : requests + 1, :length]}
    for index, pool in enumerate(pools):
        changed |= {
            f"kv {index} {name}": buffer[page:end] for name, buffer in pool.tensors().items()
        }
    if states is not None:
        changed |= {name: buffer[1 : requests + 1] for name, buffer in states.tensors().items()}
    known = {tensor.untyped_storage().data_ptr() for tensor in changed.values()}
    changed |= {
        f"state {name}": tensor
        for name, tensor in runner.mutable_state.items()
        if tensor.untyped_storage().data_ptr() not in known
    }
    first = page * (1 + pages * torch.arange(requests, device=runner.device))
    return changed, first[:, None] + torch.arange(length, device=runner.device)


def _first_wrong(
    runner: Any,
    states: RecurrentStates | None,
    memory: tuple[dict[str, torch.Tensor], torch.Tensor],
    call: Call,
    *,
    ends_early: bool,
) -> str | None:
    """Return what the attention computes wrongly first, as a clause; ``None`` if it is right.

    Args:
        runner: The runner.
        states: Recurrent states of the model.
        memory: See ``_text_memory``. It is restored.
        call: Calls the forward.
        ends_early: Whether an exception ends the comparison, as it must where ranks run together.
    """
    changed, slots = memory
    first = None
    with StateSnapshot(changed, runner.device):
        changed["table"].copy_(slots)
        text = _Text(runner, states, slots, call, has_mask=_has_mask(runner))
        compared = text.compare_tree, partial(text.compare_prefill, 2), text.compare_prefill
        for compare in (text.run_chains, *compared):
            try:
                wrong = compare()
            except Exception as error:
                if ends_early:
                    raise
                logger.info("The attention of %s was not compared: %r.", runner.label, error)
                continue
            first = wrong if first is None else first
    return first


def _is_comparable(runner: Any, states: RecurrentStates | None) -> bool:
    """Return whether the batches of this file show what the attention of a runner computes."""
    attention = runner.attention
    requests = getattr(attention, "req_to_token_pool", None)
    if getattr(requests, "req_to_token", None) is None or not kv_pools(attention):
        return False  # the slots of the text are unknown
    if getattr(attention, "window_req_to_token_pool", None) not in (None, requests):
        return False  # layers with a window read another table
    if type(attention).__module__.partition(".")[0] == "graphkit":
        return False  # has tests of its own
    if runner.spec.linear_attention and states is None:
        return False  # the states of the text cannot be restored
    if runner.spec.is_draft_worker and runner.spec.resolved.is_dflash():
        return False  # rows of a block see later ones
    fields = {layout.name for layout in runner.buffers.layouts}
    return runner.mode in _MODES and fields <= _SERVED and not runner.buffers.bound_fields


def _has_mask(runner: Any) -> bool:
    return any(layout.name == "custom_mask" for layout in runner.buffers.layouts)


class _Text:
    """A short text of each of one or two requests, and the batches that compute its logits.

    Args:
        runner: Runner of the forward.
        states: Recurrent states of the model, if any.
        slots: KV slots of the text, [B, L] int64; those of request rows 1 and 2.
        call: Calls the forward.
        has_mask: Whether the runner takes trees.
    """

    def __init__(
        self,
        runner: Any,
        states: RecurrentStates | None,
        slots: torch.Tensor,
        call: Call,
        *,
        has_mask: bool,
    ) -> None:
        self.runner, self._states, self._slots, self.has_mask = runner, states, slots, has_mask
        self._call = call
        self.requests, self.length = slots.shape
        self.width, device = runner.tokens_per_request, runner.device
        self.rows = torch.arange(1, self.requests + 1, device=device)
        column = torch.arange(self.length, device=device)
        self.tokens = (131 * column + 71 * self.rows[:, None] + 17) % runner.sizes.vocab_size
        self._ones = torch.ones(self.width, self.width, dtype=torch.bool, device=device)
        self.limit = _LIMIT if runner.sizes.dtype.itemsize > 2 else _LIMIT_OF_HALF

    def run_chains(self) -> None:
        """Compute the logits of the text, [B, L, V], by steps without branches."""
        self.begin()
        step, parts = 2 if self.width > 1 else 1, []
        for start in range(0, self.length - self.width, step):
            parts.append(self.chain(start)[:, :step])
            self.commit(step - 1)
        parts.append(self.chain(self.length - self.width))
        self.logits = torch.cat(parts, 1)

    def compare_tree(self) -> str | None:
        """Compare the path of a tree behind two tokens; return what differs."""
        if not self.has_mask or self.width < 3:
            return None
        self.begin()
        self.chain(0)
        self.commit(1)
        path, start = self.tree(2), 3
        where = self.first_wrong(path[:, 1:], self.logits[:, start : start + path.shape[1] - 1])
        if where is None:
            return None
        return _differs("TARGET_VERIFY", "a tree", where, start) + (
            "Read custom_mask, also where the forward does so itself, or use topk=1."
        )

    def compare_prefill(self, requests: int = 1) -> str | None:
        """Compare two chunks of each of some requests; return what differs."""
        if not self.runner.step.packs_rows:
            return None
        middle, count = self.length // 2, min(requests, self.requests)
        starts, ends = [0] * count, [self.length] * count
        middles = [middle + 1, middle - 1] if count > 1 else [middle]
        self.begin()
        for first, last in ((starts, middles), (middles, ends)):
            for request, made in enumerate(self.prefill(first, last)):
                rows = self.logits[request : request + 1, first[request] : last[request]]
                where = self.first_wrong(made[None], rows)
                if where is not None and len(made) > 1:
                    where = request, where[1]
                    return _differs("DRAFT_EXTEND", "a prefill", where, first[request]) + (
                        "Compute the metadata of DRAFT_EXTEND from num_accepted_tokens, and from "
                        "seq_lens, which include the rows, and let the forward read "
                        "inputs.attention. Or return False from supports(DRAFT_EXTEND)."
                    )
        return None

    def begin(self) -> None:
        """Set the recurrent states to those before the text."""
        if self._states is not None:
            self._states.reset(self.rows)

    def commit(self, node: int) -> None:
        """Keep the recurrent states after a row of each request."""
        if self._states is not None:
            self._states.commit(self.rows, torch.full_like(self.rows, node))

    def chain(self, start: int) -> torch.Tensor:
        """Return the logits of W tokens from a position on, [B, W, V], as a step computes them."""
        depth = torch.arange(self.width, device=self.rows.device)
        tokens = self.tokens[:, start : start + self.width]
        return self._step(start, tokens, depth, self._ones.tril())

    def tree(self, start: int) -> torch.Tensor:
        """Return the logits of W - 1 tokens from a position on, the path of a tree.

        Row 1 is a branch with another token. The others are the path, [B, W - 1, V].
        """
        width, device = self.width, self.rows.device
        depth = torch.arange(width, device=device).sub(1).clamp(min=0)
        depth[1] = 1
        tokens = self.tokens[:, start + depth].clone()
        tokens[:, 1] = (tokens[:, 1] + 1) % self.runner.sizes.vocab_size
        mask = self._ones.tril()
        mask[2:, 1] = False
        logits = self._step(start, tokens, depth, mask)
        return torch.cat([logits[:, :1], logits[:, 2:]], 1)

    def prefill(self, starts: Sequence[int], ends: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits of packed chunks of the first requests, [end - start, V] each."""
        spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        device, width, rows = self.rows.device, max(map(len, spans)), self.rows[: len(spans)]
        lengths = [len(span) for span in spans]

        def packed(values: torch.Tensor) -> torch.Tensor:
            parts = zip(values, spans, strict=False)
            return torch.cat([row[span.start : span.stop] for row, span in parts])

        positions = torch.arange(self.length, device=device).expand(self.requests, -1)
        logits = self._run(
            TargetVerifyInputs(
                req_pool_indices=rows,
                seq_lens=torch.tensor(starts, dtype=torch.int32, device=device),
                input_ids=packed(self.tokens),
                positions=packed(positions),
                out_cache_loc=packed(self._slots),
                lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
                width=width,
                spans=spans,
            ),
            _OMITTED,
        )
        if self._states is not None:
            self.commit(min(width, self._states.width) - 1)
        return list(logits.split(lengths))

    def first_wrong(self, made: torch.Tensor, expected: torch.Tensor) -> tuple[int, int] | None:
        """Return request and row of the first difference if half of a request's rows differ.

        Shapes:
            made, expected: [B, rows, V] float32.
        """
        size = torch.maximum(expected.norm(dim=-1), made.norm(dim=-1)).clamp(min=1e-6)
        is_wrong = (made - expected).norm(dim=-1) / size > self.limit
        for request, rows in enumerate(is_wrong.tolist()):
            if rows and 2 * sum(rows) >= len(rows):
                return request, rows.index(True)
        return None

    def _step(
        self, start: int, tokens: torch.Tensor, depth: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        positions = (start + depth).expand(self.requests, -1)
        logits = self._run(
            TargetVerifyInputs(
                req_pool_indices=self.rows,
                seq_lens=torch.full_like(self.rows, start, dtype=torch.int32),
                input_ids=tokens.flatten(),
                positions=positions.flatten(),
                out_cache_loc=self._slots[:, start : start + self.width].flatten(),
                custom_mask=mask.expand(self.requests, -1, -1) if self.has_mask else None,
            ),
            _OMITTED[1:],
        )
        return logits.view(self.requests, self.width, -1)

    def _run(self, batch: TargetVerifyInputs, without: Sequence[str]) -> torch.Tensor:
        output = self._call(lambda: self.runner.step.unpadded(batch, without))
        return torch.nan_to_num(output.next_token_logits.float(), 0.0, 0.0, 0.0).clone()


def _differs(mode: str, what: str, where: tuple[int, int], start: int) -> str:
    request, row = where
    return (
        f"supports {mode}, but the logits of {what} differ from those of a chain of the same "
        f"tokens, first in request {request} at position {start + row}: the text would be wrong. "
        "check=False leaves this comparison out. "
    )
