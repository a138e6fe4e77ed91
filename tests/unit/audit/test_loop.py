"""The audit of device loops: values that a graph keeps, and work of the host that a loop lacks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import graphkit as gk
from graphkit.audit.loop import audit_loop
from graphkit.errors import ConfigError, InputError, ReplayError

BENCH = Path(__file__).parents[3] / "tools" / "bench"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("table_model")


@pytest.fixture
def runner_of(model, device):
    """``runner_of(drafter_type, topk)``: a captured runner of the table's step."""
    runners = []

    def create(drafter_type=None, topk=1):
        runner = model.table_runner(
            model.Table(device),
            topk,
            rows=3,
            batch_sizes=[1, 3],
            ring_entries=8,
            drafter_type=drafter_type or model.ErringDrafter,
        )
        runners.append(runner)
        runner.capture()
        return runner

    yield create
    for runner in runners:
        runner.close()


REQUESTS = {
    1: ([5, 6, 7], gk.SamplingParams(max_new_tokens=20)),
    3: ([9], gk.SamplingParams(max_new_tokens=4)),
    2: ([8] * 9, gk.SamplingParams(max_new_tokens=11, temperature=0.7, seed=3)),
}


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_equal_steps_have_no_finding(runner_of, topk):
    runner = runner_of(topk=topk)
    assert audit_loop(runner, REQUESTS, steps=12) == ()
    assert runner.state.remaining.tolist() == [0] * 4, "the rows are released"


def erring_at(model, is_wrong):
    """Return a drafter of chains that are right, or wrong by ``is_wrong(drafter, rows)``."""

    class Drafter(model.ErringDrafter):
        calls = 0

        def prepare(self, context):
            self.turn = torch.zeros(context.future_map.max_running_requests + 1).to(context.device)

        def prefill(self, chunk):
            self.turn[chunk.req_pool_indices] = 0.0

        def draft(self, rows, seq_lens, bonus):
            tree = super().draft(rows, seq_lens, bonus)
            tokens = tree.draft_tokens.view(len(rows), -1)
            right = self._ahead[seq_lens % model.PERIOD, bonus]
            tokens[:, 1:] = (right + is_wrong(self, rows)) % model.VOCAB
            return tree

    return Drafter


def host_counter(drafter, _rows):
    drafter.calls += 1
    return drafter.calls % 3


def replaced_tensor(drafter, rows):
    drafter.turn = drafter.turn + 1
    return drafter.turn[rows, None].long() % 3


def tensor_in_place(drafter, rows):
    drafter.turn[rows] += 1
    return drafter.turn[rows, None].long() % 3


def test_state_that_advances_on_the_device_has_no_finding(runner_of, model):
    assert audit_loop(runner_of(erring_at(model, tensor_in_place)), REQUESTS) == ()


@pytest.mark.parametrize(("is_wrong", "name"), [(host_counter, "calls"), (replaced_tensor, "turn")])
def test_a_value_that_a_graph_keeps_is_named(runner_of, model, is_wrong, name):
    runner = runner_of(erring_at(model, is_wrong))
    before = getattr(runner.spec_step.drafter, name)
    (finding,) = audit_loop(runner, REQUESTS)
    assert (finding.audit, finding.kind) == ("loop", "frozen value")
    assert finding.severity == "error"
    assert f"Drafter.{name}" in finding.names
    assert f"the step changes Drafter.{name} on the host" in finding.text
    assert getattr(runner.spec_step.drafter, name) is before, "references are restored"


@pytest.mark.parametrize("wrong", [1, 4, 6])
def test_the_first_step_that_differs_is_named(runner_of, model, wrong):
    def from_a_step(drafter, _rows):
        drafter.calls += 1
        return int(drafter.calls > drafter.limit)

    drafter_type = erring_at(model, from_a_step)
    drafter_type.limit = 1000
    runner = runner_of(drafter_type)
    drafter_type.limit = runner.spec_step.drafter.calls + wrong - 1
    long = {1: ([5, 6, 7], gk.SamplingParams(max_new_tokens=40))}
    (finding,) = audit_loop(runner, long, steps=9)
    assert finding.text.startswith(f"After step {wrong} of a launch, seq_lens of row 1, ")
    assert int(finding.before) < int(finding.after), "without a graph, drafts are rejected"


def test_state_that_changes_no_token_yet_is_compared(runner_of, model):
    class Drafter(model.ErringDrafter):
        calls = 0

        def prepare(self, context):
            self.future_map = context.future_map

        def extend(self, verified):
            self.calls += 1
            rows = verified.req_pool_indices
            self.future_map.stash(rows, {"age": torch.full_like(rows, self.calls)})

        def prefill(self, chunk):
            rows = chunk.req_pool_indices
            self.future_map.stash(rows, {"age": torch.zeros_like(rows)})

    (finding,) = audit_loop(runner_of(Drafter), REQUESTS)
    ages = [f"future map age of row {row}" for row in REQUESTS]
    assert finding.names == (*ages, "Drafter.calls")
    assert finding.text.startswith("After step 1 of a launch")


def test_host_work_between_launches_is_found(runner_of, model, monkeypatch):
    def turned(drafter, _rows):
        return drafter.turn[0].long() % 3

    runner = runner_of(erring_at(model, turned))

    def with_turn(method):
        def call(*args, **options):
            runner.spec_step.drafter.turn[0] += 1
            return method(*args, **options)

        return call

    def admit(*args):
        runner.spec_step.drafter.turn[0] = 0
        return type(runner).admit(runner, *args)

    monkeypatch.setattr(runner, "run_padded", with_turn(runner.run_padded))
    monkeypatch.setattr(runner, "launch", with_turn(runner.launch))
    monkeypatch.setattr(runner, "admit", admit)
    (finding,) = audit_loop(runner, REQUESTS)
    assert finding.kind == "missing host work"
    assert finding.text.startswith("After step 3 of a launch"), "the first whose drafts are right"


def test_a_step_that_is_not_repeatable_is_no_error(runner_of, model):
    """Its state is not that of a request: no admission resets it."""

    def never_reset(drafter, _rows):
        drafter.turn[0] += 1
        return drafter.turn[0].long() % 5

    (finding,) = audit_loop(runner_of(erring_at(model, never_reset)), REQUESTS)
    assert (finding.kind, finding.severity) == ("nondeterministic step", "warning")


def test_refusals(runner_of):
    runner = runner_of()
    with pytest.raises(ConfigError, match="steps must be an int >= 1"):
        audit_loop(runner, REQUESTS, steps=0)
    with pytest.raises(InputError, match="the prompt is empty"):
        audit_loop(runner, {1: ([], gk.SamplingParams())})
    runner.close()
    with pytest.raises(ReplayError):
        audit_loop(runner, REQUESTS)
