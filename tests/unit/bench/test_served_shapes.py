"""``tools/bench/served_shapes.py``: the bytes of a step."""

from __future__ import annotations

import pytest

from graphkit.models import load
from small_models import small_model


def test_a_row_more_moves_what_is_kept_of_it(bench):
    loaded = load(small_model("mamba2"), device="cpu")
    one, four = (bench.step_bytes(loaded, 3, rows) for rows in (1, 4))
    heads, keys, values, channels, columns = 8, 8, 16, 128 + 2 * 8, 4
    kept = 4 * (keys + heads * (values + 1))
    state = 4 * columns * channels
    assert four - one == 3 * 2 * 3 * (2 * kept + state)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_a_row_more_reads_the_experts_that_it_chooses(bench, kind):
    loaded = load(small_model(kind), device="cpu")
    model = loaded.model
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    few, all_of_them = (bench.step_bytes(loaded, 1, rows) for rows in (1, 10**6))
    assert 0 < all_of_them - few < experts
    names = "num_experts", "num_local_experts", "n_routed_experts"
    count = next(getattr(model.config, name) for name in names if hasattr(model.config, name))
    share = model.config.num_experts_per_tok / count
    assert all_of_them - few == pytest.approx(experts * (1 - share))


@pytest.mark.parametrize("start", ["gpt", "Deep", "Mamba"])
def test_shapes_are_configurations_of_transformers(bench, start):
    from transformers import AutoConfig

    [shape] = [shape for name, shape in bench.SHAPES.items() if name.startswith(start)]
    config = AutoConfig.for_model(**shape)
    assert config.num_hidden_layers == shape["num_hidden_layers"]
