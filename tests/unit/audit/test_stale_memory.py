"""Tests of the search for pool memory that a replay reads before it writes it."""

from __future__ import annotations

import re

import pytest
import torch

import graphkit as gk
from graphkit.audit import AuditLog, audit_target
from graphkit.audit.stale_memory.runner_graph import audit_stale_memory
from graphkit.errors import TargetError
from tiny_target import (
    REQUESTS,
    VERIFY,
    VOCAB,
    WIDTH,
    TinyLayers,
    bytes_of,
    check_failed_audits,
    sample_batch,
    target_of,
)

HIDDEN = 8
KIND = "stale pool memory"


class Tiny(TinyLayers):
    """Calls ``mix(model, hidden, inputs)`` between its two layers."""

    def __init__(self, mix):
        super().__init__(HIDDEN, "cpu")
        self.mix = mix

    def forward(self, inputs):
        self.calls += 1
        hidden = self.mix(self, self.embedding(inputs.input_ids), inputs)
        return gk.ForwardOutput(next_token_logits=self.head(hidden))


@pytest.fixture
def captured():
    """Return ``captured(mix, prepare, **facts)``: target, model and captured runner.

    ``prepare(model)`` runs after the capture, as the host does between replays.
    """
    runners = []

    def make(mix, prepare=lambda _model: None, **facts):
        model = Tiny(mix)
        target = target_of(model, **facts)
        runner = target.runner(VERIFY, device="cpu")
        runners.append(runner)
        runner.capture(attribution=gk.Attribution(model))
        prepare(model)
        return target, model, runner

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def audited(captured):
    """Return ``audited(mix, ...)``: the log of an audit; arguments as for ``captured``."""

    def audit(*args, **facts):
        target, _, runner = captured(*args, **facts)
        log = AuditLog()
        audit_stale_memory(target, runner, log)
        return log

    return audit


def kept(model, name, shape, **facts):
    """Allocate a tensor that the model keeps, as a forward does that leaves filling to the host."""
    model.kept[name] = torch.empty(shape, **facts)
    return model.kept[name]


def with_bias(model, hidden, _inputs):
    return hidden + kept(model, "bias", HIDDEN)


def masked(_model, hidden, _inputs):
    return hidden + torch.empty(HIDDEN) * torch.zeros(HIDDEN)


def in_a_large_tensor(model, hidden, _inputs):
    table = kept(model, "table", (1000, HIDDEN))
    table[:700] = 0
    return hidden + table[700]


def with_a_partial_write(model, hidden, _inputs):
    rows = kept(model, "rows", (2, HIDDEN))
    rows.index_fill_(0, torch.ones(1, dtype=torch.int64), 5.0)  # writes row 1, reads none
    return hidden * rows[0]


def fill(value):
    def prepare(model):
        for tensor in model.kept.values():
            tensor.fill_(value)

    return prepare


FOUND = {
    "a bias": (with_bias, fill(0.5), "add", "zeros"),
    "a bias of zeros": (with_bias, fill(0), "add", "other numbers"),
    # Unset memory may hold NaN: zeros show it then.
    "numbers behind a mask": (masked, fill(0), "mul", "(NaN|zeros)"),
    "a row of a large tensor": (in_a_large_tensor, fill(0.5), "add", "zeros"),
    "a tensor that is written in part": (with_a_partial_write, fill(2.0), "mul", "zeros"),
}
"""Mix, what the host writes, the operation that reads, and the content that shows it."""


@pytest.mark.parametrize(("mix", "prepare", "op", "content"), FOUND.values(), ids=FOUND)
def test_a_planted_read_is_found_with_its_operation_and_line(audited, mix, prepare, op, content):
    (finding,) = audited(mix, prepare).findings
    assert (finding.audit, finding.kind, finding.severity) == ("pool-poison", KIND, "error")
    assert (finding.kernel, finding.module) == (op, "Tiny")
    assert finding.source.startswith("audit/test_stale_memory.py:")
    assert finding.source.endswith(f"in {mix.__name__}")
    assert f"of `{op}` (node {finding.node}) reads memory of the graph pool before" in finding.text
    row = re.escape("row 0 of next_token_logits (request 0 of 4)")
    assert re.search(f"With {content} there, {row} is", finding.text)
    assert "allocated by `empty` at audit/test_stale_memory.py:" in finding.text
    assert (finding.field, finding.row, finding.request) == ("next_token_logits", 0, 0)
    assert finding.before != finding.after


def test_a_finding_names_the_live_object_that_holds_the_memory(audited):
    (finding,) = audited(with_bias, fill(0.5)).findings
    assert finding.names == ("Tiny.kept['bias']",)
    assert "any node writes it: `Tiny.kept['bias']`, allocated by `empty`" in finding.text
    (finding,) = audited(masked).findings
    assert finding.names == ()


def test_the_sizes_that_share_a_cause_share_a_finding():
    for mix in (masked, with_bias):  # of the latter, Python holds the tensor of one size only
        target = target_of(Tiny(mix), batch_sizes=[2, REQUESTS])
        (finding,) = audit_target(target, device="cpu", only=["pool-poison"]).findings
        assert (finding.kind, finding.batch_sizes) == (KIND, (2, REQUESTS))
    assert finding.names == ("Tiny.kept['bias']",)


def test_a_large_tensor_is_one_finding(audited):
    def mix(model, hidden, _inputs):
        return hidden + kept(model, "rows", (400, *hidden.shape)).sum(0)

    assert len(audited(mix, fill(0.5)).findings) == 1


TABLES = {
    "numbers": (lambda: torch.arange(HIDDEN) + 0.5, lambda x, table: x + table, "add", "row 0 of"),
    "indices": (lambda: torch.arange(HIDDEN), lambda x, table: x[:, table], "index", "row 0 of"),
    "counts": (
        lambda: torch.ones(HIDDEN, dtype=torch.int64),
        lambda x, table: x.repeat_interleave(table, 1, output_size=HIDDEN),
        "repeat_interleave",
        "the replay fails: ",
    ),
}
"""What makes a table and what uses it, the operation that reads it first, and the effect."""


@pytest.mark.parametrize(("make", "use", "op", "effect"), TABLES.values(), ids=TABLES)
def test_a_table_that_the_graph_of_another_size_computes_is_found(audited, make, use, op, effect):
    def mix(model, hidden, _inputs):
        if model.calls == 2:  # the first capture
            model.kept["table"] = make()
        return use(hidden, model.kept["table"]) if model.kept else hidden

    (finding,) = audited(mix, batch_sizes=[2, REQUESTS]).findings
    assert (finding.batch_size, finding.kernel) == (2, op)
    assert "any node writes it: `Tiny.kept['table']`, allocated by `" in finding.text
    assert f"With zeros there, {effect}" in finding.text


def test_two_causes_are_two_findings(audited):
    def mix(model, hidden, inputs):
        return with_bias(model, hidden, inputs) * kept(model, "scale", HIDDEN)

    findings = audited(mix, fill(0.5)).findings
    assert {(each.kernel, each.names) for each in findings} == {
        ("add", ("Tiny.kept['bias']",)),
        ("mul", ("Tiny.kept['scale']",)),
    }
    assert len({each.cause for each in findings}) == 2


def test_memory_that_only_state_depends_on_is_found(audited):
    def mix(model, hidden, inputs):
        model.cache.index_copy_(0, inputs.out_cache_loc, hidden + kept(model, "bias", HIDDEN))
        return hidden

    (finding,) = audited(mix, fill(0.5)).findings
    assert (finding.kernel, finding.field) == ("add", "cache")
    assert finding.text.endswith("With zeros there, the state `cache` differs.")


def test_reserved_rows_of_state_are_not_compared(audited):
    def mix(model, hidden, _inputs):
        model.cache[0] = kept(model, "bias", HIDDEN)
        return hidden

    assert audited(mix, fill(0.5)).findings == []


# What is no finding.


def test_state_and_random_numbers_that_a_step_advances_are_no_finding(captured):
    def mix(model, hidden, _inputs):
        model.cache[5] += torch.rand(HIDDEN)
        return hidden + model.cache[5]

    target, _, runner = captured(mix)
    audit_stale_memory(target, runner, log := AuditLog())
    assert log.findings == []
    assert log.checks[0].text.startswith("overwrote ")
    assert runner.stats.replays == 4 * len(runner.graphs), "as it is, and one per content"


@pytest.mark.parametrize("declared", ["mapping", "function"])
def test_declared_persistent_tensors_are_no_finding(captured, declared):
    def prepare(model):
        model.kept["bias"].fill_(0.5)

    persistent_tensors = {}
    _, model, runner = captured(with_bias, prepare)
    persistent_tensors.update(model.kept)
    facts = {"mapping": persistent_tensors, "function": lambda: model.kept}
    log = AuditLog()
    audit_stale_memory(target_of(model, persistent_tensors=facts[declared]), runner, log)
    assert log.findings == []


def test_a_mapping_of_persistent_tensors_may_be_filled_later():
    def mix(model, hidden, _inputs):
        if model.calls == 2:  # the first capture
            model.kept["table"] = torch.arange(HIDDEN) + 0.5
        return hidden + model.kept["table"] if model.kept else hidden

    model = Tiny(mix)
    target = target_of(model, persistent_tensors=model.kept, batch_sizes=[2, REQUESTS])
    assert target.resolved_persistent_tensors() == {}
    only = ["pool-poison", "pointers"]
    findings = audit_target(target, device="cpu", only=only).findings
    assert {each.kind for each in findings} == {"dead input"}
    assert [*target.resolved_persistent_tensors()] == ["table"]


@pytest.mark.parametrize("value", [5, {"bias": 0.5}, ["bias"]], ids=repr)
def test_persistent_tensors_that_are_no_tensors_are_refused(value):
    target = target_of(Tiny(with_bias), persistent_tensors=lambda: value)
    with pytest.raises(
        TargetError, match=r"persistent_tensors is .* Pass tensors by name, or a function"
    ):
        audit_target(target, device="cpu", only=["pool-poison"])


def test_declared_weights_and_state_are_no_finding(captured):
    _, model, runner = captured(with_bias, fill(0.5))
    log = AuditLog()
    audit_stale_memory(target_of(model, weights=model.kept), runner, log)
    assert log.findings == []


def test_outputs_are_not_overwritten():
    def forward(inputs):
        hidden = torch.empty(inputs.num_tokens, HIDDEN)  # the host writes it
        return gk.ForwardOutput(next_token_logits=hidden @ torch.ones(HIDDEN, VOCAB),
                                hidden_states=hidden)  # fmt: skip

    target = target_of(Tiny(masked), forwards={VERIFY: forward})
    log = AuditLog()
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture(attribution=gk.Attribution())
        runner.replay(sample_batch(VERIFY, REQUESTS, 0)).hidden_states.fill_(3.0)
        audit_stale_memory(target, runner, log)
        hidden = runner.replay(sample_batch(VERIFY, REQUESTS, 0)).hidden_states
        assert (hidden == 3.0).all()
    assert log.findings == []


def test_without_attribution_memory_is_overwritten_with_zeros_alone():
    model = Tiny(with_bias)
    target = target_of(model)
    for value, count in ((0.5, 1), (0.0, 0)):
        log = AuditLog()
        with target.runner(VERIFY, device="cpu") as runner:
            runner.capture()
            fill(value)(model)
            audit_stale_memory(target, runner, log)
        assert len(log.findings) == count
        assert all("allocated by" not in each.text for each in log.findings)


@torch.library.custom_op("stale_memory_test::noise", mutates_args=())
def noise(rows: torch.Tensor) -> torch.Tensor:
    """Return other numbers at each call."""
    return rows + torch.rand(len(rows), 1, generator=_noise)


_noise = torch.Generator().manual_seed(0)


def test_a_nondeterministic_step_is_not_judged(audited):
    log = audited(lambda _model, hidden, _inputs: noise(hidden))
    assert log.findings == []
    assert [check.text for check in log.checks] == [
        "not judged: replays of the same batch differ, although memory is equal"
    ]


def test_a_graph_without_memory_of_its_own():
    def forward(inputs):
        return gk.ForwardOutput(next_token_logits=logits[: inputs.num_tokens])

    logits = torch.zeros(REQUESTS * WIDTH, VOCAB)
    target = target_of(Tiny(masked), forwards={VERIFY: forward}, weights={"logits": logits})
    (check,) = audit_target(target, device="cpu", only=["pool-poison"]).checks
    assert check.text == "the graph pool has no memory besides outputs and declared tensors"


# Memory, state and the runner after an audit.


@pytest.mark.parametrize("mix", [with_bias, masked, lambda _model, hidden, _inputs: hidden + 1])
def test_memory_state_and_random_numbers_are_restored(captured, mix):
    target, model, runner = captured(mix, fill(0.5), batch_sizes=[2, REQUESTS])
    # As bytes: memory that was never written may hold NaN, which does not equal itself.
    logits = runner.replay(sample_batch(VERIFY, REQUESTS, 0)).next_token_logits.view(torch.uint8)
    before = bytes_of(runner), model.cache.clone(), torch.get_rng_state(), logits.clone()
    audit_stale_memory(target, runner, AuditLog())
    after = bytes_of(runner), model.cache, torch.get_rng_state(), logits
    assert all(map(torch.equal, before, after))


def test_a_failed_audit_restores_memory_and_leaves_the_runner_usable(captured, monkeypatch):
    target, _, runner = captured(with_bias, fill(0.5))
    check_failed_audits(target, runner, monkeypatch)
