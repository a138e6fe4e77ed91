"""Modes, pools and settings of the reference target."""

from __future__ import annotations

import graphkit as gk
from declared_modes import MODES
from graphkit.engine.attention import TritonAttention
from graphkit.models.reference import reference_target
from small_targets import STEPS, drafted_llama, llama_target

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE


def test_parts_have_pools_of_their_own():
    target = llama_target()
    parts = {name.split(".")[0] for name in target.mutable_state}
    assert parts >= {"draft", "chain"}
    assert {name for name, _ in target.weights.named_children()} == {"target", "draft", "chain"}
    assert {f"chain.0.key.{layer}" for layer in range(STEPS)} < target.mutable_state.keys()
    assert len({tensor.data_ptr() for tensor in target.mutable_state.values()}) == len(
        target.mutable_state
    )
    backends = {id(backend) for backend in target.attention.values()}
    assert len(backends) == 3
    assert target.attention[DRAFT] is target.attention[EXTEND] is target.attention[EXTEND_V2]


def test_a_model_without_draft_models_has_fewer_modes():
    model, plain = drafted_llama(), drafted_llama(None)
    assert set(llama_target(plain, has_chain=False).forwards) == {VERIFY, DECODE}
    with_head = llama_target(model, has_chain=False)
    assert set(with_head.forwards) == {VERIFY, DECODE, DRAFT, EXTEND, EXTEND_V2}
    assert set(llama_target(plain).forwards) == {VERIFY, DECODE, LAYERS}


def test_the_shipped_target_has_every_mode():
    target = reference_target()
    assert set(target.forwards) == set(MODES)
    assert (target.name, list(target.batch_sizes)) == ("reference model", [1, 2, 4, 8])
    wide = reference_target(topk=2, max_batch_size=3, attention=TritonAttention)
    assert (wide.spec.topk, wide.spec.num_draft_tokens) == (2, 8)
    assert (wide.sizes.max_batch_size, wide.batch_sizes) == (3, None)
    kinds = {type(kind) for part in wide.attention.values() for kind in attentions(part)}
    assert kinds == {TritonAttention}


def attentions(attention):
    """Return the backends of the groups of layers, or the backend itself."""
    return getattr(attention, "_groups", [attention])
