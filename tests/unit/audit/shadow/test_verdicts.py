"""The shadow watch distinguishes wrong graphs, wrong padding and nondeterministic steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit import ShadowWatch
from graphkit.audit.shadow import watch as watch_module

VOCAB = 32
HIDDEN = 8
GRAPH = "graph bug"
PADDING, SIZE = "leaking pad row", "dependence on the batch size"
NONDETERMINISTIC = "nondeterministic step"


def test_a_leak_is_named_as_the_audit_of_pads_names_it(capture, batch_of, watched):
    runner, _ = capture(lambda model, hidden, inputs: hidden + hidden.mean(0))
    watch = watched(runner, [batch_of(4), batch_of(3), batch_of(3, 1)])
    (finding,) = watch.findings  # one per size and field
    assert (finding.kind, finding.batch_size, finding.row) == (PADDING, 4, 0)
    distance = finding.text.rpartition("(")[2].partition(" ulp")[0]
    assert finding.text == (
        f"row 0 of next_token_logits (request 0 of 3) is {finding.after} with pads and "
        f"{finding.before} without them ({distance} ulp of float32). The first node that differs "
        "is `mean`."
    )
    assert finding.source.endswith("in <lambda>")
    assert float(distance) > 1000
    assert "over the batch" in finding.advice


@pytest.mark.parametrize(("tolerance", "is_found"), [(1.0, True), (16.0, False)])
def test_the_tolerance_multiplies_the_usual_rounding(
    capture, batch_of, watched, tolerance, is_found
):
    """The step rounds by some 1000 ulp between 16 and 12 rows; 256 are allowed."""
    runner, _ = capture(lambda model, hidden, inputs: hidden * (1 + 5e-5 * len(hidden)))
    found = watched(runner, [batch_of(3)], tolerance=tolerance).findings
    assert [each.kind for each in found] == ([SIZE] if is_found else [])


def test_near_ties_are_no_padding_bug(capture):
    """One token is more probable by one rounding; which one depends on the batch size."""

    def tied(inputs):
        logits = torch.zeros(inputs.num_tokens, VOCAB)
        logits[:, inputs.batch_size :: 7] += torch.finfo(torch.float32).eps
        return gk.ForwardOutput(next_token_logits=logits, hidden_states=logits[:, :HIDDEN].clone())

    with gk.DraftRunner(
        tied, spec=gk.SpecConfig("EAGLE", 3, 1, 4), batch_sizes=[4], device="cpu",
        sizes=gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32),
    ) as runner:  # fmt: skip
        runner.capture()
        with ShadowWatch(runner, every=1) as watch:
            for live in (1, 2, 3):
                runner.replay(
                    gk.DraftInputs(
                        req_pool_indices=np.arange(1, live + 1),
                        seq_lens=np.full(live, 5),
                        topk_p=np.full((live, 1), 0.5, dtype=np.float32),
                        topk_index=np.full((live, 1), 3),
                        hidden_states=torch.zeros(live, HIDDEN),
                        positions=np.full(live, 5),
                        out_cache_loc=np.arange(1, live * 3 + 1),
                    )
                )
    assert (watch.findings, watch.compared) == ([], 3)


def test_both_bugs_are_reported(capture, batch_of, watched):
    runner, model = capture(lambda model, hidden, inputs: (hidden + hidden.mean(0)) * model.scale)
    model.scale = 3.0
    watch = watched(runner, [batch_of(3)])
    assert sorted(finding.kind for finding in watch.findings) == [GRAPH, PADDING]


@pytest.mark.usefixtures("unseen_numbers")
def test_state_that_the_graph_writes_elsewhere(capture, batch_of, watched):
    """A write to a constant row; the output is right."""

    def mix(model, hidden, inputs):
        model.cache.narrow(0, model.place, 4).copy_(hidden[:4])
        return hidden

    runner, model = capture(mix)
    model.place = 21
    watch = watched(runner, [batch_of(1)], bisect=True)
    (finding,) = watch.findings
    assert (finding.kind, finding.field) == (GRAPH, "cache")
    assert finding.text.startswith(
        "the graph leaves different values in `cache` than the same step without a graph "
        "(1 live request)."
    )
    assert finding.text.endswith(
        f"argument 0 of `copy_` (node {finding.node}): it is float32 [4, 8] at cache+0x2a0; in "
        "the graph it is float32 [4, 8] at cache+0x280."
    )


def test_reserved_slots_are_not_compared(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        model.cache[0].fill_(model.place)
        return hidden

    runner, model = capture(mix)
    model.place = 21
    assert watched(runner, [batch_of(1)]).findings == []


def test_nondeterministic_state_is_no_graph_bug(capture, batch_of, watched):
    turns = itertools.count()

    def mix(model, hidden, inputs):
        model.cache[5].fill_(next(turns))
        return hidden

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(1)]).findings == []


def test_a_step_that_counts_on_the_host_is_compared_from_the_same_count(capture, batch_of, watched):
    def mix(model, hidden, inputs):
        model.cache[0].fill_(model.steps)
        return hidden * (2 if model.steps == 5 else 1)

    runner, _ = capture(mix)
    assert watched(runner, [batch_of(3)]).findings[0].kind == GRAPH  # not nondeterministic


def test_a_step_that_differs_at_every_run(capture, batch_of, watched):
    turns = itertools.count()
    runner, _ = capture(lambda model, hidden, inputs: hidden + next(turns))
    (finding,) = watched(runner, [batch_of(4), batch_of(3)]).findings
    assert finding.kind == NONDETERMINISTIC
    assert finding.text.startswith("row 0 of next_token_logits (request 0 of 4) is ")


def test_the_cause_is_searched_once_and_its_failure_hides_nothing(
    capture, batch_of, watched, monkeypatch
):
    searched = []

    def fail(*runs):
        searched.append(runs)
        raise ValueError("no memory")

    monkeypatch.setattr(watch_module, "padding_cause", fail)
    runner, _ = capture(lambda model, hidden, inputs: hidden + hidden.mean(0))
    (finding,) = watched(runner, [batch_of(3), batch_of(3, 1), batch_of(2)]).findings
    assert (finding.kind, len(searched)) == (PADDING, 1)
    assert finding.text.endswith("The search for the node failed: ValueError: no memory")


def rounding(turns):
    """Return a ``mix`` that adds the rounding of a sum in changing order."""
    return lambda model, hidden, inputs: hidden * model.scale + 1e-7 * next(turns)


def test_a_step_that_rounds_differently_every_time_gets_a_note(capture, batch_of, watched):
    runner, _ = capture(rounding(itertools.cycle(range(5))))
    (finding,) = watched(runner, [batch_of(4)]).findings
    assert (finding.kind, finding.severity) == ("nondeterministic rounding", "note")
    assert finding.before != finding.after
    assert " in a repeated run without a graph and " in finding.text


def test_a_graph_that_differs_beyond_a_nondeterministic_step_is_wrong(capture, batch_of, watched):
    runner, model = capture(rounding(itertools.cycle(range(5))))
    model.scale = 2.0
    assert GRAPH in {finding.kind for finding in watched(runner, [batch_of(4)]).findings}
