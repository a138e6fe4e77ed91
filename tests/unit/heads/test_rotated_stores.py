"""Layers over pools of keys and values rotate and store by one op, with the same results."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple

import pytest
import torch

from graphkit import ForwardMode
from graphkit.engine.attention import TritonAttention
from graphkit.models.reference import reference_target
from two_ops_attention import TwoOps

LAYERS = {
    ForwardMode.TARGET_VERIFY: 4, ForwardMode.DECODE: 4, ForwardMode.DRAFT: 2,
    ForwardMode.DRAFT_EXTEND: 1, ForwardMode.DRAFT_EXTEND_V2: 1,
}  # fmt: skip
"""Layers that run in a step; DRAFT runs its layer twice."""


def step(kind, mode):
    """Return the operations of a captured step, and its outputs with all KV memory after it."""
    target = reference_target(max_batch_size=2, attention=kind)
    with target.runner(mode, device="cpu", batch_sizes=[2]) as runner:
        runner.capture()
        ops = Counter(node.op for node in runner.inspect(2).nodes)
        outputs = astuple(runner.run(runner.sample_batch(2)))
        return ops, [
            each for each in (*outputs, *target.mutable_state.values()) if each is not None
        ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", LAYERS)
def test_a_step_has_one_operation_less_per_layer(mode):
    ops, results = step(TritonAttention, mode)
    others, expected = step(TwoOps, mode)
    assert len(results) == len(expected) > 2
    assert all(map(torch.equal, results, expected))
    counts = {"graphkit::rotated_heads": LAYERS[mode], "graphkit::store_kv": LAYERS[mode]}
    assert others - ops == counts
    assert ops - others == {"graphkit::store_rotated_heads": LAYERS[mode]}
