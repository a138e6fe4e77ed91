"""Graphs of a model whose modules were renamed or moved match node by node."""

from __future__ import annotations

import pytest

from graphkit import Attribution, ForwardMode
from graphkit.models.reference import reference_target
from graphkit.records import Argument, GraphRecord, Pointer
from graphkit.views.diff import diff_graphs


@pytest.fixture(scope="module")
def recorded():
    """A verify graph of the reference model, with four layers."""
    target = reference_target()
    with target.runner(ForwardMode.TARGET_VERIFY, batch_sizes=[1], device="cpu") as runner:
        runner.capture(attribution=Attribution(target.weights))
        return runner.inspect(1, weights=target.weights)


def renamed(record, before, after):
    """Rename modules and weights in the record's text."""
    return GraphRecord.from_json(record.to_json().replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("target.model.", "target.model.inner.", [
            "target.model -> target.model.inner",
        ]),
        ("target.", "verifier.", ["target -> verifier"]),
        ("target.", "", ["target.lm_head -> lm_head", "target.model -> model"]),
        ("target.", "wrapper.target.", ["target -> wrapper.target"]),
        (".mlp", ".feed_forward", [
            "target.model.layers.*.mlp -> target.model.layers.*.feed_forward"
        ]),
        (".self_attn", ".block.self_attn", [
            "target.model.layers.* -> target.model.layers.*.block"
        ]),
        ("target.model.layers", "target.model.blocks", [
            "target.model.layers -> target.model.blocks"
        ]),
    ],
)  # fmt: skip
def test_a_renamed_module_of_the_reference_model_is_one_change(recorded, before, after, words):
    other = renamed(recorded, before, after)
    for diff, sign in ((diff_graphs(recorded, other), 1), (diff_graphs(other, recorded), -1)):
        assert (diff.added, diff.removed) == ((), ())
        moved = {text.removeprefix("module ").rpartition(" in ")[0] for text in diff.words}
        assert moved == {" -> ".join(sentence.split(" -> ")[::sign]) for sentence in words}
        assert len(diff.details) <= 1, "the head reads the weight of an embedding that moved"
        assert not diff.is_same


def test_another_weight_in_a_moved_module_is_a_change(make_graph):
    def graph(module, name):
        pointer = Pointer(address=1, memory="weight", name=name)
        reads = Argument(size=8, kind="pointer", text=name, pointers=(pointer,))
        return make_graph({"short_name": "gemm", "module": module, "arguments": (reads,)})

    before = graph("a.up", "a.up.weight")
    assert diff_graphs(before, graph("b.up", "b.up.weight")).details == ()
    other = diff_graphs(before, graph("b.up", "b.gate.weight"))
    assert other.words == ("module a -> b in 1 node",)
    assert other.details == (
        "argument 0 of gemm: weight b.up.weight -> weight b.gate.weight in 1 node",
    )
