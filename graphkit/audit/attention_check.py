"""Comparison of trees and packed prefills with plain chains, before graphs are captured.

An attention backend may return ``True`` from ``supports`` for modes that it does not compute. The
text would be wrong, but no call would fail.

Shape letters: B requests, W rows of a step, L tokens of a short text, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from graphkit.buffers.attention import kv_pools
from graphkit.errors import AttentionError
from graphkit.graphs import StateSnapshot
from graphkit.models.wrapper.text_batches import (
    SERVED_FIELDS,
    TextBatch,
    TextBatches,
    TreeRequest,
    run_batch,
)
from graphkit.runners.capture_checks import RecurrentStates
from graphkit.runners.mode_declaration import Numbers
from graphkit.runners.ranks import RunnerGroup
from graphkit.spec import ForwardMode

logger = logging.getLogger(__name__)
Call = Callable[[Callable[[], Any]], Any]
"""Calls a forward, together with all ranks, and returns its result."""
_MODES = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
_LIMIT, _LIMIT_OF_HALF = 2e-3, 0.1
"""Norm of the difference of two rows of logits, relative to that of a row, that is not rounding. In
dtypes of two bytes, rounding may choose other experts."""


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

    Restores ``memory``, see ``_text_memory``. With ``ends_early`` an exception ends the comparison,
    as it must where ranks run together.
    """
    changed, slots = memory
    first = None
    with StateSnapshot(changed, runner.device):
        changed["table"].copy_(slots)
        text = _Text(runner, states, slots, call)
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
    return runner.mode in _MODES and fields <= {*SERVED_FIELDS} and not runner.buffers.bound_fields


class _Text:
    """A short text of each of one or two requests, and the batches that compute its logits.

    ``slots`` are the KV slots of the text, [B, L] int64; those of request rows 1 and 2.
    """

    def __init__(
        self, runner: Any, states: RecurrentStates | None, slots: torch.Tensor, call: Call
    ) -> None:
        self._runner, self._states, self._call = runner, states, call
        self._slots = slots.cpu().numpy()
        self._count, self._length = slots.shape
        self._width, self._vocab = runner.tokens_per_request, runner.sizes.vocab_size
        self._rows = np.arange(1, self._count + 1)
        column = np.arange(self._length)
        self._tokens = (131 * column + 71 * self._rows[:, None] + 17) % self._vocab
        self._limit = _LIMIT if runner.sizes.dtype.itemsize > 2 else _LIMIT_OF_HALF

    def run_chains(self) -> None:
        """Compute the logits of the text, [B, L, V], by steps without branches."""
        step, parts = 2 if self._width > 1 else 1, []
        for start in range(0, self._length - self._width, step):
            parts.append(self._chain(start)[:, :step])
            self._commit(step - 1)
        parts.append(self._chain(self._length - self._width))
        self.logits = torch.cat(parts, 1)

    def compare_tree(self) -> str | None:
        """Compare the path of a tree behind two tokens; return what differs.

        Row 1 is a branch with another token. The others are the path.
        """
        has_mask = any(layout.name == "custom_mask" for layout in self._runner.buffers.layouts)
        if not has_mask or self._width < 3:
            return None
        self._chain(0)
        self._commit(1)
        nodes, start = np.arange(self._width), 3
        depths = np.maximum(nodes - 1, 0)
        depths[1] = 1
        tokens = self._tokens[:, 2 + depths]
        tokens[:, 1] = (tokens[:, 1] + 1) % self._vocab
        parents = np.maximum(nodes - 1, 0)
        parents[1:3] = 0
        path = self._step(2, tokens, parents)[:, 2:]
        where = self._first_wrong(path, self.logits[:, start : start + path.shape[1]])
        if where is None:
            return None
        return _differs("TARGET_VERIFY", "a tree", where, start) + (
            "Read custom_mask, also where the forward does so itself, or use topk=1."
        )

    def compare_prefill(self, requests: int = 1) -> str | None:
        """Compare two chunks of each of some requests; return what differs."""
        if not self._runner.step.packs_rows:
            return None
        middle, count = self._length // 2, min(requests, self._count)
        middles = [middle + 1, middle - 1] if count > 1 else [middle]
        texts = self._requests(self._length, self._tokens[:, :0], np.zeros(0, dtype=np.int64))
        for chunk in (
            [(request, range(end)) for request, end in enumerate(middles)],
            [(request, range(start, self._length)) for request, start in enumerate(middles)],
        ):
            logits = self._run(TextBatches(self._runner, texts).chunk(chunk, is_packed=True))
            made = logits.split([len(span) for _, span in chunk])
            for (request, span), rows in zip(chunk, made, strict=True):
                expected = self.logits[request : request + 1, span.start : span.stop]
                where = self._first_wrong(rows[None], expected)
                if where is not None and len(rows) > 1:
                    where = request, where[1]
                    return _differs("DRAFT_EXTEND", "a prefill", where, span.start) + (
                        "Compute the metadata of DRAFT_EXTEND from num_accepted_tokens, and from "
                        "seq_lens, which include the rows, and let the forward read "
                        "inputs.attention. Or return False from supports(DRAFT_EXTEND)."
                    )
        return None

    def _first_wrong(self, made: torch.Tensor, expected: torch.Tensor) -> tuple[int, int] | None:
        """Return request and row of the first difference if half of a request's rows differ.

        Shapes:
            made, expected: [B, rows, V] float32.
        """
        size = torch.maximum(expected.norm(dim=-1), made.norm(dim=-1)).clamp(min=1e-6)
        is_wrong = (made - expected).norm(dim=-1) / size > self._limit
        for request, rows in enumerate(is_wrong.tolist()):
            if rows and 2 * sum(rows) >= len(rows):
                return request, rows.index(True)
        return None

    def _chain(self, start: int) -> torch.Tensor:
        """Return the logits of W tokens from a position on, [B, W, V], as a step computes them."""
        tokens = self._tokens[:, start : start + self._width]
        return self._step(start, tokens, np.maximum(np.arange(self._width) - 1, 0))

    def _step(self, start: int, tokens: Numbers, parents: Numbers) -> torch.Tensor:
        """Return the logits of trees behind the first tokens, [B, W, V]."""
        requests = self._requests(start, tokens, parents)
        logits = self._run(TextBatches(self._runner, requests).step(range(self._count)))
        return logits.view(self._count, self._width, -1)

    def _requests(self, start: int, tokens: Numbers, parents: Numbers) -> list[TreeRequest]:
        each = zip(self._rows.tolist(), self._tokens, tokens, self._slots, strict=True)
        return [
            TreeRequest(row, text[:start], drafts, parents, slots)
            for row, text, drafts, slots in each
        ]

    def _commit(self, node: int) -> None:
        """Keep the recurrent states after a row of each request."""
        if self._states is not None:
            rows = torch.from_numpy(self._rows).to(self._states.device)
            self._states.commit(rows, torch.full_like(rows, node))

    def _run(self, batch: TextBatch) -> torch.Tensor:
        unpadded = self._runner.step.unpadded

        def run(inputs: Any, without: Sequence[str]) -> Any:
            return self._call(lambda: unpadded(inputs, without))

        output: Any = run_batch(batch, self._states, run)
        logits = output.next_token_logits
        return torch.nan_to_num(logits.float(), 0.0, 0.0, 0.0).clone()


def _differs(mode: str, what: str, where: tuple[int, int], start: int) -> str:
    request, row = where
    return (
        f"supports {mode}, but the logits of {what} differ from those of a chain of the same "
        f"tokens, first in request {request} at position {start + row}: the text would be wrong. "
        "check=False leaves this comparison out. "
    )
