"""``tools/bench/scale.py``: engines of small and large pools take turns, and a bar judges them."""

from __future__ import annotations

import torch

SLOTS = (400, 800)


def test_engines_serve_all_requests_and_are_judged(bench, monkeypatch):
    monkeypatch.setattr(bench, "GENERATIONS", ("v1", "v3"))
    monkeypatch.setattr(bench, "REQUESTS", (2,))
    monkeypatch.setattr(bench, "SLOTS", SLOTS)
    monkeypatch.setattr(bench, "NEW", 6)
    served, serve = [], bench.serve

    def noted(engine):
        served.append((engine.generation, engine.memory.total_slots))
        time = serve(engine)
        assert engine.stats.new_tokens == 6 * 2 * bench.PER_ROUND * served.count(served[-1])
        assert engine.memory.held_slots == 0
        return time

    monkeypatch.setattr(bench, "serve", noted)
    with torch.no_grad():
        measures = list(bench.measures(2))
    assert served[:6] == [("v1", slots) for slots in (400, 800, 800, 400, 400, 800)]
    times = {each.setting: each for each in measures if each.bar is None}
    assert set(times) == {"v1, 2 at once", "v3, 2 at once"}
    judged = [each for each in measures if each.bar is not None]
    assert [(each.name, each.bar) for each in judged] == [
        (f"{generation}, 2 at once: 800 over 400 slots", 1.3) for generation in ("v1", "v3")
    ]
    by_name = {(each.setting, each.variant): each.value for each in measures}
    small, large = (by_name["v3, 2 at once", f"{slots} slots"] for slots in SLOTS)
    assert judged[1].value == large / small
