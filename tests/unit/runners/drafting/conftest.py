"""Draft models in whole numbers, and what they make of one request in plain loops.

Logits are a permutation of distinct values, so that no two tokens of a row tie.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit import BufferSizes, ForwardOutput, SpecConfig
from graphkit.buffers import DraftInputs
from graphkit.runners import DraftRunner

VOCAB, HIDDEN, MODULUS = 31, 8, 64
MAX_REQUESTS, POOL_ROWS, ROW_SLOTS = 4, 9, 64


def logits_of(mix):
    """A row of distinct logits per number; a Python number gives a list."""
    if isinstance(mix, int):
        return [((mix % 30 + 1) * v + mix) % VOCAB / 4 for v in range(VOCAB)]
    return ((mix % 30 + 1)[:, None] * torch.arange(VOCAB) + mix[:, None]) % VOCAB / 4


def hidden_of(hidden, mix):
    """The next hidden states, all below ``MODULUS``; a list gives a list."""
    if isinstance(hidden, list):
        return [(2 * int(h) + mix + j) % MODULUS for j, h in enumerate(hidden)]
    return (2 * hidden + mix[:, None] + torch.arange(HIDDEN)) % MODULUS


def top_of(logits, topk):
    """[(probability, token)] of the likeliest, by sorting all."""
    p = torch.tensor(logits).softmax(-1)
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:topk]
    return [(p[token].item(), token) for token in best]


class DraftModel:
    """Attends to the draft slots that it may see, through a pool that it writes."""

    def __init__(self, spec):
        self.spec, self.calls, self.seen = spec, 0, []
        self.cache = torch.zeros(POOL_ROWS * ROW_SLOTS, dtype=torch.int64)
        self.req_to_token = torch.zeros(POOL_ROWS, ROW_SLOTS, dtype=torch.int64)
        order = torch.randperm(
            (POOL_ROWS - 1) * ROW_SLOTS, generator=torch.Generator().manual_seed(1)
        )
        self.req_to_token[1:] = order.view(POOL_ROWS - 1, ROW_SLOTS) + 1

    def __call__(self, inputs):
        self.calls += 1
        self.seen.append({name: rows for name, rows in vars(inputs).items() if rows is not None})
        self.cache[inputs.out_cache_loc] = inputs.input_ids + 3 * inputs.positions
        topk, steps = self.spec.topk, self.spec.num_steps
        ahead = torch.arange(topk * steps)
        rows = self.req_to_token[inputs.req_pool_indices]
        slots = rows.gather(1, inputs.seq_lens[:, None] + ahead)
        shown = inputs.custom_mask
        if shown is None:
            shown = ahead <= (inputs.positions - inputs.seq_lens)[:, None, None]
        context = (self.cache[slots][:, None] * shown).sum(2).flatten()
        mix = inputs.input_ids + 5 * inputs.positions + 7 * inputs.out_cache_loc + 11 * context
        if inputs.mrope_positions is not None:
            mix = mix + inputs.mrope_positions.sum(0)
        if inputs.hidden_states is None:
            return ForwardOutput(next_token_logits=logits_of(mix))
        made = hidden_of(inputs.hidden_states, mix)
        return ForwardOutput(
            next_token_logits=logits_of(mix + made.sum(1).long()), hidden_states=made
        )


class DraftByHand:
    """One request of a batch through ``DraftModel``, branch by branch.

    Attributes:
        tree: The :class:`HandTree`.
        views: What the forward of each step is due: a dict per branch.
    """

    def __init__(self, grow_by_hand, spec, batch, request):
        self.spec, self.batch, self.request = spec, batch, request
        self.seq_len = int(batch.seq_lens[request])
        self.views = [[] for _ in range(spec.num_steps - 1)]
        first = zip(batch.topk_p[request].tolist(), batch.topk_index[request].tolist(), strict=True)
        self.tree = grow_by_hand(list(first), self._propose, num_steps=spec.num_steps)

    def _propose(self, branch):
        step, spec = len(branch.path) - 1, self.spec
        row = self.request * spec.topk + branch.place
        slot = int(self.batch.out_cache_loc[row * spec.num_steps + step])
        context = sum(node.token + 3 * (self.seq_len + i) for i, node in enumerate(branch.path))
        mix = branch.token + 5 * (self.seq_len + step) + 7 * slot + 11 * context
        given = branch.parent.hidden if branch.parent else self._first_hidden()
        self.views[step].append(
            {
                "input_ids": branch.token,
                "positions": self.seq_len + step,
                "out_cache_loc": slot,
                "hidden_states": given,
                "custom_mask": self._shown(branch.path),
                "seq_lens": self.seq_len,
            }
        )
        branch.hidden = None if given is None else hidden_of(given, mix)
        return top_of(logits_of(mix + sum(branch.hidden or [])), spec.topk)

    def _first_hidden(self):
        rows = self.batch.hidden_states
        return None if rows is None else [int(h) for h in rows[self.request]]

    def _shown(self, path):
        topk, steps = self.spec.topk, self.spec.num_steps
        own = {node.place * steps + i for i, node in enumerate(path)}
        return None if topk == 1 else [slot in own for slot in range(topk * steps)]


class DraftCase:
    """A configuration of DRAFT: its model, runners, batches, and the answer by hand."""

    def __init__(self, grow_by_hand, num_steps=3, topk=2, width=6, algorithm="EAGLE"):
        self.spec = SpecConfig(algorithm, num_steps, topk, width)
        self.model, self._grow = DraftModel(self.spec), grow_by_hand
        self.sizes = BufferSizes(MAX_REQUESTS, ROW_SLOTS, HIDDEN, VOCAB, torch.float32)

    def runner(self, forward=None, *, capture=True, **options):
        settings = {
            "spec": self.spec,
            "sizes": self.sizes,
            "batch_sizes": [1, 2, 4],
            "device": "cpu",
        }
        runner = DraftRunner(forward or self.model, **{**settings, **options})
        if capture:
            runner.capture()
        return runner

    def batch(self, requests, *, seed=0, kind=np.asarray, **over):
        """Rows as an engine makes them: draft slots are the request's own, from seq_len on."""
        rng, (topk, steps) = np.random.default_rng(seed), (self.spec.topk, self.spec.num_steps)
        pool_rows = 1 + rng.permutation(POOL_ROWS - 1)[:requests]
        lens = rng.integers(1, ROW_SLOTS - topk * steps, requests)
        logits = [logits_of(int(mix)) for mix in rng.integers(0, 999, requests)]
        best = [top_of(row, topk) for row in logits]
        ahead = lens[:, None] + np.arange(topk * steps)
        rows = {
            "req_pool_indices": pool_rows,
            "seq_lens": lens.astype(np.int32),
            "topk_p": np.array([[p for p, _ in row] for row in best], np.float32).reshape(-1, topk),
            "topk_index": np.array([[t for _, t in row] for row in best], int).reshape(-1, topk),
            "positions": lens.repeat(topk),
            "out_cache_loc": self.model.req_to_token.numpy()[pool_rows[:, None], ahead].flatten(),
        }
        rows = {name: kind(value) for name, value in rows.items()}
        if not self.spec.resolved.is_standalone():
            hidden = rng.integers(0, MODULUS, (requests, HIDDEN)).astype(np.float32)
            rows["hidden_states"] = torch.from_numpy(hidden)
        return DraftInputs(**{**rows, **over})

    def by_hand(self, batch):
        """A ``DraftByHand`` per request."""
        return [
            DraftByHand(self._grow, self.spec, batch, request)
            for request in range(batch.batch_size)
        ]

    def check(self, output, batch):
        """Every number of the output is that of the tree by hand."""
        for request, hand in enumerate(self.by_hand(batch)):
            got = {name: rows[request].tolist() for name, rows in output.tensors().items()}
            assert got == hand.tree.output(self.spec.num_draft_tokens), f"request {request}"
        assert len(output.draft_tokens) == batch.batch_size


@pytest.fixture(scope="session")
def draft_case(grow_by_hand):
    """``draft_case(num_steps, topk, width, algorithm)``: a :class:`DraftCase`."""
    return lambda *settings: DraftCase(grow_by_hand, *settings)
