"""``tools/bench/random_replays.py``: what it counts, and that it finds and names wrong replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphkit as gk
from graphkit.records import BenchReport
from graphkit.runners import RUNNERS
from small_targets import llama_target


def tiny_target(topk, most):
    target = llama_target(topk=topk, max_batch_size=most)
    return replace(target, batch_sizes=(2,))


@pytest.fixture
def cases(bench):
    """Two batches of each live size of a small step, at the captured sizes 2 and 4."""
    target = bench.with_declared_step(tiny_target(1, 4))
    mode = gk.ForwardMode.STEP
    with replace(target, forwards={mode: target.forwards[mode]}).runner(mode, device="cpu") as made:
        made.capture()
        yield [bench.case_of(target, made, live, seed) for live in range(1, 5) for seed in (0, 1)]


@pytest.mark.slow
def test_all_modes_replay_in_all_ways(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "reference_target", lambda _device, topk: tiny_target(topk, 2))
    monkeypatch.setattr(bench, "READ_EVERY", 32)
    out = tmp_path / "replays.json"
    arguments = ["--replays", "100", "--batches", "3", "--device", "cpu", "--out", str(out)]
    assert bench.main(arguments) == 0
    report = BenchReport.from_json(out.read_text())
    counts = {measure.name: measure.value for measure in report.measures}
    assert (counts["mismatches"], counts["fallbacks"]) == (0, 0)
    modes = [f"replays: {mode.name} {kind}" for kind in ("chain", "tree") for mode in RUNNERS]
    ways, sizes = (
        [f"replays: {each}" for each in group]
        for group in (bench.WAYS, (f"{live} live" for live in range(1, 3)))
    )
    for group in (modes, ways, sizes):
        assert sum(counts[name] for name in group) == 100
        assert min(counts[name] for name in group) > 0
    assert "mismatches" in capsys.readouterr().out


def test_every_replay_with_a_wrong_output_is_named(bench, cases, monkeypatch):
    """One runner alone replays in the order of its turns, staged batches too."""
    monkeypatch.setattr(bench, "READ_EVERY", 16)
    wrong = [case for case in cases if "seed 1" in case.name]
    for case in wrong:
        case.expected["best"].view(torch.uint8)[-1] ^= 1  # the lowest bit of one number
    found = bench.replay_randomly(cases, 100, seed=2)
    assert found.mismatches == [
        f"replay {number}, {way}: {case.name}: best"
        for number, (case, way) in enumerate(bench.turns(cases, 100, 2))
        if case in wrong
    ]
    assert wrong[2].name == "STEP chain, 3 live at 4, seed 1 (CPU tensors)"
    assert len(found.mismatches) > 30


def test_a_wrong_graph_is_found_at_its_size(bench, cases):
    graph = cases[0].runner.graphs[2]
    graph.ops = graph.ops[:-1]  # the output keeps the values of an earlier replay
    found = bench.replay_randomly(cases, 60, seed=0)
    assert found.mismatches
    assert all(" live at 2, " in text for text in found.mismatches)


def test_the_replays_of_a_seed_are_the_same(bench, cases):
    one, same, other = (list(bench.turns(cases, 50, seed)) for seed in (3, 3, 4))
    assert one == same != other


def test_numbers_are_compared_by_their_bits(bench):
    from compared_replays import bits

    rows = torch.tensor([torch.nan, 0.0])
    assert torch.equal(bits(rows), bits(rows.clone()))
    assert not torch.equal(bits(rows), bits(torch.tensor([torch.nan, -0.0])))
