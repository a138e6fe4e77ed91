"""A whole step has few operations of graphkit's own beside the modules of the models."""

from __future__ import annotations

from collections import Counter

import pytest

from graphkit import Attribution
from graphkit.reference import reference_engine

UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::empty_like")
"""Operations of the recorder that have no node on CUDA."""
MOST = {
    ("EAGLE", 1): (24, 27),
    ("EAGLE", 2): (34, 38),
    ("STANDALONE", 1): (21, 24),
    ("STANDALONE", 2): (29, 33),
    ("MULTI_LAYER_EAGLE", 1): (33, 36),
    ("MULTI_LAYER_EAGLE", 2): (46, 53),
    ("NGRAM", 1): (10, 13),
    ("NGRAM", 2): (13, 17),
    ("NONE", 1): (8, 11),
}
"""Operations of the recorder and nodes on CUDA by algorithm and topk; three draft steps.

On CUDA, the refresh, the target's distribution, the move of KV and the start of a tree have several
nodes.
"""


def own_nodes(algorithm, topk, device):
    """Return the nodes outside of modules by operation, at batch size 2."""
    engine = reference_engine(
        algorithm, topk=topk, generation="v3", max_context_len=64, max_batch_size=2,
        batch_sizes=[2], device=device,
    )  # fmt: skip
    (runner,) = engine.runners
    runner.capture(attribution=Attribution())
    nodes = runner.inspect(2).nodes
    engine.close()
    own = [node.op for node in nodes if node.module.startswith("(")]
    assert 2 * len(own) < len(nodes), "the models have most nodes"
    return Counter(op for op in own if op.partition(".")[0] not in UNINITIALISED)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "topk"), MOST)
def test_nodes_between_the_forwards(algorithm, topk, device):
    own = own_nodes(algorithm, topk, device)
    assert own.total() <= MOST[algorithm, topk][device == "cuda"], own
