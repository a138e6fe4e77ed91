"""``tools/bench/shape_targets.py``: a target whose whole step can be captured."""

from __future__ import annotations

from graphkit.spec import ForwardMode
from tools.bench.shape_targets import shape_target


def test_a_shape_has_the_whole_step():
    target = shape_target("tiny", "cpu")
    assert target.engine is not None
    with target.runner(ForwardMode.DRAFT_EXTEND_V2, device="cpu") as runner:
        runner.capture()
        assert list(runner.graphs) == [1]
