"""``tools/bench/linear_chain.py`` on the CPU: what it measures."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from graphkit.records import BenchReport


@pytest.mark.slow
def test_every_kind_is_measured_beside_torch(bench, tmp_path):
    out = tmp_path / "report.json"
    command = ["--rounds", "1", "--device", "cpu", "--rows", "1", "3", "--out", str(out)]
    assert bench.main(command) == 0
    report = BenchReport.from_json(out.read_text())
    seen = {(measure.setting, measure.variant) for measure in report.measures}
    assert seen == {
        (f"layer, {rows} rows", variant)
        for rows in (1, 3)
        for variant in (
            "bfloat16", *bench.KINDS, *(f"{kind}, row-invariant" for kind in bench.KINDS[1:])
        )
    }  # fmt: skip


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


class FakeHummingLayer(torch.nn.Linear):
    """What the bench calls of ``humming.layer.HummingLayer``, without quantisation."""

    def __init__(self, *, shape_n, shape_k, weight_config, torch_dtype):
        super().__init__(shape_k, shape_n, bias=False, dtype=torch_dtype)
        self.config, self.is_ready = weight_config, False

    def load_from_unquantized(self, weight):
        self.weight.data = weight

    def transform(self):
        self.is_ready = True


def test_layers_of_humming_compute_the_same(bench, monkeypatch):
    module = SimpleNamespace(HummingLayer=FakeHummingLayer)
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace(layer=module))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    device = torch.device("cpu")
    x = bench.random_inputs(bench.SMALL["qkv"], 3, device)[1]
    plain = bench.make_layers(bench.SMALL, "linear", 2, device)
    layers = bench.make_humming_layers(bench.SMALL, "humming int4", 2, device)
    assert bench.nbytes_of(layers[0]) == bench.nbytes_of(plain[0])
    weight = layers[1]["gate_up"][0].multiply
    assert weight.is_ready
    assert weight.config == {"dtype": "int4", "group_size": 128, "has_zero_point": True}
    with torch.no_grad():
        got = bench.Chain(layers, x).run(bench.by_humming)
        assert torch.equal(got, bench.Chain(plain, x).run(bench.by_torch))


def test_a_sweep_needs_a_gpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--sweep", "--device", "cpu"])
    assert "--sweep needs a CUDA device" in capsys.readouterr().err
