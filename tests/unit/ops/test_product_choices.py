"""How products divide their work: the choice of kernels, tiles, parts and stages."""

from __future__ import annotations

import pytest
import torch

from graphkit.ops.kernels import (
    quantized_linear_config as config,
    streamed_linear_config as streaming,
    streamed_plain_config as plain,
)
from graphkit.ops.kernels.streamed_product import StreamedProduct

CPU = torch.device("cpu")


def streamed(rows, inputs, outputs, bits):
    """Return how a quantised weight streams on an H200."""
    sizes = inputs, outputs, bits, 132, 233472
    few = streaming.choose_streamed(min(rows, streaming.FEW_ROWS), *sizes)
    if rows < streaming.LEAST_WARPGROUP_ROWS:
        return few
    return streaming.choose_streamed_by_warpgroups(few.splits, few.sums, rows, *sizes)


@pytest.mark.parametrize("starts_early", [False, True])
def test_kernels_that_cannot_start_early_leave_weights_of_16_bits_to_torch(
    starts_early, monkeypatch
):
    monkeypatch.setattr(config, "multiprocessors", lambda _: (132, 233472))
    monkeypatch.setattr(config, "has_dependent_launch", lambda _: starts_early)
    monkeypatch.setattr(config, "has_warpgroups", lambda _: False)
    chosen = config.choose_product(1, 4096, 4096, 16, torch.device("cuda"), torch.bfloat16)
    assert (chosen is not None) == starts_early


@pytest.mark.parametrize(("rows", "has_warpgroups", "streams"), [
    (32, False, True), (33, False, False), (33, True, True), (64, True, True), (65, True, False),
])  # fmt: skip
@pytest.mark.parametrize("bits", [4, 8])
def test_more_rows_stream_where_warpgroups_multiply(
    bits, rows, has_warpgroups, streams, monkeypatch
):
    monkeypatch.setattr(config, "multiprocessors", lambda _: (132, 233472))
    monkeypatch.setattr(config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(config, "has_warpgroups", lambda _: has_warpgroups)
    device = torch.device("cuda")
    chosen = config.choose_product(rows, 4096, 4096, bits, device, torch.bfloat16)
    assert isinstance(chosen, StreamedProduct) == streams


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_does_not_stream_has_one_kind_of_instructions_for_all_rows(bits, monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda _: (132, 233472))
    monkeypatch.setattr(config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(config, "has_warpgroups", lambda _: True)
    sizes = 600, 1000, bits, torch.device("cuda"), torch.bfloat16
    chosen = [config.choose_product(rows, *sizes) for rows in (1, 8, 16, 32, 33, 64, 256, 257)]
    assert {product.pack for product in chosen} == {2}
    assert len({(product.splits, product.sums) for product in chosen}) == 1
    assert config.choose_product(1, *sizes, row_invariant=False).pack == 4


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (28672, 4096), (4096, 14336), (4096, 2048), (32000, 4096)]
)
def test_a_multiprocessor_has_few_bytes_in_flight_while_the_kernel_before_runs(
    outputs, inputs, bits
):
    for rows in (1, 64):
        if bits == 16:
            product = plain.choose_streamed_plain(rows, inputs, outputs, 132, 233472)
        else:
            product = streamed(rows, inputs, outputs, bits)
        stage = product.lines * 128 * product.outputs
        if bits != 16:
            stage //= streaming.pieces_of_line(product.by_warpgroups, bits)
        stage *= min(-(-(outputs // product.outputs) * product.splits // 132), 2)
        assert product.in_flight == 1 or stage * (product.in_flight - 1) < 48 * 1024


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (16384, 53248)],
)
def test_all_programs_of_few_rows_run_at_the_same_time(outputs, inputs, rows, bits):
    chosen = config.choose_product(rows, inputs, outputs, bits, CPU, torch.bfloat16)
    programs = -(-(outputs // chosen.outputs) * chosen.splits // 132)
    in_flight = chosen.unroll * (chosen.num_stages - 1) * config.blocks_of_step(bits)
    block_bytes = chosen.outputs * 16 * bits + chosen.rows * 256
    assert in_flight > 1
    assert programs * (in_flight * block_bytes + 1024) <= 233472


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [128, 640, 4096, 14336])
@pytest.mark.parametrize("tiles", [1, 32, 192, 896])
def test_parts_of_the_inputs_are_not_empty(inputs, tiles, bits):
    parts = config.choose_splits(inputs, tiles, 264, bits)
    steps = -(-inputs // (256 if bits == 4 else 128))
    assert (parts - 1) * -(-steps // parts) < steps <= parts * -(-steps // parts)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (6144, 4096), (28672, 4096), (32000, 4096), (4096, 14336), (128256, 4096), (64, 256),
        (16384, 53248), (32064, 4096),
    ],
)  # fmt: skip
def test_the_parts_of_a_streamed_weight_do_not_depend_on_the_rows(outputs, inputs, bits):
    most = streaming.MOST_STREAMED_ROWS
    found = {rows: streamed(rows, inputs, outputs, bits) for rows in range(1, most + 1)}
    assert len({(product.splits, product.sums) for product in found.values()}) == 1
    for rows, product in found.items():
        steps, rest = divmod(inputs * bits // 1024, product.splits * product.lines)
        assert rest == 0 == outputs % product.outputs
        assert steps >= 1
        assert product.rows >= rows
        assert product.num_stages >= 2
        stage = product.lines * (product.padded_outputs * 128 + product.rows * 2048 // bits)
        stage //= streaming.pieces_of_line(product.by_warpgroups, bits)
        groups = streaming.groups_of_part(inputs, product.splits)
        tables = product.padded_outputs * groups * (6 if bits == 4 else 4)
        assert product.num_stages * stage + tables <= 227 * 1024


FASTEST = {
    (6144, 4096, 8): (
        (64, 8, 4, 3, 8, 2, 1),
        (64, 16, 4, 3, 8, 2, 1),
        (64, 32, 4, 4, 4, 1, 2),
        (64, 64, 4, 3, 4, 1, 2),
        (128, 64, 2, 8, 3, 1, 512),
    ),
    (4096, 4096, 8): (
        (64, 8, 2, 3, 16, 4, 2),
        (64, 16, 2, 3, 16, 4, 2),
        (64, 32, 4, 6, 4, 1, 3),
        (64, 64, 4, 4, 4, 1, 3),
        (128, 64, 4, 8, 3, 1, 512),
    ),
    (28672, 4096, 8): (
        (112, 8, 1, 5, 8, 1, 2),
        (112, 16, 1, 4, 8, 1, 2),
        (112, 32, 1, 4, 8, 1, 2),
        (112, 64, 1, 3, 8, 1, 2),
        (128, 64, 1, 8, 3, 1, 512),
    ),
    (4096, 14336, 8): (
        (64, 8, 4, 5, 4, 2, 2),
        (64, 16, 4, 4, 4, 2, 2),
        (64, 32, 4, 6, 4, 1, 3),
        (64, 64, 4, 4, 4, 1, 3),
        (128, 64, 4, 8, 3, 1, 512),
    ),
    (6144, 4096, 4): (
        (64, 8, 4, 5, 4, 1, 2),
        (64, 16, 4, 4, 4, 1, 2),
        (64, 32, 4, 5, 4, 1, 4),
        (64, 64, 4, 3, 4, 1, 4),
        (64, 64, 2, 4, 3, 1, 512),
    ),
    (4096, 4096, 4): (
        (64, 8, 2, 6, 8, 2, 3),
        (64, 16, 2, 6, 8, 2, 3),
        (64, 32, 4, 9, 4, 1, 6),
        (64, 64, 4, 5, 4, 1, 6),
        (64, 64, 4, 4, 3, 1, 512),
    ),
    (28672, 4096, 4): (
        (32, 8, 1, 3, 2, 1, 2),
        (32, 16, 1, 3, 2, 1, 2),
        (112, 32, 1, 5, 8, 1, 4),
        (112, 64, 1, 3, 8, 1, 4),
        (64, 64, 1, 4, 3, 1, 512),
    ),
    (4096, 14336, 4): (
        (64, 8, 8, 4, 4, 1, 2),
        (64, 16, 8, 3, 4, 1, 2),
        (64, 32, 4, 8, 4, 1, 6),
        (64, 64, 4, 5, 4, 1, 6),
        (64, 64, 4, 4, 3, 1, 512),
    ),
}  # fmt: skip
"""Products of 1, 16, 32, 48 and 128 rows that need no order of sums, by outputs, inputs and bits,
as ``tools/bench/linear_chain.py --sweep`` selected them on an H200: outputs, rows, parts, stages,
warps, lines and stages in flight; of more than 64 rows outputs, rows, parts, warps, stages,
unrolled steps and bytes that are requested early."""


@pytest.mark.parametrize("weight", FASTEST, ids=str)
def test_products_that_need_no_order_of_sums_are_the_fastest(weight, monkeypatch):
    monkeypatch.setattr(config, "multiprocessors", lambda _: (132, 233472))
    monkeypatch.setattr(config, "has_dependent_launch", lambda _: True)
    monkeypatch.setattr(config, "has_warpgroups", lambda _: True)
    outputs, inputs, bits = weight
    for rows, found in zip((1, 16, 32, 48, 128), FASTEST[weight], strict=True):
        product = config.choose_product(
            rows, inputs, outputs, bits, torch.device("cuda"), torch.bfloat16, row_invariant=False
        )
        assert tuple(getattr(product, name) for name in product.__slots__[:7]) == found
        if rows > 16:
            assert product.sums == 1
        if isinstance(product, StreamedProduct):
            assert not product.in_order
            assert product.by_warpgroups == (rows > 16)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (28672, 4096), (4096, 14336), (1000, 4096), (4096, 4224), (64, 300)],
)
def test_the_order_of_a_sum_does_not_depend_on_the_rows(
    outputs, inputs, bits, streams, monkeypatch
):
    monkeypatch.setattr(config, "multiprocessors", lambda _: (132, 233472))
    monkeypatch.setattr(config, "has_dependent_launch", lambda _: streams)
    monkeypatch.setattr(config, "has_warpgroups", lambda _: streams)
    products = [
        config.choose_product(rows, inputs, outputs, bits, torch.device("cuda"), torch.bfloat16)
        for rows in (1, 8, 32, 33, 64, 65, 256, 257, 8192)
    ]
    assert len({(product.splits, product.sums) for product in products}) == 1
    assert all(getattr(product, "in_order", True) for product in products)


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits"),
    [
        (4096, 4096, 4), (6144, 4096, 4), (4096, 14336, 4), (2048, 8192, 4), (8192, 2048, 4),
        (4096, 4096, 8), (6144, 4096, 8), (4096, 14336, 8),
    ],
)  # fmt: skip
def test_a_streamed_weight_has_the_fewest_parts_that_occupy_the_device(outputs, inputs, bits):
    tiles, lines = outputs // 64, inputs * bits // 1024

    def occupy_the_device(parts):
        share = tiles * parts / (-(-tiles * parts // 132) * 132)
        return share >= streaming.OCCUPIED and lines // parts <= streaming.MOST_LINES[bits]

    found = streaming.choose_streamed(6, inputs, outputs, bits, 132, 233472).splits
    fewer = [parts for parts in range(1, found) if lines % parts == 0]
    assert occupy_the_device(found)
    assert not any(map(occupy_the_device, fewer))


@pytest.mark.parametrize(("outputs", "programs"), [(28672, 896), (32000, 250), (57344, 1792)])
def test_programs_of_a_wide_weight_of_four_bits_have_no_short_last_round(outputs, programs):
    """7 programs of 32 outputs run on each multiprocessor, or 2 of 128."""
    for rows in (1, 8, 17, 32):
        product = streaming.choose_streamed(rows, 4096, outputs, 4, 132, 233472)
        assert outputs // product.outputs == programs
        rounds = programs / (132 * (7 if product.outputs == 32 else 2))
        assert rounds % 1 > 0.9


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4160), (100, 4096), (4096, 128)])
def test_weights_without_whole_lines_are_not_streamed(outputs, inputs):
    assert streaming.choose_streamed(1, inputs, outputs, 4, 132, 233472) is None


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (28672, (112, 1)), (14336, (112, 1)), (24576, (96, 1)), (128256, (128, 1)), (37888, None),
        (8512, None), (6144, (96, 2)), (4096, (64, 2)), (5120, (80, 2)), (3072, (96, 4)),
        (2560, (80, 4)), (3584, (112, 4)), (2048, (64, 4)), (4608, (64, 4)), (1024, None),
    ],
)  # fmt: skip
def test_multiprocessors_have_about_the_same_work(outputs, found):
    """A wide weight has one part. Others have two or four if programs then have 64 outputs."""
    product = plain.choose_streamed_plain(48, 4096, outputs, 132, 233472)
    assert (product and (product.outputs, product.splits)) == found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("processors", [30, 170, 188])
def test_programs_that_stream_fit_a_smaller_shared_memory(processors, bits):
    found = set()
    for outputs, inputs in ((57344, 8192), (51200, 5120), (27648, 5120), (4096, 4096), (64, 16384)):
        for rows in (1, 17, 32):
            product = streaming.choose_streamed(rows, inputs, outputs, bits, processors, 102400)
            found.add(product is None)
            if product is None:
                continue
            stage = product.outputs * 128 + product.rows * 2048 // bits
            groups = streaming.groups_of_part(inputs, product.splits)
            tables = product.outputs * groups * (6 if bits == 4 else 4)
            assert 3 * stage + tables <= 99 * 1024
    assert False in found


@pytest.mark.parametrize(
    ("outputs", "inputs", "streams"),
    [
        (6144, 4096, True), (4096, 4096, True), (4096, 14336, True), (3072, 4096, True),
        (28672, 4096, True), (128256, 4096, True), (14336, 4096, True), (64, 4096, False),
        (8448, 64, False), (8512, 4096, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shared_bytes", [233472, 167936])
def test_weights_of_16_bits_are_streamed_in_parts_that_do_not_depend_on_the_rows(
    outputs, inputs, streams, shared_bytes
):
    """Other weights run by ``linear_kernel`` for all rows."""
    splits = set()
    for rows in (*range(1, plain.FEW_PLAIN_ROWS + 1), 65, 129, 256, 257, 1024):
        product = plain.choose_streamed_plain(rows, inputs, outputs, 132, shared_bytes)
        assert (product is not None) == streams
        if product is None:
            continue
        splits.add(product.splits)
        lines, rest = divmod(inputs // 64, product.splits)
        assert rest == 0 == outputs % product.outputs
        assert product.rows >= min(rows, plain.MOST_TILE_ROWS)
        assert product.num_warps % 4 == 0
        # The sums of a tile fit into the registers of its threads.
        assert product.padded_outputs * product.rows <= 128 * 32 * product.num_warps
        stage = 128 * product.lines * (product.padded_outputs + product.rows)
        assert product.num_stages * product.lines >= 3
        assert lines % product.lines == 0
        assert product.num_stages * stage <= shared_bytes - 1024
        assert lines >= 4
    assert len(splits) == streams
