"""``tools/bench/scale.py``: engines of growing work take turns, and a bar judges them."""

from __future__ import annotations

import torch


def test_engines_serve_all_requests_and_are_judged(bench, monkeypatch):
    small, large = bench.Work(2, 0, 96, 400), bench.Work(3, 5, 128, 800, 4)
    monkeypatch.setattr(bench, "GENERATIONS", ("v2", "v3"))
    monkeypatch.setattr(bench, "COMPARISONS", {"waiting": (small, large)})
    monkeypatch.setattr(bench, "NEW", 6)
    monkeypatch.setattr(bench, "PROMPTS", (20, 40))
    served, serve = [], bench.serve

    def noted(engine):
        served.append((engine.generation, engine.memory.total_slots))
        before = engine.stats
        time = serve(engine)
        after, running = engine.stats, engine.sizes.max_batch_size
        assert after.new_tokens - before.new_tokens >= 6 * (bench.PER_ROUND - 1) * running
        assert after.waiting + after.running <= before.waiting
        return time

    monkeypatch.setattr(bench, "serve", noted)
    with torch.no_grad():
        measures = list(bench.measures(2))
    assert served[:6] == [("v2", slots) for slots in (400, 800, 800, 400, 400, 800)]
    times = {each.setting for each in measures if each.bar is None}
    assert times == {"v2: waiting", "v3: waiting", "queue", "prompt"}
    judged = [each for each in measures if each.bar is not None]
    assert [each.bar for each in judged] == [1.3] * 4
    assert judged[0].name == f"v2: waiting: {large}, over the first"
    assert str(large) == "3 running, 5 waiting, context 128, 800 slots in pages of 4"
    by_name = {(each.setting, each.variant): each.value for each in measures}
    assert judged[-1].value == by_name["prompt", "40 tokens"] / by_name["prompt", "20 tokens"]
