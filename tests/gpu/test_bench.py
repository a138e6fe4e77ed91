"""``graphkit bench`` on a GPU: the columns and the bound that the recorder does not have."""

from __future__ import annotations

import pytest

from graphkit.cli import main
from graphkit.records import BenchReport

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [(), ("--topk", "2"), ("--algorithm", "NONE"), ("--algorithm", "EAGLE3", "--num-steps", "5")],
    ids=str,
)
def test_a_shape_with_random_weights(capsys, options):
    arguments = (
        "bench --shape tiny --device cuda --steps 4 --rounds 1 --context 128 --batch-sizes 1,3 "
        "--steps-per-launch 1,4 --json"
    )
    assert main([*arguments.split(), *options]) == 0
    report = BenchReport.from_json(capsys.readouterr().out)
    values = {(each.setting, each.variant, each.name): each.value for each in report.measures}
    for setting in ("batch 1", "batch 3"):
        bare, bound = values[setting, "", "bare step"], "weights at the copy bandwidth"
        assert values[setting, "loop of 4", "GPU busy"] > 0
        assert values[setting, "", "bare step over that"] == bare / values[setting, "", bound] > 1
        assert values[setting, "", "copy bandwidth"] > 100
        assert 0 < values[setting, "", "own nodes"] < values[setting, "", "nodes"]
