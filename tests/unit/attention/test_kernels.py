"""The kernels of attention against loops, and on CUDA against the references."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import triton

from gluon_interpreter import SpecialisedProgram, run_kernel
from graphkit.ops.kernels import paged_attention as kernels
from graphkit.ops.kernels.attention_config import (
    AttentionConfig,
    choose_config,
    choose_fast_config,
    choose_splits,
    count_segments,
    spread_rows,
)
from graphkit.ops.paged_attention import paged_attention
from graphkit.spec import ForwardMode
from op_devices import CUDA, INTERPRETER, LOOPS, by

interpreted_loops = by(INTERPRETER, interpreted=[LOOPS])
EXTEND, DRAFT = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT
both_ways = pytest.mark.parametrize("row_invariant", [True, False], ids=["invariant", "fast"])
SANITIZED = {False: [], True: [pytest.mark.sanitized]}
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerances of results on CUDA."""
PAGES = {1: [5, 70], 4: [4, 5, 61], 16: [16, 17, 63]}


@pytest.fixture
def memory_of_nan(monkeypatch):
    """Fill memory that is allocated for results and within launchers with NaN."""

    def dirty(allocate):
        def filled(*args, **options):
            made = allocate(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return filled

    monkeypatch.setattr(torch, "empty", dirty(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", dirty(torch.Tensor.new_empty))


@pytest.fixture
def launched_kernels(monkeypatch):
    """Return a list of the names of the kernels of attention; without CUDA they do not run."""
    names, launch = [], kernels.launch

    def noted(kernel, grid, args, **others):
        names.append(kernel.__name__)
        if args.query_TND.is_cuda:
            launch(kernel, grid, args, **others)

    monkeypatch.setattr(kernels, "launch", noted)
    return names


def hide_unseen_keys(case):
    """Fill the keys and values that no row sees with NaN: they are not read."""
    for b, (keys, _) in enumerate(case.histories):
        seen = {key for i in range(case.own_rows[b]) for key in case.visible_keys(b, i)}
        hidden = sorted(set(range(len(keys))) - seen)
        slots = case.requests.req_to_token[case.inputs.req_pool_indices[b], hidden].long()
        case.pool.get_key_buffer(1)[slots] = torch.nan
        case.pool.get_value_buffer(1)[slots] = torch.nan


SMALL = AttentionConfig(block_rows=16, block_keys=16)


def attention_cases():
    """Yield lengths, options of a case, and of each launch, by what they have in common."""
    for page_size, width in [(1, 1), (1, 8), (4, 3), (4, 4), (16, 1), (16, 8)]:
        for tree in (False, True):
            yield "pages", PAGES[page_size], (1, 4), None, {
                "width": width, "page_size": page_size, "tree": tree, "pads": 1, "heads": 2,
                "kv_heads": 1, "context": 160,
            }  # fmt: skip
    for group, head_dim in [(1, 16), (2, 24), (4, 80), (7, 16), (7, 24), (1, 80)]:
        shape = {"width": 4, "heads": 2 * group, "head_dim": head_dim, "tree": True}
        yield "groups", [66, 3], (2,), None, shape
    for head_dim in (320, 512):
        shape = {"width": 3, "heads": 8, "head_dim": head_dim, "page_size": 4, "tree": True}
        yield "large heads", [66, 3], (1, 2), None, shape
    for tree in (False, True):
        shape = {"width": 17, "heads": 8, "page_size": 4, "tree": tree}
        yield "several row tiles", [9, 70], (2,), None, shape
    # Trees begin in the last block of a split, at its start and behind it.
    for options in ({}, {"tree": True}, {"window": 20}):
        shape = {"width": 3, "page_size": 4, "heads": 2, "kv_heads": 1, **options}
        yield "splits take turns", [13, 14, 16, 30, 45, 64], (1, 2, 3, 7), SMALL, shape
    # Runs of keys in one page have 8 or 16 of the 16 keys of a block, or one of 128.
    for block_keys, shape in [(16, {}), (16, {"head_dim": 40, "latent": 32}), (128, {})]:
        for page_size, window in product((8, 24, 32), (0, 21)):
            config = AttentionConfig(block_rows=16, block_keys=block_keys)
            yield "pages and blocks", [13, 30, 100], (1, 3), config, {
                "width": 3, "page_size": page_size, "window": window, "heads": 2, "kv_heads": 1,
                "context": 160, **shape,
            }  # fmt: skip
    # A row of the mask is a word of 32 or 64 bits, or is loaded with the keys.
    for columns, window in product((31, 32, 33, 64, 65), (0, 70)):
        shape = {"width": 3, "columns": columns, "tree": True, "window": window}
        yield "many columns", [80, 90], (2,), None, shape
    # Not bfloat16: the interpreter multiplies its bit patterns as integers.
    shape = {"width": 3, "page_size": 4, "dtype": torch.float16, "pads": 1, "heads": 4}
    yield "half precision", [7, 70], (1, 2), None, shape
    for options in ({"softcap": 0.5}, {"sinks": True}):
        shape = {"width": 3, "page_size": 4, "tree": True, "pads": 1, "heads": 4, **options}
        yield "options", [5, 70], (1, 3), None, shape
    # Keys behind the last query of a tile are not read by it.
    yield "long chain", [9, 0], (1, 2), None, {"width": 70, "heads": 2, "page_size": 4}
    # Rows of 20 heads and 3 queries fill tiles of 64 and of 16.
    for page_size, tree in product((1, 16), (False, True)):
        for splits, config in ((1, None), (3, SMALL)):
            yield "latents", PAGES[page_size], (splits,), config, {
                "width": 3, "page_size": page_size, "tree": tree, "pads": 1, "heads": 20,
                "head_dim": 40, "latent": 32, "context": 160,
            }  # fmt: skip


@interpreted_loops
@both_ways
@pytest.mark.parametrize(
    ("lengths", "splits", "config", "options"),
    [pytest.param(*case, id=f"{name}-{case[3]}") for name, *case in attention_cases()],
)
def test_attention(run, make_case, assert_attends, lengths, splits, config, options, row_invariant):
    case = make_case(lengths, row_invariant=row_invariant, **options)
    tolerance = 2e-3 if options.get("dtype") is torch.float16 else 2e-5
    for count in splits:
        launch = {"splits": count, "config": config}
        assert_attends(run(paged_attention, *case.op_args(), launch=launch), case, tolerance)


def large_cases():
    """Yield lengths and options of batches that CUDA alone runs."""
    lengths, usual = [5, 15, 16, 17, 130], {"heads": 4, "head_dim": 64}
    for page_size, width, tree in product((1, 4, 16), (1, 3, 4, 8), (False, True)):
        shape = {"width": width, "page_size": page_size, "tree": tree, "pads": 1}
        yield lengths, usual | shape, width == 3
    for group, head_dim in product((1, 2, 4, 7), (16, 24, 80, 128, 256)):
        yield [66, 3], {"width": 4, "heads": 2 * group, "head_dim": head_dim, "tree": True}, False
    for head_dim in (64, 256):
        shape = {"width": 20, "heads": 16, "head_dim": head_dim, "tree": True}
        yield [9, 300], shape, False
    wide = {"width": 4, "heads": 16, "kv_heads": 4, "head_dim": 128, "page_size": 16, "tree": True}
    yield [4092], wide, True
    yield [1020 - 15 * b for b in range(64)], wide, False
    # Rows of several numbers, and none at all, with rows of no request behind them.
    for width, rows in ((4, [4, 1, 3, 2]), (4, [1] * 4), (5, [5, 0, 2, 1]), (8, [1, 8, 1, 8])):
        for page_size in (1, 16):
            shape = {"mode": EXTEND, "width": width, "rows": rows, "page_size": page_size}
            yield [130, 16, 9, 700], usual | shape, False
    for width, length in product((3, 20), (40, 4000)):
        shape = {"mode": EXTEND, "width": width, "rows": [1, 3, 2], "heads": 16, "head_dim": 64}
        yield [length, 7, 300], shape, False
    yield [130, 0], usual | {"mode": ForwardMode.DRAFT_EXTEND_V2, "width": 4, "pads": 2}, False
    for topk, steps in ((1, 5), (2, 3), (4, 4), (3, 40)):
        drafted = topk * (steps - 1)
        shape = {"mode": DRAFT, "width": topk, "columns": topk * steps, "page_size": 4}
        yield [drafted, 64 + drafted, 900], usual | shape | {"tree": True}, False
    for page_size, columns, heads in product((1, 16, 64), (0, 4, 12), (16, 128)):
        tree = {"tree": True, "columns": columns} if columns else {}
        shape = {"width": 4, "heads": heads, "head_dim": 576, "latent": 512, **tree}
        yield [130, 12, 1500], shape | {"page_size": page_size}, page_size == 16
    for width, key_dim in product((1, 8), (40, 96)):
        shape = {"width": width, "heads": 8, "head_dim": key_dim, "latent": key_dim - 8}
        yield [130, 12, 1500], shape | {"page_size": 16}, False
    for width, head_dim in product((1, 4, 70), (320, 512)):
        shape = {"width": width, "heads": 8, "head_dim": head_dim, "page_size": 16}
        yield [130, 75, 1500], shape, False
    for page_size in (1, 16):  # rows that are not aligned to 16 bytes
        shape = {"width": 4, "heads": 8, "head_dim": 36, "latent": 32, "page_size": page_size}
        yield [130, 12, 1500], shape, False
    options = [
        {"window": window, "chunked": chunked}
        for window, chunked in product((3, 4, 63, 128, 4096), (False, True))
    ]
    options += [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "window": 70}]
    for option, tree in product(options, (False, True)):
        shape = {"width": 4, "heads": 8, "head_dim": 64, "page_size": 16, "tree": tree}
        yield [130, 12, 1500], shape | option, False
    for window in (0, 64):
        yield [0, 133], {"width": 200, "heads": 16, "head_dim": 64, "window": window}, False


@by(CUDA)
@pytest.mark.parametrize(
    ("dtype", "row_invariant"),
    [*((dtype, True) for dtype in DTYPES), (torch.bfloat16, False)],
    ids=str,
)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        pytest.param(lengths, options, id=str(options), marks=SANITIZED[is_small])
        for lengths, options, is_small in large_cases()
    ],
)
def test_large_batches_are_those_of_the_reference(
    run, make_case, dtype, row_invariant, lengths, options
):
    """The numbers are those that the dtype holds, and the reference computes in float32."""
    given, case = (
        make_case(lengths, row_invariant=row_invariant, dtype=dtype, device=on, **options)
        for on in ("cpu", "cuda")
    )
    if "window" in options:
        hide_unseen_keys(given)
        hide_unseen_keys(case)
    args = given.op_args()
    want = paged_attention(*(part.float() for part in args[:3]), *args[3:])
    # Memory that the allocator returns next has held NaN.
    [torch.full(args[0].shape, torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    got = run(paged_attention, *case.op_args())
    assert got.dtype == dtype
    live, limit = case.live_rows, DTYPES[dtype]
    torch.testing.assert_close(got[:live].float(), want[:live], atol=limit, rtol=limit)
    assert got[int(case.row_sums[-1]) :].eq(0).all()


@interpreted_loops
@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_attention_that_follows_a_store(run, make_case, dtype, tree, row_invariant):
    """It loads its rows in the loop, after its first keys."""
    case = make_case(PAGES[4], width=3, page_size=4, tree=tree, pads=1, dtype=dtype, context=160)
    for splits in (1, 4):
        args = case.op_args()[:-2]
        usual, got = (
            run(paged_attention, *args, follows, row_invariant, launch={"splits": splits})
            for follows in (False, True)
        )
        assert torch.equal(got[: case.live_rows], usual[: case.live_rows])


@interpreted_loops
@both_ways
@pytest.mark.parametrize(
    ("page_size", "rows"), [(1, [4, 1, 3]), (4, [1, 1, 1]), (4, [2, 4, 4])], ids=str
)
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_over_ragged_rows(
    run, make_case, assert_attends, page_size, rows, splits, row_invariant
):
    case = make_case(
        [66, 0, 9],
        row_invariant=row_invariant,
        mode=ForwardMode.DRAFT_EXTEND,
        width=4,
        rows=rows,
        page_size=page_size,
        pads=2,
    )
    out = run(paged_attention, *case.op_args(), launch={"splits": splits})
    assert_attends(out, case)
    assert out[sum(rows) + 2 :].eq(0).all()


@interpreted_loops
@both_ways
@pytest.mark.parametrize(
    ("width", "rows", "heads", "kv_heads"),
    [(3, [1, 3, 2], 2, 2), (3, [3, 3, 1], 2, 2), (17, [1, 3, 2], 4, 1)],  # the last: two tiles
    ids=str,
)
def test_attention_over_fewer_or_more_rows(
    run, make_case, assert_attends, memory_of_nan, width, rows, heads, kv_heads, row_invariant
):
    """Rows of no request are zeros, also if there are more of them than lanes."""
    live = sum(rows)
    for extra, splits in ((0, 1), (1, 2), (3 * width + 1, 1), (3 * width + 1, 2)):
        case = make_case(
            [6, 17, 2], mode=ForwardMode.DRAFT_EXTEND, width=width, rows=rows,
            heads=heads, kv_heads=kv_heads, row_invariant=row_invariant,
        )  # fmt: skip
        args = list(case.op_args())
        args[0] = torch.full((live + extra, heads, 16), torch.nan)
        args[0][:live] = case.query[:live]
        case.query = args[0]
        out = run(paged_attention, *args, launch={"splits": splits})
        assert_attends(out, case)
        assert out[live:].eq(0).all()


@interpreted_loops
@both_ways
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_of_a_tree_with_unused_rows(
    run, make_case, assert_attends, memory_of_nan, splits, row_invariant
):
    for extra in (1, 3, 8):
        case = make_case([6, 17], width=3, tree=True, row_invariant=row_invariant)
        args = list(case.op_args())
        args[0] = torch.cat([case.query, torch.full((extra, 2, 16), torch.nan)])
        case.query = args[0]
        out = run(paged_attention, *args, launch={"splits": splits})
        assert_attends(out, case)
        assert out[6:].eq(0).all()


@interpreted_loops
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_of_pads_with_fewer_keys_than_rows(run, make_case, assert_attends, splits):
    case = make_case([70, 0], mode=ForwardMode.DRAFT_EXTEND_V2, width=4, pads=2)
    out = run(paged_attention, *case.op_args(), launch={"splits": splits})
    assert_attends(out, case)
    assert out[8:11].eq(0).all()
    assert out[11].isnan().all()  # the one key of a pad


@interpreted_loops
def test_attention_of_a_request_without_rows(run, make_case, assert_attends):
    case = make_case([7, 3, 9], mode=ForwardMode.DRAFT_EXTEND, width=3, rows=[2, 3, 1])
    args = list(case.op_args())
    args[3], args[4] = args[3][[0, 0, 1, 2]], args[4][[0, 0, 1, 2]]
    args[5] = torch.tensor([0, 0, 2, 5, 6], dtype=torch.int32)
    assert_attends(run(paged_attention, *args, launch={"splits": 2}), case)


@interpreted_loops
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_attention_of_lengths_beyond_the_page_table(run, make_case, tree):
    """The last block of keys ends inside the table and before the rows of the request."""
    args = list(make_case([300, 12], width=3, tree=tree).op_args())
    args[3] = args[3][:, :40].contiguous()
    for splits in (1, 2):
        out = run(paged_attention, *args, launch={"splits": splits})
        torch.testing.assert_close(out, paged_attention(*args))


@interpreted_loops
def test_attention_of_no_requests(run, make_case):
    args = list(make_case([7, 3]).op_args())
    args[3], args[4], args[5] = args[3][:0], args[4][:0], args[5][:1]
    assert run(paged_attention, *args).eq(0).all()
    args[0] = args[0][:0]
    assert run(paged_attention, *args).shape == (0, 2, 16)


@interpreted_loops
@pytest.mark.parametrize(
    ("topk", "steps"), [(2, 3), (4, 2), (4, 8), (3, 11), (4, 16), (3, 25)], ids=str
)  # 32, 33 and 64 columns too: those of a word, one more, and those of a long word
def test_attention_of_a_draft_tree(run, make_case, assert_attends, topk, steps):
    drafted = topk * (steps - 1)
    case = make_case(
        [66 + drafted, drafted, 0], mode=ForwardMode.DRAFT, width=topk, columns=topk * steps,
        tree=True, page_size=4, heads=4,
    )  # fmt: skip
    case.inputs.custom_mask[0, :, 1] = False
    hidden = case.requests.req_to_token[case.inputs.req_pool_indices[0], 66 + 1]
    case.pool.get_key_buffer(1)[hidden] = torch.nan
    case.pool.get_value_buffer(1)[hidden] = torch.nan
    for splits in (1, 4):
        assert_attends(run(paged_attention, *case.op_args(), launch={"splits": splits}), case)


@by(INTERPRETER, CUDA)
@pytest.mark.parametrize(
    "options", [{}, {"window": 300}, {"sinks": True}, {"head_dim": 40, "latent": 32}], ids=str
)
@pytest.mark.usefixtures("products_in_order")
def test_the_bits_of_a_row_do_not_depend_on_the_launch(run, make_case, options):
    """Neither on splits nor on tiles: segments of keys are joined in order."""
    case = make_case([700, 5, 1090], width=3, heads=4, context=1200, **options)
    tall = AttentionConfig(block_rows=64, block_keys=64, num_warps=8)
    small = replace(tall, block_rows=16, num_warps=4)
    results = [
        run(paged_attention, *case.op_args(), launch={"splits": splits, "config": config})
        for splits, config in ((1, small), (2, small), (3, tall), (5, small), (7, tall))
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@by(INTERPRETER, CUDA)
@pytest.mark.usefixtures("products_in_order")
def test_a_row_has_the_bits_that_it_has_alone(run, make_case):
    case = make_case([600, 270], width=3, heads=4, context=700)
    whole = run(paged_attention, *case.op_args(), launch={"splits": 2})
    args = list(case.op_args())
    lengths = args[4].clone()
    for row in range(3):
        args[0] = case.query[row::3].contiguous()
        args[4], args[5] = lengths - 2 + row, torch.arange(3, dtype=torch.int32)
        args[9] = 1
        assert torch.equal(run(paged_attention, *args, launch={"splits": 1}), whole[row:6:3])


@by(CUDA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8, "head_dim": 128},
        {"heads": 8, "head_dim": 128, "page_size": 16, "sinks": True},
        {"heads": 6, "head_dim": 64, "page_size": 4},
        {"heads": 2, "head_dim": 64, "sinks": True},
    ],
    ids=str,
)
def test_a_prompt_by_warpgroups_has_the_bits_of_other_rows(
    run, make_case, memory_of_nan, launched_kernels, dtype, options
):
    case = make_case(
        [700, 0, 4200, 130], mode=EXTEND, width=600, rows=[520, 3, 260, 1], pads=2, dtype=dtype,
        device="cuda", **options,
    )  # fmt: skip
    args, rows = list(case.op_args()), int(case.row_sums[-1])
    args[0] = torch.cat([case.query, torch.full_like(case.query[:700], torch.nan)])
    small = AttentionConfig(block_rows=16, block_keys=128, num_warps=4)
    usual, got = (
        run(paged_attention, *args, launch={"splits": 1, "config": config})
        for config in (small, None)
    )
    assert launched_kernels == ["paged_attention_kernel", "prompt_attention_kernel"]
    assert torch.equal(got[: case.live_rows], usual[: case.live_rows])
    assert got[rows:].eq(0).all()


PROMPT = {"heads": 8, "kv_heads": 2, "head_dim": 128, "width": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "is_prompt"),
    [
        ({}, True), ({"sinks": True, "page_size": 4}, True), ({"head_dim": 64}, True),
        ({"kv_heads": 4}, False), ({"width": 127}, False), ({"head_dim": 96}, False),
        ({"dtype": torch.float32}, False), ({"window": 9}, False), ({"softcap": 2.0}, False),
        ({"tree": True}, False), ({"latent": 64}, False),
    ],
    ids=str,
)  # fmt: skip
def test_warpgroups_attend_from_many_rows(
    make_case, launched_kernels, monkeypatch, change, is_prompt
):
    monkeypatch.setattr(kernels, "has_warpgroups", lambda _: True)
    case = make_case([3], **PROMPT | change)
    INTERPRETER(paged_attention, *case.op_args(), launch={"splits": 1})
    assert launched_kernels[0] == f"{'prompt' if is_prompt else 'paged'}_attention_kernel"


@pytest.mark.parametrize(("processors", "is_prompt"), [(16, True), (17, False)])
def test_warpgroups_attend_if_tiles_fill_half_of_the_device(
    make_case, launched_kernels, monkeypatch, processors, is_prompt
):
    """The other kernel splits keys to fill the last round of its programs, but is slower."""
    monkeypatch.setattr(kernels, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: (processors, 233472))
    monkeypatch.setattr(kernels, "choose_splits", lambda *_: 2)
    INTERPRETER(paged_attention, *make_case([300], **PROMPT).op_args())
    assert launched_kernels[0] == f"{'prompt' if is_prompt else 'paged'}_attention_kernel"


def test_programs_of_prompts_follow_the_rows_of_all_requests(make_case, monkeypatch):
    """Not the requests times the rows of the longest."""
    monkeypatch.setattr(kernels, "has_warpgroups", lambda _: True)
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda _kernel, grid, *_, **__: grids.append(grid[0]))
    for rows in ([256], [249, *[1] * 7]):
        case = make_case([9] * len(rows), mode=EXTEND, rows=rows, **PROMPT | {"width": 256})
        args = case.query[:256], *case.op_args()[1:]
        INTERPRETER(paged_attention, *args, launch={"splits": 1})
    one, eight = grids
    assert eight == one + 7 * PROMPT["kv_heads"]


@pytest.mark.parametrize(
    "options",
    [
        {"rows": [130, 3, 0], "head_dim": 64, "sinks": True},
        {"rows": [129, 64], "head_dim": 128, "page_size": 4},
    ],
    ids=str,
)
def test_warpgroups_attend_as_the_loops(
    make_case, assert_attends, memory_of_nan, monkeypatch, options
):
    """On the CPU by ``gluon_interpreter``."""

    def run(kernel, *args, grid, **_):
        run_kernel(kernel, grid, args, {}, SpecialisedProgram)

    monkeypatch.setattr(kernels, "has_warpgroups", lambda _: True)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    lengths = [300, 4, 7][: len(options["rows"])]
    case = make_case(
        lengths, mode=EXTEND, width=140, heads=8, kv_heads=2, dtype=torch.bfloat16, pads=1,
        **options,
    )  # fmt: skip
    args, rows = list(case.op_args()), int(case.row_sums[-1])
    args[0] = torch.cat([case.query, torch.full_like(case.query[:150], torch.nan)])
    out = INTERPRETER(paged_attention, *args, launch={"splits": 1})
    case.query = args[0]
    assert_attends(out, case, 1.6e-2)
    assert out[rows:].eq(0).all()


@pytest.mark.parametrize("keys", [0, 1, 255, 256, 257, 4095, 4096, 4097, 8192, 100_000, 2**20])
def test_segments_are_counted(keys):
    count, end = 0, 0
    while end < max(keys, 1):
        end += 256 if end < 4096 else 2 ** (end.bit_length() - 4)
        count += 1
    assert count_segments(keys) == count


@interpreted_loops
def test_attention_over_keys_longer_than_values(run, make_case, assert_attends):
    case = make_case([7, 70], width=3, heads=4, head_dim=40)
    args = list(case.op_args())
    args[2] = args[2][..., :24]
    case.value = case.value[..., :24]
    case.histories = [(keys, values[..., :24]) for keys, values in case.histories]
    assert_attends(run(paged_attention, *args, launch={"splits": 2}), case)


@interpreted_loops
@pytest.mark.parametrize(("tree", "window"), [(False, 2), (False, 40), (True, 3), (True, 70)])
def test_attention_within_a_window(run, make_case, assert_attends, tree, window):
    """Keys outside the window are NaN: they are not read."""
    case = make_case([5, 90, 130], width=3, page_size=4, tree=tree, pads=1, heads=4, window=window)
    hide_unseen_keys(case)
    for splits in (1, 3):
        assert_attends(run(paged_attention, *case.op_args(), launch={"splits": splits}), case)


@interpreted_loops
@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunked"])
@pytest.mark.parametrize(
    ("width", "columns", "window"),
    [(1, 0, 32), (5, 0, 3), (5, 5, 3), (5, 5, 32), (3, 8, 4), (2, 33, 8), (3, 66, 16)],
    ids=str,
)
def test_windows_that_begin_within_the_rows(
    run, make_case, assert_attends, width, columns, window, chunked
):
    """Chains and trees, their masks as words and as bytes, around the boundaries of chunks."""
    drafted = max(columns - width, 0)
    lengths = [drafted + length for length in (0, 30, 31, 32, 63)]
    case = make_case(
        lengths, mode=ForwardMode.DRAFT if drafted else ForwardMode.TARGET_VERIFY, width=width,
        columns=columns or None, tree=columns > 0, pads=1, heads=4, window=window, chunked=chunked,
    )  # fmt: skip
    hide_unseen_keys(case)
    for splits in (1, 3):
        launch = {"splits": splits, "config": SMALL}
        assert_attends(run(paged_attention, *case.op_args(), launch=launch), case)


@interpreted_loops
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_edges(run, make_case, assert_attends, splits):
    case = make_case([0, 6, 70], width=4, tree=True)
    case.inputs.custom_mask[0] = False  # sees nothing at all
    case.inputs.custom_mask[1, :, 3] = False  # no query sees its last row
    case.key[7], case.value[7] = torch.nan, torch.nan
    out = run(paged_attention, *case.op_args(), launch={"splits": splits})
    assert out[:4].eq(0).all()
    case.inputs.custom_mask[0] = torch.eye(4, dtype=torch.bool)
    out[:4] = case.value[:4]  # the only key that each of them sees
    assert_attends(out, case)


@interpreted_loops
def test_attention_takes_a_slice_of_a_fused_projection(run, make_case, assert_attends):
    case = make_case([7, 70], width=3, heads=4)
    args = list(case.op_args())
    fused = torch.full((6, 3, 4, 16), torch.nan)
    fused[:, 1] = args[0]
    args[0] = fused[:, 1]
    assert_attends(run(paged_attention, *args, launch={"splits": 2}), case)


@interpreted_loops
def test_attention_stops_at_the_end_of_the_page_table(run, make_case):
    case = make_case([6], width=1)
    args = list(case.op_args())
    args[3] = args[3][:, :4].contiguous()
    short = make_case([6], width=1)
    keys, values = (history[:4] for history in short.histories[0])
    scores = torch.einsum("nd,lnd->nl", short.query[0], keys) * 16**-0.5
    expected = torch.einsum("nl,lnd->nd", scores.softmax(-1), values)
    torch.testing.assert_close(run(paged_attention, *args, launch={"splits": 1})[0], expected)


@pytest.mark.parametrize(
    ("tiles", "max_keys", "splits"),
    [(8, 8192, 24), (64, 8192, 4), (256, 8192, 1), (192, 8192, 4), (1, 10**6, 80), (1, 100, 1)],
)
def test_splits_fill_the_device(tiles, max_keys, splits):
    assert choose_splits(tiles, count_segments(max_keys), places=264) == splits


def test_large_blocks_of_keys_have_longer_splits():
    large = choose_fast_config(4, 128, 128, 2, is_shared=False, shared_bytes=233472)
    small = choose_fast_config(4, 128, 128, 2, is_shared=False, shared_bytes=102400)
    assert (large.block_keys, small.block_keys) == (128, 64)
    splits = [choose_splits(8, 1664 // config.least_split, 132) for config in (large, small)]
    assert splits == [6, 13]


@pytest.mark.parametrize("sizes", [(128, 128, 2), (128, 128, 1), (256, 256, 2), (576, 512, 2)])
@pytest.mark.parametrize("shared_bytes", [102400, 233472])
def test_the_keys_of_a_block_do_not_depend_on_the_rows(sizes, shared_bytes):
    """They decide the bits of a row."""
    chosen = [
        choose_config(rows, *sizes, is_shared=sizes[0] > sizes[1], shared_bytes=shared_bytes)
        for rows in (1, 4, 17, 33, 64, 2048)
    ]
    assert len({config.block_keys for config in chosen}) == 1


@pytest.mark.parametrize("element_size", [1, 2])
@pytest.mark.parametrize(("programs", "rows"), [(8, 16), (66, 16), (67, 32)])
def test_tiles_have_fewer_rows_where_multiprocessors_are_idle(programs, rows, element_size):
    large = choose_config(24, 128, 128, element_size, is_shared=False, shared_bytes=233472)
    assert (large.block_rows, large.block_keys) == (32, 128)
    assert spread_rows(large, programs, 132) == replace(large, block_rows=rows)
    smallest = replace(large, block_rows=16)
    assert spread_rows(smallest, programs, 132) == smallest
    latents = choose_config(24, 576, 512, 2, is_shared=True, shared_bytes=233472)
    assert spread_rows(latents, programs, 132) == latents
