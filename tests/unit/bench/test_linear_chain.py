"""``tools/bench/linear_chain.py`` on the CPU: what it measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit.records import BenchReport


def test_every_kind_is_measured_beside_torch(bench, tmp_path):
    out = tmp_path / "report.json"
    command = ["--rounds", "1", "--device", "cpu", "--rows", "1", "3", "--out", str(out)]
    assert bench.main(command) == 0
    report = BenchReport.from_json(out.read_text())
    seen = {(measure.setting, measure.variant) for measure in report.measures}
    assert seen == {
        (f"layer, {rows} rows", variant)
        for rows in (1, 3)
        for variant in ("bfloat16", *bench.KINDS)
    }


def test_every_product_of_a_layer_counts(bench):
    layers = bench.make_layers(bench.SMALL, "linear", 2, torch.device("cpu"))
    x, called = torch.ones(2, 256, dtype=torch.bfloat16), []

    def multiply(rows, *, name, tensors, **result):
        called.append((name, tuple(tensors[0].shape)))
        return bench.by_torch(rows, tensors=tensors, **result)

    bench.Chain(layers, x).run(multiply)
    assert called == [*bench.SMALL.items()] * 2


def test_quantised_layers_compute_the_same_but_for_their_rounding(bench):
    x = bench.random_inputs(bench.SMALL["qkv"], 3, torch.device("cpu"))[1]
    results = {}
    for kind in ("linear", "fp8 channel", "int4"):
        layers = bench.make_layers(bench.SMALL, kind, 2, torch.device("cpu"))
        multiply = bench.partial(bench.by_op, kind=kind)
        results[kind] = bench.Chain(layers, x).run(multiply).float()
    layers = bench.make_layers(bench.SMALL, "linear", 2, torch.device("cpu"))
    plain = bench.Chain(layers, x).run(bench.by_torch).float()
    for kind, error in (("linear", 1e-2), ("fp8 channel", 0.15), ("int4", 0.4)):
        assert (results[kind] - plain).norm() < error * plain.norm(), kind


@pytest.mark.parametrize("kind", ["linear", "fp8 channel", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 48])
def test_programs_of_a_swept_configuration_share_the_memory_of_a_multiprocessor(bench, kind, rows):
    width, step = 256 if kind == "linear" else 128, 2 if kind == "int4" else 1
    for outputs, inputs in bench.LAYERS.values():
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


def test_a_sweep_needs_a_gpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--sweep", "--device", "cpu"])
    assert "--sweep needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["linear", "fp8 channel", "int4"])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_swept_streamed_products_divide_the_weight_and_fit_a_multiprocessor(bench, kind, rows):
    bits, ahead = bench.BITS.get(kind, 8), 2 if kind == "linear" else 1
    for outputs, inputs in bench.LAYERS.values():
        found = bench.streamed_products((outputs, inputs), kind, rows)
        assert found
        for each in found:
            lines, rest = divmod(inputs * bits // 1024, each.splits)
            assert rest == 0 == outputs % each.outputs
            assert each.rows >= rows
            assert lines % each.lines == 0 == each.num_warps % each.lines
            assert ahead < each.num_stages <= lines // each.lines + ahead
            stage = each.lines * (each.outputs * 128 + each.rows * 2048 // bits)
            groups = 0 if kind == "linear" else bench.groups_of_part(inputs, each.splits)
            assert each.num_stages * stage + 6 * each.outputs * groups <= 227 * 1024


def test_many_rows_are_not_streamed(bench):
    assert bench.streamed_products((4096, 4096), "linear", 64)
    assert bench.streamed_products((4096, 4096), "linear", 65) == []
    assert bench.streamed_products((4096, 4096), "int4", 33) == []
