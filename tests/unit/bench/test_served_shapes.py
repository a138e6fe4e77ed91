"""``tools/bench/served_shapes.py``: the bytes of a step."""

from __future__ import annotations

import pytest
import torch

from graphkit.models import load
from graphkit.models.experts import counting_experts, experts_of
from small_models import small_model


def test_a_row_more_moves_what_is_kept_of_it(bench):
    loaded = load(small_model("mamba2"), device="cpu")
    one, four = (bench.step_bytes(loaded, 3, rows) for rows in (1, 4))
    heads, keys, values, channels, columns = 8, 8, 16, 128 + 2 * 8, 4
    kept = 4 * (keys + heads * (values + 1))
    state = 4 * columns * channels
    assert four - one == 3 * 2 * 3 * (2 * kept + state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_the_experts_that_rows_choose_are_read_once(bench, kind, monkeypatch):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda _: 1e3)  # a byte per millisecond
    monkeypatch.setattr(bench, "median_ms", lambda *_: 1.0)
    monkeypatch.setattr(bench, "SHAPES", {"small": {"model_type": kind}})
    loaded = load(small_model(kind), device="cpu")
    held = sum(p.nbytes for name, p in loaded.model.named_parameters() if ".experts." in name)
    experts = {}
    with torch.no_grad():
        for batch in (1, 16):
            for cell in bench.steps("small", loaded, batch, 1, torch.device("cpu")):
                if cell.name == "over its bytes":
                    rows = int(cell.variant.split()[0])
                    read = 1 / cell.value - bench.step_bytes(loaded, batch, rows)
                    experts[batch * rows] = read
    chosen = loaded.model.config.num_experts_per_tok
    names = "num_experts", "num_local_experts", "n_routed_experts"
    count = next(vars(loaded.model.config)[n] for n in names if n in vars(loaded.model.config))
    assert experts[1] == pytest.approx(held * chosen / count)
    assert experts[1] <= experts[4] <= experts[64] <= held * (1 + 1e-9)
    assert experts[1] < experts[64]


def test_requests_choose_different_experts(bench):
    """Expected of 8 random rows are 3.9 times as many as of one."""
    loaded = load(small_model("qwen3_moe", num_local_experts=32), device="cpu")
    experts, chosen = experts_of(loaded.model), []
    for batch in (1, 8):
        with (
            counting_experts(experts) as counted,
            bench.captured_verifier(loaded, batch, 1) as (verifier, inputs),
        ):
            verifier.runner.replay(inputs)
            chosen.append(counted())
    assert chosen[1] > 3 * chosen[0]


@pytest.mark.parametrize("start", ["gpt", "Deep", "Mamba"])
def test_shapes_are_configurations_of_transformers(bench, start):
    from transformers import AutoConfig

    [shape] = [shape for name, shape in bench.SHAPES.items() if name.startswith(start)]
    config = AutoConfig.for_model(**shape)
    assert config.num_hidden_layers == shape["num_hidden_layers"]
