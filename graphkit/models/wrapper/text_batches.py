"""Batches that run texts, and which token of a text each of their rows ends.

A text runs as the chunks of a prompt, alone or packed beside others, and as chains and trees of
drafts behind a prompt. Chains also have different numbers of drafts in one batch. Comparisons of
attention, of wrappers with their models, and of rows with themselves in other batches all run texts
this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from graphkit.config import is_int
from graphkit.errors import ConfigError, TargetError, short_repr
from graphkit.ops.step_rows import pack_rows
from graphkit.runners import Runner
from graphkit.runners.capture_checks import RecurrentStates
from graphkit.runners.comparison.step_comparison import SEED
from graphkit.runners.mode_declaration import Numbers, tree_masks
from graphkit.runners.outputs import Output
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode

_OMITTED_IN_PROMPTS = ("custom_mask", "token_bitmask")
SERVED_FIELDS = (
    "req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc", "mrope_positions",
    *_OMITTED_IN_PROMPTS,
)  # fmt: skip
"""Fields that the batches fill, or may omit."""


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """A request with a prompt, and a tree of drafts behind it.

    Attributes:
        row: Its row in the request pool.
        prompt: Token ids, int64 [N].
        tokens: Token of each node, int64 [W]; the root follows the prompt.
        parents: Parent of each node, int64 [W], an earlier node; that of the root is 0.
        slots: KV slot of each position, then of each node behind the prompt, int64 [N + W].
    """

    row: int
    prompt: Numbers
    tokens: Numbers
    parents: Numbers
    slots: Numbers

    def paths(self) -> list[list[int]]:
        """Return the nodes from the root to each leaf."""
        inner = set(self.parents[1:].tolist())
        paths = []
        for leaf in range(len(self.parents)):
            if leaf not in inner:
                path = [leaf]
                while path[0]:
                    path.insert(0, int(self.parents[path[0]]))
                paths.append(path)
        return paths


@dataclass(frozen=True, slots=True)
class RowSource:
    """A sequence of tokens, and the rows of a batch that the model computes in it.

    Attributes:
        request: Index of the request.
        tokens: The tokens that the model runs on, int64 [N].
        rows: Indices of rows of the batch.
        positions: Position of each of these rows in the sequence.
        keys: Index of each token among the keys of its request, int64 [N]. The drafts of a tree
            have their keys behind the prompt, in the order of the nodes.
    """

    request: int
    tokens: Numbers
    rows: Sequence[int]
    positions: Sequence[int]
    keys: Numbers


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of live rows.

    Attributes:
        name: What the batch is, as a phrase.
        inputs: The mode's inputs.
        without: Optional fields that the batch omits.
        sources: Where the model computes the rows, each row once.
        advice: What to look at if a row differs although all earlier batches agree.
        is_step: Whether the rows are those of a step, and not of prompts.
        commits: Whether the states behind the rows are committed, as those of prompts are.
    """

    name: str
    inputs: Any
    without: tuple[str, ...]
    sources: Sequence[RowSource]
    advice: str
    is_step: bool = True
    commits: bool = False

    def keys(self) -> torch.Tensor:
        """Return the keys of each row's sequence up to its own, -1 behind it, int64 [T, N]."""
        longest = max(len(source.tokens) for source in self.sources)
        keys = torch.full((self.inputs.num_tokens, longest), -1)
        for source in self.sources:
            for row, position in zip(source.rows, source.positions, strict=True):
                keys[row, : position + 1] = torch.as_tensor(source.keys[: position + 1])
        return keys


class TextBatches:
    """Makes the batches of one mode.

    Args:
        runner: Runner of TARGET_VERIFY or DECODE.
        requests: The requests.
        rows_at_once: Most rows of a prompt in one batch.
        width: Rows per request of a step; ``None`` selects those of the runner.
    """

    def __init__(
        self,
        runner: Any,
        requests: Sequence[TreeRequest],
        rows_at_once: int = 1,
        *,
        width: int | None = None,
    ) -> None:
        self._inputs_type, self._requests = runner.buffers.inputs, requests
        self._fields = {layout.name for layout in runner.buffers.layouts}
        self._mode, self._width = runner.mode, width or runner.tokens_per_request
        self._rows_at_once, self._device = rows_at_once, runner.device

    def all(self) -> Iterator[TextBatch]:
        """Yield the prompt and the step of the first request, then both requests side by side."""
        for index, _ in enumerate(self._requests):
            yield from self._prompt(index)
            yield self.step(range(index, -1, -1))

    def step(self, indices: Sequence[int]) -> TextBatch:
        """Return a step of some requests: their trees, or their roots in DECODE.

        Args:
            indices: Indices of requests, whose prompts are in the KV pools.
        """
        chosen, width = [self._requests[index] for index in indices], self._width
        masks, depths = tree_masks(np.stack([request.parents[:width] for request in chosen]))
        lengths = np.array([len(request.prompt) for request in chosen])
        sources: list[RowSource] = []
        for which, (index, request) in enumerate(zip(indices, chosen, strict=True)):
            for path in request.paths() if width > 1 else [[0]]:
                tokens = np.concatenate([request.prompt, request.tokens[path]])
                taken = {row for source in sources for row in source.rows}
                nodes = [node for node in path if which * width + node not in taken]
                rows = [which * width + node for node in nodes]
                positions = [len(request.prompt) + int(depths[which, node]) for node in nodes]
                keys = np.concatenate([np.arange(lengths[which]), lengths[which] + path])
                sources.append(RowSource(index, tokens, rows, positions, keys))
        named = " beside ".join(f"request {index}" for index in indices)
        what = "the drafts" if self._mode is ForwardMode.TARGET_VERIFY else "the next token"
        fields = {
            "req_pool_indices": np.array([request.row for request in chosen]),
            "seq_lens": lengths.astype(np.int32),
            "input_ids": np.concatenate([request.tokens[:width] for request in chosen]),
            "positions": (lengths[:, None] + depths).ravel(),
            "out_cache_loc": np.concatenate(
                [r.slots[len(r.prompt) : len(r.prompt) + width] for r in chosen]
            ),
            "custom_mask": masks,
        }
        advice = (
            "Each request alone agrees: check what the forward reads per request, such as "
            "req_pool_indices, seq_lens and the rows of out_cache_loc."
            if len(indices) > 1
            else "The rows of the prompt agree: check that the forward passes positions on, reads "
            "seq_lens committed tokens from the cache, and passes custom_mask to its attention."
        )
        return self._batch(f"{what} of {named}", fields, ("token_bitmask",), sources, advice)

    def packed_step(
        self, indices: Sequence[int], drafts: Sequence[int], num_rows: int
    ) -> TextBatch:
        """Return a step of chains that divides its rows among the requests, as engines pack it.

        Args:
            indices: Indices of requests, whose prompts are in the KV pools.
            drafts: Drafts of each request to verify, below the rows per request of a step.
            num_rows: Rows of the batch; those behind the last draft are pads.
        """
        step, width = self.step(indices), self._width
        names = "input_ids", "positions", "out_cache_loc"
        tokens, positions, slots = (torch.from_numpy(getattr(step.inputs, name)) for name in names)
        rows = torch.from_numpy(step.inputs.req_pool_indices)
        counts = torch.tensor(drafts, dtype=torch.int32)
        lengths, _, _, *packed, _, _ = pack_rows(
            counts, rows, tokens, positions, slots, width, num_rows
        )
        ends = zip(step.sources, lengths.tolist(), lengths.cumsum(0).tolist(), strict=True)
        sources = [
            replace(source, rows=range(end - count, end), positions=source.positions[:count])
            for source, count, end in ends
        ]
        fields = {name: values.numpy() for name, values in zip(names, packed, strict=True)}
        fields |= {name: getattr(step.inputs, name) for name in ("req_pool_indices", "seq_lens")}
        batch = self._batch(step.name, fields, _OMITTED_IN_PROMPTS, sources, step.advice)
        batch.inputs.lengths = lengths.to(self._device)
        batch.inputs.width, batch.inputs.packs_nodes = width, True
        return batch

    def _prompt(self, index: int) -> Iterator[TextBatch]:
        """Yield the chunks of a prompt, as an engine prefills it."""
        length, most = len(self._requests[index].prompt), self._rows_at_once
        for start in range(0, length, most):
            yield self.chunk([(index, range(start, min(start + most, length)))])

    def chunk(self, spans: Sequence[tuple[int, range]], *, is_packed: bool = False) -> TextBatch:
        """Return chunks of the prompts of some requests, each request once.

        Args:
            spans: Indices of requests, and the positions of their chunks.
            is_packed: Whether to pass the lengths of the chunks, as engines do. Several requests
                need them.
        """
        chosen = [(self._requests[index], np.array(span)) for index, span in spans]
        lengths = np.array([len(span) for _, span in spans], dtype=np.int32)
        fields = {
            "req_pool_indices": np.array([request.row for request, _ in chosen]),
            "seq_lens": np.array([span.start for _, span in spans], dtype=np.int32),
            "input_ids": np.concatenate([request.prompt[places] for request, places in chosen]),
            "positions": np.concatenate([places for _, places in chosen]),
            "out_cache_loc": np.concatenate([request.slots[places] for request, places in chosen]),
        }
        ends = lengths.cumsum().tolist()
        sources = [
            RowSource(
                index,
                self._requests[index].prompt,
                range(end - len(span), end),
                [*span],
                np.arange(len(self._requests[index].prompt)),
            )
            for (index, span), end in zip(spans, ends, strict=True)
        ]
        advice = "Check what the wrapper passes to its attention: mask, positions, scaling."
        name = "the prompt of " + " beside ".join(f"request {index}" for index, _ in spans)
        batch = self._batch(name, fields, _OMITTED_IN_PROMPTS, sources, advice)
        if is_packed:
            packed = torch.from_numpy(lengths).to(self._device)
            positions = [span for _, span in spans]
            batch.inputs.lengths, batch.inputs.width = packed, int(lengths.max())
            batch.inputs.spans = positions
        return replace(batch, is_step=False, commits=True)

    def _batch(
        self,
        name: str,
        fields: dict[str, Any],
        without: tuple[str, ...],
        sources: Sequence[RowSource],
        advice: str,
    ) -> TextBatch:
        fields["mrope_positions"] = np.tile(fields["positions"], (3, 1))
        present = {name: value for name, value in fields.items() if name in self._fields}
        return TextBatch(name, self._inputs_type(**present), without, sources, advice)


def run_batch(
    batch: TextBatch,
    states: RecurrentStates | None,
    run: Callable[[Any, Sequence[str]], Output],
) -> Output:
    """Run a batch; reset the states of new requests before, and commit those of prompts after."""
    rows = torch.as_tensor(batch.inputs.req_pool_indices)
    new = rows[torch.as_tensor(batch.inputs.seq_lens) == 0]
    if states is not None and len(new):
        states.reset(new.to(states.device))
    output = run(batch.inputs, batch.without)
    if states is not None and batch.commits:
        width = batch.inputs.width or batch.inputs.num_tokens // len(rows)
        last = torch.full_like(rows, min(width, states.width) - 1)
        states.commit(rows.to(states.device), last.to(states.device))
    return output


_USUAL_PROMPT = 64
BEYOND_WINDOW = 8
"""Rows of a prompt behind the last window that they leave."""
_WINDOWS = (
    "sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "index_topk",
)  # fmt: skip
"""Settings of a model's config: numbers of tokens that a row of a layer sees at most."""


def window_settings(*owners: object) -> dict[str, int]:
    """Return the windows and chunks in the configs of models of transformers, by name.

    Args:
        owners: A ``config`` among their attributes is read.
    """
    windows: dict[str, int] = {}
    for owner in owners:
        config: Any = getattr(owner, "config", None)
        text_config = getattr(config, "get_text_config", None)
        config = text_config() if callable(text_config) else config
        for name in _WINDOWS:
            size = getattr(config, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                windows[name] = size
    return windows


def tree_requests(
    target: CaptureTarget,
    runner: Runner[Any, Any],
    windows: Mapping[str, int],
    prompt_length: int | None,
) -> Sequence[TreeRequest]:
    """Return two requests of different length, or one if the target's batches hold no more.

    Args:
        target: Has the rows and the KV slots.
        runner: Runner of the mode whose trees are made. Without ``custom_mask`` they are chains.
        windows: Numbers of tokens that the longer prompt should exceed.
        prompt_length: Its length; ``None`` exceeds the windows that are smaller than the context.

    Raises:
        ConfigError: ``prompt_length`` does not fit the context.
        TargetError: The KV slots of the target are unknown, too few, or used twice.
    """
    width = runner.tokens_per_request
    sampled = target.batch(runner.mode, min(2, target.sizes.max_batch_size), SEED)
    rows = [int(row) for row in sampled.req_pool_indices]
    table = _slots(target, runner, rows)
    room = min(target.sizes.max_context_len, *map(_num_slots, table)) - width
    if room < 1:
        raise TargetError(
            f"target {target.name!r}: rows {rows} of its request pool have KV slots for "
            f"{room + width} tokens, and a comparison with the model needs {width + 1} or more. "
            "Fill req_to_token before, or pass kv_slots=."
        )
    reached = max((size for size in windows.values() if size < room), default=0)
    needed = max(_USUAL_PROMPT, reached + BEYOND_WINDOW)
    length = min(needed, room) if prompt_length is None else prompt_length
    if not is_int(length) or not 1 <= length <= room:
        raise ConfigError(
            f"prompt_length must be from 1 to {room}, the context without {width} drafts, got "
            f"{short_repr(prompt_length)}.",
            field="prompt_length",
        )
    has_mask = any(layout.name == "custom_mask" for layout in runner.buffers.layouts)
    parents = np.maximum(np.arange(width) - (2 if has_mask else 1), 0)
    random = np.random.default_rng(SEED)
    requests = []
    for row, slots, size in zip(rows, table, (length, max(length // 3, 1)), strict=False):
        ids = random.integers(0, target.sizes.vocab_size, size + width)
        used = slots[: size + width]
        requests.append(TreeRequest(row, ids[:size], ids[size:], parents, used))
    _check_unique(target, requests)
    return requests


def _slots(target: CaptureTarget, runner: Runner[Any, Any], rows: Sequence[int]) -> list[Numbers]:
    """Return the KV slots of each position of some rows."""
    table = target.kv_slots
    if table is None:
        pool = getattr(runner.attention, "req_to_token_pool", None)
        table = getattr(pool, "req_to_token", None)
    if table is None:
        raise TargetError(
            f"target {target.name!r}: the KV slots of its requests are unknown, so no text runs. "
            "Its attention has no req_to_token_pool. Pass kv_slots=, the slot of each "
            "position of each request row."
        )
    if max(rows) >= len(table):
        raise TargetError(
            f"target {target.name!r}: kv_slots has {len(table)} rows, but sample_batch uses row "
            f"{max(rows)} of the request pool. Pass a row for each of them, row 0 included."
        )
    return [table[row].cpu().numpy().astype(np.int64) for row in rows]


def _num_slots(slots: Numbers) -> int:
    """Return the number of positions before the first one without a slot."""
    missing = np.flatnonzero(slots <= 0)
    return int(missing[0]) if len(missing) else len(slots)


def _check_unique(target: CaptureTarget, requests: Sequence[TreeRequest]) -> None:
    slots = np.concatenate([request.slots for request in requests])
    values, counts = np.unique(slots, return_counts=True)
    if (counts > 1).any():
        raise TargetError(
            f"target {target.name!r}: KV slot {values[counts > 1][0]} belongs to several positions "
            f"of rows {[request.row for request in requests]}. Give each position of each request "
            "a slot of its own."
        )
