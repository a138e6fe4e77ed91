"""A whole step has few operations of graphkit's own beside the modules of the models."""

from __future__ import annotations

from collections import Counter

import pytest

from graphkit import Attribution
from graphkit.models.reference import reference_engine

UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::empty_like")
"""Operations of the recorder that have no node on CUDA."""
MOST = {
    ("EAGLE", 1): (24, 27),
    ("EAGLE", 2): (33, 37),
    ("EAGLE3", 1): (25, 28),
    ("EAGLE3", 2): (34, 38),
    ("STANDALONE", 1): (34, 46),
    ("STANDALONE", 2): (81, 99),
    ("MULTI_LAYER_EAGLE", 1): (50, 53),
    ("MULTI_LAYER_EAGLE", 2): (62, 69),
    ("NGRAM", 1): (11, 14),
    ("NGRAM", 2): (14, 18),
    ("NONE", 1): (9, 12),
}
"""Operations of the recorder and nodes on CUDA by algorithm and topk; three draft steps.

On CUDA, the refresh, the target's distribution, the move of KV and the start of a tree have several
nodes.
"""


PRODUCTS = {"aten::mm", "aten::addmm", "aten::constant_pad_nd", "graphkit::linear"}
"""Operations of a product: on a CPU its rows are padded."""


def step_nodes(algorithm, topk, device):
    """Return the nodes of a step at batch size 2."""
    engine = reference_engine(
        algorithm, num_steps=3, topk=topk, generation="v3", max_context_len=64, max_batch_size=2,
        batch_sizes=[2], device=device,
    )  # fmt: skip
    (runner,) = engine.runners
    runner.capture(attribution=Attribution())
    nodes = runner.inspect(2).nodes
    engine.close()
    return nodes


def own_nodes(algorithm, topk, device):
    """Return the nodes outside of modules by operation."""
    nodes = step_nodes(algorithm, topk, device)
    own = [node.op for node in nodes if node.module.startswith("(")]
    assert 3 * len(own) < 2 * len(nodes), "the models have more than a third of the nodes"
    return Counter(op for op in own if op.partition(".")[0] not in UNINITIALISED)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "topk"), MOST)
def test_nodes_between_the_forwards(algorithm, topk, device):
    own = own_nodes(algorithm, topk, device)
    assert own.total() <= MOST[algorithm, topk][device == "cuda"], own


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "norms"), [("EAGLE3", 2), ("EAGLE", 1)])
def test_nodes_of_a_draft_head_around_attention_and_products(algorithm, norms, device):
    """Of two draft steps and the catch-up. The residual of EAGLE, which has no norm, is a sum.

    On CUDA, the product of gate and up projection applies the gate.
    """
    ops = Counter(
        node.op
        for node in step_nodes(algorithm, 1, device)
        if node.module.startswith(("Eagle3Head", "EagleHead"))
        and not node.module.endswith("self_attn")
        and node.op not in PRODUCTS
    )
    if algorithm == "EAGLE":
        assert ops.pop("aten::add.Tensor") == 3
    each = {"embed_and_join": 1, "add_rms_norm": norms}
    if device == "cpu":
        each["silu_and_mul"] = 1
    assert ops == {f"graphkit::{name}": 3 * count for name, count in each.items()}
