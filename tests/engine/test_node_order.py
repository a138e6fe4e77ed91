"""Trees whose nodes are in random order give the text of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch

from decaying_target import STEPS, DecayingForward, recurrent_engine
from engine_runs import outputs
from erring_oracle import ErringOracle
from graphkit.engine import DraftTree, SamplingParams

NEW = 15
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6], [33, 20, 11, 50]]


class Shuffled(ErringOracle):
    """Puts the nodes behind each root into an order that is random in every step."""

    def prepare(self, context):
        super().prepare(context)
        orders = [
            [0, *self.random.sample(range(1, self._width), self._width - 1)] for _ in range(97)
        ]
        self._orders = torch.tensor(orders, device=context.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=context.device)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        tree = super().draft(req_pool_indices, seq_lens, bonus_tokens)
        links = tree.retrieve_next_token, tree.retrieve_next_sibling
        orders = self._orders[(7 * seq_lens + 31 * req_pool_indices) % len(self._orders)]
        place = orders.argsort(1)  # of each node
        request = torch.arange(len(orders), device=orders.device)[:, None]

        def moved(nodes):
            return torch.where(nodes < 0, -1, place.gather(1, nodes.clamp(min=0))).gather(1, orders)

        children = moved(links[0])
        node = torch.arange(self._width, device=children.device)
        is_reversed = ((children >= 0) & (children < node)).any(1)
        self.counts += torch.stack([torch.ones_like(is_reversed), is_reversed]).sum(1)
        return DraftTree(
            draft_tokens=tree.draft_tokens.view_as(orders).gather(1, orders).flatten(),
            tree_mask=tree.tree_mask[request[:, :, None], orders[:, :, None], orders[:, None]],
            retrieve_next_token=children,
            retrieve_next_sibling=moved(links[1]),
        )

    def extend(self, verified):
        """Node numbers do not ascend along a path."""


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "seeds"), [("v1", 18), ("v2", 18), ("v3", 4)])
def test_recurrent_states_follow_the_tree_in_any_order(device, generation, seeds):
    forward = DecayingForward(device, 1 + 2 * STEPS)
    texts = [[*prompt, *forward.plain(prompt, NEW)] for prompt in PROMPTS]
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for seed in range(seeds):
        drafter = Shuffled(texts, NEW, 2)
        drafter.random = random.Random(seed)
        with recurrent_engine(
            forward, drafter, 2, generation=generation, batch_sizes=[4], seed=seed
        ) as engine:
            if generation == "v3":
                engine.capture()
            requests = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
            assert engine.stats.accept_length > 1.5
        assert outputs(requests) == [text[-NEW:] for text in texts]
        counts += drafter.counts
    trees, reversed_trees = counts.tolist()
    assert trees > 23 * seeds
    assert reversed_trees > trees / 2, "a child is in front of its parent"
