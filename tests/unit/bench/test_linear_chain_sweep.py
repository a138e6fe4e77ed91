"""``tools/bench/linear_chain_sweep.py``: the configurations that it compares."""

from __future__ import annotations

from dataclasses import replace

import pytest

LAYERS = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


@pytest.mark.parametrize("kind", ["linear", "fp8 channel", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 48])
def test_programs_of_a_swept_configuration_share_the_memory_of_a_multiprocessor(bench, kind, rows):
    width, step = 256 if kind == "linear" else 128, 2 if kind == "int4" else 1
    for outputs, inputs in LAYERS:
        found = bench.tiled_products((outputs, inputs), kind, rows)
        assert len({each.outputs for each in found}) > 2
        assert len({each.early_bytes for each in found}) > 4
        present, *_ = found
        for each in found:
            if replace(each, early_bytes=present.early_bytes) == present:
                continue
            assert each.rows >= rows
            assert inputs // 128 // step // each.splits % each.unroll == 0
            programs = -(-(outputs // each.outputs) * each.splits // bench.PROCESSORS)
            steps = each.unroll * (each.num_stages - 1)
            shared = programs * steps * (each.outputs * width + each.rows * 256 * step)
            assert steps == 1 or shared <= 196608


@pytest.mark.parametrize("kind", ["linear", "fp8 channel", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_swept_streamed_products_divide_the_weight_and_fit_a_multiprocessor(bench, kind, rows):
    bits = bench.BITS.get(kind, 8)
    for outputs, inputs in LAYERS:
        found = bench.streamed_products((outputs, inputs), kind, rows)
        assert found
        for each in found:
            lines, rest = divmod(inputs * bits // 1024, each.splits)
            assert rest == 0 == outputs % each.outputs
            assert each.rows >= rows
            assert lines % each.lines == 0
            assert kind == "linear" or each.num_warps % each.lines == 0
            assert 2 <= each.num_stages <= lines // each.lines + 1
            stage = each.lines * (each.outputs * 128 + each.rows * 2048 // bits)
            groups = 0 if kind == "linear" else bench.groups_of_part(inputs, each.splits)
            assert each.num_stages * stage + 6 * each.outputs * groups <= 227 * 1024


def test_many_rows_are_not_streamed(bench):
    assert bench.streamed_products((4096, 4096), "linear", 64)
    assert bench.streamed_products((4096, 4096), "linear", 65) == []
    assert bench.streamed_products((4096, 4096), "fp8 channel", 64)
    assert bench.streamed_products((4096, 4096), "fp8 channel", 65) == []
    assert bench.streamed_products((4096, 4096), "int4", 64)
    assert bench.streamed_products((4096, 4096), "int4", 65) == []
