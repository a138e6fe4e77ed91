"""What the captures of ranks must have in common."""

from __future__ import annotations

import pytest

from graphkit.cli.ranks import differing_launch, launch_order
from graphkit.records import Argument, CaptureRecord, ModeRecord, SizeRecord

NCCL = "mlp c10d::allreduce_ ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
ROWS = ("- - refresh", "mlp aten::mm gemm", NCCL)


@pytest.fixture
def record_of(make_graph):
    def make(*rows, sizes=(8,), **facts):
        size = {"num_tokens": 1, "num_nodes": 1, "capture_ms": 1.0, "pool_bytes": 0}
        graph = make_graph(*rows, **facts)
        mode = ModeRecord(
            mode="TARGET_VERIFY", tokens_per_request=1, host_planned=False, input_bytes=0,
            sizes=tuple(SizeRecord(batch_size=each, **size) for each in sizes),
        )  # fmt: skip
        return CaptureRecord(
            target="model", backend="cuda", environment=graph.environment, modes=(mode,),
            graphs=(graph,),
        )  # fmt: skip

    return make


def difference(one, other):
    return differing_launch(launch_order(one), launch_order(other))


def collective(tensor):
    tensor = Argument(size=8, kind="tensor", text=f"float32 {tensor}")
    return {"short_name": "allreduce_", "op": "c10d::allreduce_", "arguments": (tensor,)}


def test_the_order_has_sizes_then_nodes(record_of):
    assert launch_order(record_of(*ROWS, sizes=(1, 8))) == [
        "TARGET_VERIFY at batch sizes 1, 8",
        "node 0 of TARGET_VERIFY 8: refresh",
        "node 1 of TARGET_VERIFY 8: aten::mm (kernel) in mlp",
        f"node 2 of TARGET_VERIFY 8: c10d::allreduce_ ({NCCL.split()[2]}) in mlp",
    ]


def test_the_kernel_of_an_operation_may_differ(record_of):
    """Parts of a model that is split unevenly have other shapes."""
    assert difference(record_of(*ROWS), record_of(ROWS[0], "mlp aten::mm splitk", NCCL)) is None


def test_the_first_difference_is_named(record_of):
    swapped = record_of(ROWS[0], NCCL, ROWS[1])
    mine, other = difference(record_of(*ROWS), swapped)
    assert mine.startswith("node 1 of TARGET_VERIFY 8: aten::mm")
    assert other.startswith("node 1 of TARGET_VERIFY 8: c10d::allreduce_")


def test_a_missing_node_is_a_difference(record_of):
    found = difference(record_of(*ROWS[:2]), record_of(*ROWS))
    assert found[0] == "nothing more"
    assert "node 2" in found[1]


def test_sizes_are_compared_first(record_of):
    found = difference(record_of(*ROWS, sizes=(4, 8)), record_of(ROWS[0]))
    assert found == ("TARGET_VERIFY at batch sizes 4, 8", "TARGET_VERIFY at batch sizes 8")


@pytest.mark.parametrize(("other", "is_same"), [("[4, 64] at %9", True), ("[8, 64] at %3", False)])
def test_collectives_are_compared_by_their_tensors(record_of, other, is_same):
    mine, theirs = record_of(collective("[4, 64] at %3")), record_of(collective(other))
    assert (difference(mine, theirs) is None) == is_same


def test_collectives_of_other_types_differ(record_of):
    assert difference(record_of(NCCL), record_of(NCCL.replace("bf16", "f32")))
