"""Tests of the search for host values that a graph captured."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.audit.capture_differences import CaptureDifference
from graphkit.audit.frozen_values.audit import audit_frozen_values
from graphkit.records import Argument, Node, Pointer
from tiny_target import log_of, logits_of, small_target


class Settings:
    def __init__(self):
        self.temperature, self.steps, self.is_greedy = 0.5, 2, True


def audited(forward, model=None, **dynamic):
    """Return the log of an audit of a forward that returns logits [T, 32]."""
    target = small_target(logits_of(forward), weights=model, host_values=dynamic)
    return log_of(audit_frozen_values, target, is_captured=False, batch_sizes=[2, 4])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Embedding(32, 32)


@pytest.fixture
def settings():
    return Settings()


def setter(settings, name):
    return lambda value: setattr(settings, name, value)


def test_a_correct_forward_has_a_certificate_and_no_finding(model):
    log = audited(lambda i: model(i.input_ids) + i.positions[:, None], model)
    assert not log.findings
    texts = [check.text for check in log.checks]
    assert texts[0].startswith("captured again: 0 differences")
    assert [text.split(":")[0] for text in texts[1:]] == [
        "changed batch contents", "changed live requests",
        "changed 0 undeclared numbers in 0 captures",
    ]  # fmt: skip
    assert all(check.mode == "TARGET_VERIFY" for check in log.checks)


def test_a_scalar_is_reported_with_its_node_and_both_values(model, settings):
    log = audited(
        lambda i: model(i.input_ids) / settings.temperature,
        model,
        temperature=(setter(settings, "temperature"), [0.5, 0.25]),
    )
    assert [finding.batch_size for finding in log.findings] == [2, 4]
    finding = log.findings[0]
    assert (finding.kind, finding.audit, finding.severity) == ("frozen value", "frozen", "error")
    assert (finding.kernel, finding.argument) == ("div", 1)
    assert (finding.before, finding.after) == ("0.5", "0.25")
    assert finding.text == (
        f"argument 1 of `div` (node {finding.node}) follows `temperature` (0.5, then 0.25): the "
        "graph captured its value."
    )
    assert "test_frozen_values.py" in finding.source
    assert finding.advice
    assert settings.temperature == 0.5


def new_weight(model, value):
    model.weight = nn.Parameter(torch.full((32, 32), value), requires_grad=False)


def new_random_weight(model, _value):
    model.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)


def new_data(model, value):
    model.weight.data = torch.full((32, 32), value)


@pytest.mark.parametrize("replace", [new_weight, new_random_weight, new_data])
def test_a_setter_that_replaces_a_weight_is_reported(model, replace):
    log = audited(
        lambda i: model(i.input_ids), model,
        version=(lambda value: replace(model, value), [1.0, 2.0]),
    )  # fmt: skip
    assert [(each.kind, each.batch_size) for each in log.findings] == [
        ("frozen value", 2), ("frozen value", 4),
    ]  # fmt: skip
    assert log.findings[0].text.startswith("argument 0 of `embedding` (node ")
    assert "follows `version` (" in log.findings[0].text
    assert log.findings[0].text.endswith("the graph captured the tensor that it replaces.")


def test_a_setter_that_writes_a_weight_in_place_or_makes_an_equal_one_is_accepted(model):
    for setter in (
        lambda value: model.weight.data.fill_(value),
        lambda _value: new_weight(model, 1.0),
    ):
        log = audited(lambda i: model(i.input_ids), model, version=(setter, [1.0, 2.0]))
        assert not log.findings


def test_one_host_value_is_changed_at_a_time(model, settings):
    log = audited(
        lambda i: model(i.input_ids) / settings.temperature,
        model,
        temperature=(setter(settings, "temperature"), [0.5, 0.25]),
        steps=(setter(settings, "steps"), [2, 3]),
    )
    counts = {check.text.split(":")[0]: check.findings for check in log.checks}
    assert counts["changed temperature"] == 2
    assert counts["changed steps"] == 0


def test_every_later_value_is_tried(model, settings):
    log = audited(
        lambda i: model(i.input_ids) / max(settings.steps, 3),
        model,
        steps=(setter(settings, "steps"), [2, 3, 4]),
    )
    assert [finding.after for finding in log.findings] == ["4", "4"]


def test_a_branch_is_reported_as_a_different_kernel(model, settings):
    def forward(i):
        logits = model(i.input_ids)
        return logits.relu() if settings.is_greedy else logits.sigmoid()

    log = audited(forward, model, greedy=(setter(settings, "is_greedy"), [True, False]))
    assert {(f.before, f.after) for f in log.findings} == {("relu", "sigmoid")}
    assert log.findings[0].text.endswith(
        "follows `greedy` (relu for True, then sigmoid for False): the graph captured one case."
    )
    assert "torch.where" in log.findings[0].advice


def test_a_loop_is_reported_as_a_different_number_of_nodes(model, settings):
    def forward(i):
        logits = model(i.input_ids)
        for _ in range(settings.steps):
            logits = logits + 1
        return logits

    log = audited(forward, model, steps=(setter(settings, "steps"), [2, 3]))
    assert all(f.text.startswith("the number of nodes follows `steps` (") for f in log.findings)
    assert len(log.findings) == 2


def test_nodes_after_one_that_only_one_capture_has_are_not_reported(model, settings):
    def forward(i):
        logits = model(i.input_ids)
        return (logits.relu() if settings.is_greedy else logits).exp().neg()

    log = audited(forward, model, greedy=(setter(settings, "is_greedy"), [True, False]))
    assert [(f.before, f.after) for f in log.findings] == [("relu", "exp")] * 2


@pytest.mark.parametrize("values", [[], [0.5]])
def test_a_host_value_without_a_second_value_is_refused(model, settings, values):
    with pytest.raises(gk.TargetError, match=r"host_values\['heat'\] is .* Pass two or more"):
        audited(lambda i: model(i.input_ids), model, heat=(setter(settings, "temperature"), values))


def test_values_are_shown_without_addresses(model, settings):
    def forward(i):
        return model(i.input_ids) / settings.temperature.steps

    values = [Settings(), Settings()]
    values[1].steps = 3
    log = audited(forward, model, settings=(setter(settings, "temperature"), values))
    assert "(2 for <" in log.findings[0].text
    assert "object>, then 3 for <" in log.findings[0].text
    assert "captured a value derived from it" in log.findings[0].text
    assert "0x" not in log.findings[0].text


def test_a_value_in_many_nodes_is_one_finding(model, settings):
    def forward(i):
        logits = model(i.input_ids)
        for _ in range(3):
            logits = logits * settings.temperature
        return logits

    log = audited(forward, model, temperature=(setter(settings, "temperature"), [0.5, 0.25]))
    assert len(log.findings) == 2
    assert log.findings[0].text.endswith(" The same holds for 2 more nodes.")


def test_a_tensor_that_is_written_in_place_is_not_reported(model):
    scale = torch.full((1,), 0.5)
    log = audited(lambda i: model(i.input_ids) * scale, model, scale=(scale.fill_, [0.5, 0.25]))
    assert not log.findings


def test_a_tensor_made_on_the_host_is_reported_by_its_content(model, settings):
    log = audited(
        lambda i: model(i.input_ids) * torch.tensor([settings.temperature]),
        model,
        temperature=(setter(settings, "temperature"), [0.5, 0.25]),
    )
    assert len(log.findings) == 2


def test_a_capture_that_reads_a_counter_is_not_deterministic(model):
    counter = itertools.count()
    log = audited(lambda i: model(i.input_ids) * next(counter), model)
    kinds = {finding.kind for finding in log.findings}
    assert "capture is not deterministic" in kinds
    assert re.match(
        r"two captures of the same step differ in 1 place, first in argument 1 of `mul` "
        r"\(node \d+\) \(\d+, then \d+\)\.$",
        log.findings[0].text,
    )
    assert log.checks[0].findings == 2


def test_a_change_is_undone_when_a_capture_fails(model, settings):
    def forward(i):
        if settings.temperature < 0.5:
            raise RuntimeError("too cold")
        return model(i.input_ids)

    with pytest.raises(gk.CaptureError):
        audited(forward, model, temperature=(setter(settings, "temperature"), [0.5, 0.25]))
    assert settings.temperature == 0.5


def scaled_data(model):
    model.weight.data = model.weight.data * 1.0001


def scaled_parameter(model):
    model.weight = nn.Parameter(model.weight * 1.0001, requires_grad=False)


REASSIGNED = pytest.mark.parametrize("reassign", [scaled_data, scaled_parameter])


def found_in(forward, model, **dynamic):
    """Return the findings of the audits that name frozen values and freed memory."""
    target = small_target(logits_of(forward), weights=model, host_values=dynamic)
    audits = ["frozen", "warmup", "pointers"]
    return audit_target(target, only=audits, batch_sizes=[2, 4], device="cpu").findings


def errors_of(findings):
    """Return kind and kernel of the errors, without tensors that each call leaves."""
    errors = [each for each in findings if each.severity == "error" and each.audit != "warmup"]
    return [(each.kind, each.kernel) for each in errors]


@REASSIGNED
def test_a_weight_that_each_call_reassigns_follows_no_change_of_the_host(model, settings, reassign):
    def reads_new(i):
        reassign(model)
        return model(i.input_ids)

    def reads_old(i):
        weight = model.weight
        reassign(model)
        return nn.functional.embedding(i.input_ids, weight)

    for forward in (reads_new, reads_old):
        heat = (setter(settings, "temperature"), [0.5, 0.25])
        findings = found_in(forward, model, heat=heat)
        assert {kind for kind, _ in errors_of(findings)} == {"freed memory"}
        assert not [each for each in findings if each.audit == "frozen"]


@REASSIGNED
def test_a_frozen_number_is_found_beside_a_weight_that_each_call_reassigns(
    model, settings, reassign
):
    def forward(i):
        reassign(model)
        return model(i.input_ids) / settings.temperature + settings.steps

    heat = (setter(settings, "temperature"), [0.5, 0.25])
    findings = found_in(forward, model, heat=heat)
    assert errors_of(findings) == [("frozen value", "div"), ("freed memory", "mul")]
    assert "follows `heat` (0.5, then 0.25)" in findings[0].text
    (note,) = (each for each in findings if (each.audit, each.severity) == ("frozen", "note"))
    assert (note.kind, note.kernel, note.before) == ("frozen value", "add", "2")


@REASSIGNED
def test_a_counter_is_found_beside_a_weight_that_each_call_reassigns(model, reassign):
    counter = itertools.count()

    def forward(i):
        reassign(model)
        return model(i.input_ids) * next(counter)

    findings = found_in(forward, model)
    kinds = [kind for kind, _ in errors_of(findings)]
    assert kinds == ["capture is not deterministic", "freed memory"]
    assert re.search(r" 1 place, first in .* \(\d+, then \d+\)\.$", findings[0].text)
    assert findings[0].batch_sizes == (2, 4)


@pytest.mark.parametrize(("offset", "expected"), [(4, False), (8, True), (12, True), (16, False)])
def test_an_address_of_freed_memory_in_a_struct_is_told_from_numbers(offset, expected):
    """Captures on CUDA compare it as bytes, since what was freed has no contents."""
    pointer = Pointer(address=1 << 41, memory="freed", name="freed block", offset=8)
    argument = Argument(size=24, kind="struct", text="", pointers=(pointer,))
    node = Node(index=0, kind="kernel", name="add", short_name="add", arguments=(argument,))
    assert CaptureDifference(0, "argument", "1", "2", 0, offset).is_address([node]) is expected


def test_a_weight_that_each_call_makes_of_a_host_value_follows_it(model, settings):
    def forward(i):
        model.weight = nn.Parameter(torch.tensor([settings.temperature]), requires_grad=False)
        return i.input_ids[:, None] * model.weight.expand(32)

    heat = (setter(settings, "temperature"), [0.5, 0.25])
    assert ("frozen value", "mul") in errors_of(found_in(forward, model, heat=heat))
