"""Names of addresses: of named tensors, otherwise of the allocator's blocks or CUDA's kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.graphs.walk import MemoryMap

FUZZ = settings(deadline=None, derandomize=True, max_examples=200)
BASE = 1 << 44
POOL = (0, 7)
MIB = 1 << 20


class Tensor:
    """A tensor at an address that the test chooses."""

    def __init__(self, begin, *shape, stride=None, size=1):
        self.begin, self.shape, self.size = begin, shape, size
        self.strides = stride or (1,) * len(shape)

    def data_ptr(self):
        return self.begin

    def element_size(self):
        return self.size

    def numel(self):
        return torch.Size(self.shape).numel()

    def stride(self):
        return self.strides


def named(**extents):
    """A map of weights, each with its begin and end as offsets from ``BASE``."""
    return MemoryMap({"weight": {n: Tensor(BASE + a, b - a) for n, (a, b) in extents.items()}})


def name_at(memory, address):
    found = memory.find(address)
    return None if found is None else found.name


def names_at(memory, *offsets):
    return [name_at(memory, BASE + offset) for offset in offsets]


def segment(address, size, pool=POOL, blocks=(), used=0):
    """A segment of ``torch.cuda.memory_snapshot`` with blocks of 1 MiB."""
    return {
        "address": address, "total_size": size, "active_size": used, "segment_pool_id": pool,
        "blocks": [
            {"address": address + i * MIB, "size": MIB, "state": state}
            for i, state in enumerate(blocks)
        ],
    }  # fmt: skip


def test_an_address_has_the_name_of_its_tensor_and_an_offset():
    model = torch.nn.Linear(4, 3)
    memory = MemoryMap({"weight": dict(model.named_parameters())})
    at = model.weight.data_ptr()
    found = [memory.find(at), memory.find(at + 20, offset=8)]
    assert [(p.name, p.memory, p.offset) for p in found] == [
        ("weight", "weight", 0), ("weight+0x14", "weight", 8),
    ]  # fmt: skip
    assert [p.address for p in found] == [at, at + 20]
    assert memory.find(at + 4 * 3 * 4 - 1).name == "weight+0x2f"


def test_the_innermost_of_nested_tensors_names_an_address():
    memory = named(outer=(0, 100), inner=(20, 60), core=(30, 40), head=(0, 10))
    assert names_at(memory, 0, 10, 20, 29, 30, 39, 40, 60, 99, 100) == [
        "head", "outer+0xa", "inner", "inner+0x9", "core", "core+0x9", "inner+0x14", "outer+0x3c",
        "outer+0x63", None,
    ]  # fmt: skip


def test_the_first_of_several_names_is_used():
    tied = Tensor(BASE, 16)
    memory = MemoryMap({"weight": {"embed": tied, "head": tied}, "state": {"other": tied}})
    assert [memory.find(BASE).name, memory.find(BASE).memory] == ["embed", "weight"]


def test_adjacent_tensors_are_kept_apart():
    memory = named(a=(0, 8), b=(8, 16), c=(24, 32))
    assert names_at(memory, -1, 7, 8, 15, 16, 23, 24, 31, 32) == [
        None, "a+0x7", "b", "b+0x7", None, None, "c", "c+0x7", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "stride", "size", "extent"),
    [
        ((3, 4), (4, 1), 2, 24),
        ((4, 3), (1, 4), 2, 24),  # transposed
        ((3, 2), (8, 2), 4, (2 * 8 + 2 + 1) * 4),  # every other column
        ((5, 2), (0, 1), 4, 8),  # expanded
        ((), (), 8, 8),
    ],
)
def test_a_tensor_reaches_to_its_last_element(shape, stride, size, extent):
    memory = MemoryMap({"input": {"x": Tensor(BASE, *shape, stride=stride, size=size)}})
    assert names_at(memory, 0, extent - 1, extent) == ["x", f"x+{extent - 1:#x}", None]


def test_a_tensor_without_memory_names_nothing():
    memory = MemoryMap({"input": {"none": torch.empty(0), "meta": torch.empty(3, device="meta")}})
    assert memory.find(0) is None
    assert memory.lowest == 1 << 40


def test_offsets_in_the_pool_continue_over_its_segments():
    segments = [
        segment(BASE + 8 * MIB, 2 * MIB, used=MIB),
        segment(BASE + 4 * MIB, 2 * MIB, pool=(0, 0), blocks=["active_allocated"]),
        segment(BASE, 2 * MIB, used=512),
        segment(BASE + 16 * MIB, 2 * MIB, pool=(0, 3), blocks=["active_allocated"]),
    ]
    memory = MemoryMap({}, segments, POOL)
    assert names_at(memory, 0, 2 * MIB - 1, 2 * MIB) == ["pool+0x0", f"pool+{2 * MIB - 1:#x}", None]
    assert name_at(memory, BASE + 8 * MIB + 5) == f"pool+{2 * MIB + 5:#x}"
    ranges = [memory.range_of(BASE + at * MIB) for at in (0, 1, 2, 4, 8)]
    assert [each and each.memory for each in ranges] == ["pool", "pool", None, "external", "pool"]
    assert [(s.address, s.size, s.used, s.pool) for s in memory.segments] == [
        (BASE, 2 * MIB, 512, "graph"), (BASE + 4 * MIB, 2 * MIB, 0, "default"),
        (BASE + 8 * MIB, 2 * MIB, MIB, "graph"), (BASE + 16 * MIB, 2 * MIB, 0, "other"),
    ]  # fmt: skip


def test_an_unnamed_block_is_external_or_freed():
    states = ["active_allocated", "inactive", "active_pending_free"]
    memory = MemoryMap({}, [segment(BASE, 4 * MIB, pool=(0, 0), blocks=states)], POOL)
    found = [memory.find(BASE + i * MIB + 16) for i in range(4)]
    assert [p and p.memory for p in found] == ["external", "freed", "freed", None]
    assert found[1].name == f"freed block of {MIB} bytes+0x10"


def test_a_name_takes_precedence_over_pool_and_blocks():
    blocks = ["active_allocated"]
    segments = [segment(BASE, MIB), segment(BASE + MIB, MIB, pool=(0, 0), blocks=blocks)]
    given_names = {"input": {"x": Tensor(BASE + 64, 8)}, "state": {"kv": Tensor(BASE + MIB, MIB)}}
    memory = MemoryMap(given_names, segments, POOL)
    assert names_at(memory, 0, 64, 72, MIB) == ["pool+0x0", "x", "pool+0x48", "kv"]


def test_segments_of_returns_the_segments_of_addresses():
    segments = [segment(BASE + i * 4 * MIB, 2 * MIB) for i in range(4)]
    memory = MemoryMap({}, segments, POOL)
    inside = [BASE + 2 * MIB - 1, BASE + 8 * MIB, BASE + 9 * MIB, BASE + 6 * MIB, 5]
    assert [s.address for s in memory.segments_with(inside)] == [BASE, BASE + 8 * MIB]
    assert memory.segments_with([]) == ()


def test_the_kind_is_queried_once_per_page_and_never_for_null():
    asked = []
    memory = MemoryMap({}, query_kind=lambda address: asked.append(address) or "host")
    page = 1 << 40
    found = [memory.find(page + 8), memory.find(page + 4095), memory.find(page + 4096)]
    assert asked == [page + 8, page + 4096]
    assert {(p.name, p.memory) for p in found} == {("host memory", "host")}
    assert [p.address for p in found] == [page + 8, page + 4095, page + 4096]
    assert memory.find(0) is None
    assert len(asked) == 2


def test_the_heap_may_be_at_low_addresses():
    """In a Python that is no position-independent executable, CPU tensors are below 4 GiB."""
    memory = MemoryMap({}, query_kind=lambda _address: "external")
    assert memory.find(0x4666_0000).memory == "external"


def test_the_kind_is_queried_only_for_unnamed_memory():
    asked = []
    names = {"weight": {"w": Tensor(BASE, 8192)}}
    memory = MemoryMap(names, query_kind=lambda address: asked.append(address) or "")
    assert [name_at(memory, BASE + 5000), name_at(memory, BASE + 8192)] == ["w+0x1388", None]
    assert asked == [BASE + 8192]


def test_a_low_named_tensor_lowers_the_lowest_address():
    memory = MemoryMap({"input": {"low": Tensor(4096, 8)}})
    assert memory.lowest == 4096
    assert memory.find(4100).name == "low+0x4"


ranges = st.tuples(st.integers(0, 60), st.integers(1, 30)).map(
    lambda range_: (range_[0], sum(range_))
)


@given(st.lists(ranges, max_size=12))
@FUZZ
def test_any_ranges_are_found_as_by_linear_search(extents):
    """The range that begins last, of those the shortest, of equal ones the first."""
    memory = named(**{f"t{i}": extent for i, extent in enumerate(extents)})
    for at in range(-1, 92):
        around = [(-a, b, i) for i, (a, b) in enumerate(extents) if a <= at < b]
        expected = None
        if around:
            begin, _, index = min(around)
            into = at + begin
            expected = f"t{index}+{into:#x}" if into else f"t{index}"
        assert name_at(memory, BASE + at) == expected
