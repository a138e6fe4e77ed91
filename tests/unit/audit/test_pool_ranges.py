"""What may be overwritten in a graph pool, with what, and how it is restored."""

from __future__ import annotations

import pytest
import torch

from graphkit.audit.stale_memory.pool_memory import (
    FILLS,
    UNIT,
    Fill,
    Poison,
    PoolMemory,
    ranges_to_fill,
    tensor_range,
    without,
)
from graphkit.audit.stale_memory.search import first_pointing, nearest_argument
from graphkit.graphs import Allocation, PoolBlock, StateSnapshot
from graphkit.records import Argument, Node, Pointer

ZEROS, NUMBERS, NAN = FILLS
BLOCK = 8 * UNIT


@pytest.fixture
def pool():
    """Return the bytes of a pool that begins at a multiple of the unit."""
    memory = torch.full((3 * BLOCK,), 5, dtype=torch.uint8)
    begin = -memory.data_ptr() % UNIT
    return memory[begin : begin + 2 * BLOCK]


def block(pool, begin, end, is_live=False):
    return PoolBlock(pool[begin:end], is_live)


def allocation(pool, begin, end, dtype=torch.float32, is_initialised=True):
    first = pool.data_ptr()
    return Allocation(first + begin, first + end, dtype, "aten::empty", "", is_initialised)


@pytest.mark.parametrize(
    ("ranges", "holes", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(-5, 2), (8, 20)], [(2, 8)]),
        ([(0, 10), (10, 20)], [(9, 11)], [(0, 9), (11, 20)]),
        ([(0, 10), (20, 30)], [(10, 20), (30, 40)], [(0, 10), (20, 30)]),
        ([(0, 30)], [(5, 25), (10, 12), (25, 26)], [(0, 5), (26, 30)]),
        ([(0, 10)], [(4, 4)], [(0, 4), (4, 10)]),
    ],
)
def test_without_leaves_what_is_in_no_hole(ranges, holes, expected):
    assert without(ranges, holes) == expected
    assert without(ranges, holes[::-1]) == expected


def test_units_end_at_multiples_of_the_unit():
    poison = Poison(ZEROS, ((100, 2 * UNIT), (3 * UNIT, 3 * UNIT + 10), (5 * UNIT - 1, 6 * UNIT)))
    assert poison.units == 2 + 1 + 2
    assert [poison.unit(i) for i in range(poison.units)] == [
        (100, UNIT), (UNIT, 2 * UNIT), (3 * UNIT, 3 * UNIT + 10), (5 * UNIT - 1, 5 * UNIT),
        (5 * UNIT, 6 * UNIT),
    ]  # fmt: skip
    assert poison.first(0).ranges == ()
    assert poison.first(3).ranges == poison.ranges[:2]
    assert poison.first(poison.units) == poison


def test_zeros_go_everywhere_but_into_persistent_tensors(pool):
    first = pool.data_ptr()
    blocks = [block(pool, 0, BLOCK), block(pool, BLOCK, 2 * BLOCK, is_live=True)]
    kept = [tensor_range(pool[10:20].view(torch.uint8)), (first + BLOCK, first + 2 * BLOCK)]
    assert ranges_to_fill(ZEROS, blocks, kept, [], []) == (
        (first, first + 10), (first + 20, first + BLOCK),
    )  # fmt: skip


@pytest.mark.parametrize("fill", [NUMBERS, NAN], ids=lambda fill: fill.text)
def test_other_contents_go_where_stale_values_are_floats(pool, fill):
    first = pool.data_ptr()
    scratch = block(pool, 0, BLOCK)
    own = [
        allocation(pool, 0, 1000),
        allocation(pool, 600, 700, torch.int64),  # written by its operation before any read
        allocation(pool, 2000, 3000, torch.bfloat16),
        allocation(pool, 2500, 2600, torch.int32, is_initialised=False),
    ]
    other = allocation(pool, 3500, 4000)  # of another graph: what it left is not read by this one
    found = ranges_to_fill(fill, [scratch], [], own, [*own, other])
    assert [(begin - first, end - first) for begin, end in found] == [
        (0, 1000), (2000, 2500), (2600, 3000),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtypes", "is_filled"),
    [
        ([], False),
        ([torch.float16], True),
        ([torch.int64], False),
        ([torch.int64, torch.float32], True),
        ([torch.float32, torch.int64], False),
    ],
)
def test_a_live_block_holds_what_was_allocated_last(pool, dtypes, is_filled):
    live = block(pool, UNIT, 2 * UNIT, is_live=True)
    others = [allocation(pool, UNIT, UNIT + 8, dtype) for dtype in dtypes]
    own = [allocation(pool, 0, BLOCK)]  # before the live block was allocated in its middle
    found = ranges_to_fill(NAN, [live], [], own, [*own, *others])
    assert found == (((live.begin, live.end),) if is_filled else ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_contents_mean_what_they_say_in_every_dtype(pool, dtype):
    memory = PoolMemory([block(pool, 0, BLOCK)])
    numbers = pool[:BLOCK].view(dtype)
    memory.overwrite(Poison(ZEROS, (tensor_range(numbers),)))
    assert not numbers.any()
    memory.overwrite(Poison(NUMBERS, (tensor_range(numbers),)))
    assert numbers.isfinite().all()
    assert (numbers > 0).all()
    assert len(numbers.unique()) >= (2 if dtype.itemsize < 8 else 1)
    memory.overwrite(Poison(NAN, (tensor_range(numbers),)))
    assert numbers.isnan().all()


@pytest.mark.parametrize("begin", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("length", [1, 2, 9, 600])
def test_any_bytes_are_overwritten_and_restored(pool, begin, length):
    pool.copy_(torch.arange(len(pool)) % 251)
    before = pool.clone()
    memory = PoolMemory([block(pool, BLOCK, 2 * BLOCK), block(pool, 0, BLOCK)])
    fill = Fill("bytes", int.from_bytes(bytes(range(8, 0, -1)), "big"))
    first = pool.data_ptr()
    span = first + BLOCK - 5 + begin, first + BLOCK - 5 + begin + length  # across two blocks
    memory.overwrite(Poison(fill, (span,)))
    at = torch.arange(len(pool))
    inside = (at + first >= span[0]) & (at + first < span[1])
    expected = torch.where(inside, (at + first) % 8 + 1, before)
    assert torch.equal(pool, expected.to(torch.uint8))
    memory.restore()
    assert torch.equal(pool, before)


def test_memory_is_restored_after_an_error(pool):
    memory = PoolMemory([block(pool, 0, BLOCK)])

    def interrupted():
        with StateSnapshot({}, pool.device, memory.restore):
            pool.zero_()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (pool[:BLOCK] == 5).all()
    assert not pool[BLOCK:].any(), "memory of other blocks is not the pool's"


def test_addresses_of_device_memory_stay(pool):
    segments = [(1 << 40, (1 << 40) + 4096), (3 << 40, (3 << 40) + 4096)]
    words = pool[:BLOCK].view(torch.int64)
    words[:6] = torch.tensor(
        [1 << 40, (1 << 40) + 4095, (1 << 40) + 4096, (2 << 40), (3 << 40) + 8, -1]
    )
    memory = PoolMemory([block(pool, 0, BLOCK), block(pool, BLOCK, 2 * BLOCK)], segments)
    memory.overwrite(Poison(ZEROS, ((pool.data_ptr(), pool.data_ptr() + BLOCK),)))
    assert words[:6].tolist() == [1 << 40, (1 << 40) + 4095, 0, 0, (3 << 40) + 8, 0]
    assert not words[6:].any()


def test_the_block_of_an_address(pool):
    blocks = [block(pool, 0, BLOCK), block(pool, BLOCK, 2 * BLOCK)]
    memory, first = PoolMemory(blocks), pool.data_ptr()
    for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1):
        assert memory.block_at(first + at) is blocks[at // BLOCK]


# The node that reads, where nodes cannot be switched off.


def node(index, *pointers, parent=None, names=()):
    arguments = [
        Argument(
            name=names[i] if names else "", size=8, kind="pointer", text="",
            pointers=(Pointer(address=address, memory="pool", name="pool"),),
        )
        for i, address in enumerate(pointers)
    ]  # fmt: skip
    return Node(
        index=index, kind="kernel", name="k", short_name="k", arguments=tuple(arguments),
        parent=parent,
    )  # fmt: skip


def test_the_first_node_that_points_nearest_is_taken():
    around = (1000, 2000)
    nodes = [node(0, 900), node(1, 1100), node(2, 500, 1500), node(3, 1500), node(4, 2000)]
    assert first_pointing(nodes, around) is nodes[2]
    assert nearest_argument(nodes[2], around) == (1500, 1)
    assert first_pointing([nodes[0], nodes[4]], around) is None
    assert nearest_argument(nodes[0], around) == (0, None)


def test_results_of_recorded_operations_are_not_read():
    written = node(0, 1500, names=("-> 0",))
    read = node(1, 1100, names=("self",))
    assert first_pointing([written, read], (1000, 2000)) is read
