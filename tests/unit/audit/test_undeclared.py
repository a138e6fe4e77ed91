"""The search for host values that graphs keep and the target does not declare."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.audit.frozen_values import undeclared
from graphkit.audit.frozen_values.audit import audit_frozen_values
from graphkit.audit.frozen_values.undeclared import changed_value
from graphkit.models.reference import reference_target
from tiny_target import VOCAB, log_of, small_target

HIDDEN = 48
PENALTY = SimpleNamespace(value=1.25)
LIMIT = 7.5
scale_of_rows = 3.0


class Layer(nn.Module):
    """A layer with constants of its architecture, and a gain that a host may change."""

    def __init__(self, index):
        super().__init__()
        self.index, self.eps, self.head_dim, self.gain = index, 1e-6, HIDDEN // 2, 1.5
        self.scaling = self.head_dim**-0.5
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, hidden):
        heads = hidden.view(-1, HIDDEN // self.head_dim, self.head_dim) * self.scaling
        hidden = heads.reshape(-1, HIDDEN) @ self.weight
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps) * self.gain


class Model(nn.Module):
    """Layers, and ``mix(self, logits)``, where tests plant values."""

    def __init__(self, mix=lambda _model, logits: logits, num_layers=2, layer=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layer(index) for index in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.mix = mix
        self.temperature, self.is_greedy, self.offset, self.unread = 1.0, True, 5, 1.0
        self.adapters, self.bias = ["one", "two"], None
        self.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.embed(inputs.input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return gk.ForwardOutput(next_token_logits=self.mix(self, self.head(hidden)))


class PlainLayer(Layer):
    """A layer without a gain."""

    def forward(self, hidden):
        return hidden @ self.weight + self.eps


def target_of(model, **changes):
    weights = model if isinstance(model, nn.Module) else None
    return small_target(model, HIDDEN, weights=weights, **changes)


def audited(model, **changes):
    """Return the log of the audit ``frozen`` at sizes 2 and 4."""
    target = target_of(model, **changes)
    return log_of(audit_frozen_values, target, is_captured=False, batch_sizes=[2, 4])


def frozen(log):
    return [each for each in log.findings if each.kind == "frozen value"]


def undeclared_text(log):
    return next(each.text for each in log.checks if "undeclared" in each.text)


PLANTED = {
    "Model.temperature": lambda m, x: x / m.temperature,
    "Model.offset": lambda m, x: x + m.offset,
    "len(Model.adapters)": lambda m, x: x / len(m.adapters),
    "PENALTY.value": lambda m, x: x * PENALTY.value,
    "test_undeclared.scale_of_rows": lambda m, x: x * scale_of_rows,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_value_is_a_note_with_path_argument_and_line(name):
    model = Model(PLANTED[name], layer=PlainLayer)
    log = audited(model)
    assert [each.batch_size for each in frozen(log)] == [2, 4]
    finding = frozen(log)[0]
    assert finding.severity == "note"
    assert finding.names[0].endswith(name)
    assert finding.text == (
        f"`{finding.names[0]}` = {finding.before} is frozen in argument 1 of "
        f"`{finding.kernel}` (node {finding.node})."
    )
    assert finding.module == "Model"
    assert finding.source.startswith("audit/test_undeclared.py:")
    assert finding.advice
    assert (model.temperature, model.offset, model.adapters) == (1.0, 5, ["one", "two"])
    assert (PENALTY.value, scale_of_rows) == (1.25, 3.0)


def test_a_variable_of_a_closure():
    share, model = 0.75, Model(layer=PlainLayer)

    def forward(inputs):
        output = model(inputs)
        output.next_token_logits = output.next_token_logits * share
        return output

    (finding,) = {each.text: each for each in frozen(audited(forward))}.values()
    assert finding.names == ("forward.share",)
    assert finding.text.startswith("`forward.share` = 0.75 is frozen in argument 1 of `mul` (node ")
    assert finding.source.endswith("in forward")
    assert share == 0.75


def test_a_value_that_decides_a_branch():
    log = audited(Model(lambda m, x: x.relu() if m.is_greedy else x.sigmoid(), layer=PlainLayer))
    (finding, _) = frozen(log)
    assert finding.text.startswith("`Model.is_greedy` = True is frozen in the kernel of node ")
    assert finding.text.endswith("(relu): the graph captured one case.")
    assert (finding.before, finding.after) == ("relu", "sigmoid")


def test_a_value_that_is_derived_from_one():
    log = audited(Model(lambda m, x: x * (1 / (3 + m.temperature)), layer=PlainLayer))
    (finding, _) = frozen(log)
    assert finding.names == ("Model.temperature",)
    assert finding.text.endswith(f"argument 1 of `mul` (node {finding.node}), which is 0.25.")


def test_several_values_at_once():
    def mix(model, logits):
        logits = logits / model.temperature + model.offset
        return logits * math.sqrt(len(model.adapters)) if model.is_greedy else logits

    found = {each.names[0] for each in frozen(audited(Model(mix, layer=PlainLayer)))}
    assert found == {
        "Model.temperature", "Model.offset", "len(Model.adapters)", "Model.is_greedy",
    }  # fmt: skip


def test_a_derived_int_is_not_taken_for_another_one():
    """Both change from 2 to 1: the length less one, and an offset that no graph keeps."""

    def mix(model, logits):
        model.bias = model.offset
        return logits * (len(model.adapters) - 1)

    model = Model(mix, layer=PlainLayer)
    model.adapters, model.offset = ["one", "two", "three"], 2
    assert {each.names[0] for each in frozen(audited(model))} == {"len(Model.adapters)"}


def test_a_value_that_no_graph_keeps_is_no_finding():
    def mix(model, logits):
        model.bias = model.temperature + len(model.adapters)
        return logits

    model = Model(mix, layer=PlainLayer)
    log = audited(model)
    assert frozen(log) == []
    assert undeclared_text(log).startswith("changed 4 undeclared numbers in 1 capture: graphs ")
    assert model.bias is None or isinstance(model.bias, float)


def test_constants_of_the_architecture_are_one_note():
    log = audited(Model(layer=PlainLayer))
    (finding,) = log.findings
    assert (finding.kind, finding.severity) == ("architecture constants", "note")
    assert "Model.layers.0.eps = 1e-06" in finding.names
    assert not [each for each in finding.names if ".layers.1." in each]


@pytest.mark.parametrize("value", [LIMIT, 30.0, 0.8], ids=["upper case", "config", "knob"])
def test_upper_case_globals_and_fields_of_configurations_are_constants(value):
    def mix(model, logits):
        return logits * {LIMIT: LIMIT, 30.0: model.config.cap, 0.8: model.knob}[value]

    model = Model(mix, layer=PlainLayer)
    model.config, model.knob = SimpleNamespace(cap=30.0), 0.8
    log = audited(model)
    names = {name for each in log.findings for name in each.names}
    expected = {LIMIT: "test_undeclared.LIMIT = 7.5", 30.0: "Model.config.cap = 30.0"}
    assert expected.get(value, "Model.knob") in {name.replace("Model.mix.", "") for name in names}
    assert bool(frozen(log)) == (value == 0.8)


@pytest.mark.slow
def test_the_reference_model_has_no_finding():
    report = audit_target(
        reference_target("cpu", max_batch_size=2), only=["frozen"], batch_sizes=[2], device="cpu"
    )
    assert [each for each in report.findings if each.severity == "error"] == []
    searched = [each.text for each in report.checks if "undeclared" in each.text]
    assert len(searched) == 6


def test_a_value_without_which_the_capture_fails_is_a_constant():
    def mix(model, logits):
        return logits.view(-1, 27 + model.offset)

    log = audited(Model(mix, layer=PlainLayer))
    assert frozen(log) == []
    assert "Model.offset = 5" not in log.findings[0].names  # 5 is no argument of a node
    assert "graphs follow 0" in undeclared_text(log)


def test_a_declared_value_is_not_reported_again():
    model = Model(lambda m, x: x / m.temperature, layer=PlainLayer)
    setter = lambda value: setattr(model, "temperature", value)  # noqa: E731
    log = audited(model, host_values={"heat": (setter, [1.0, 0.5])})
    assert {(each.severity, each.kind) for each in frozen(log)} == {("error", "frozen value")}
    assert model.temperature == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mix", [None, *PLANTED])
def test_the_number_of_captures_does_not_grow_with_the_layers(mix, monkeypatch):
    counts = []
    for num_layers in (2, 32):
        captured, sizes = gk.Runner.recapture, []

        def counted(runner, *args, _captured=captured, _sizes=sizes, **options):
            _sizes.append(1)
            return _captured(runner, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(gk.Runner, "recapture", counted)
            planted = {} if mix is None else {"mix": PLANTED[mix]}
            log = audited(Model(num_layers=num_layers, **planted))
        gains = [each for each in frozen(log) if "gain" in each.names[0]]
        assert {len(each.names) for each in gains} == {num_layers}
        counts.append(len(sizes))
    assert counts[0] == counts[1] <= 3 * 6


def test_what_is_left_when_the_captures_are_used_up_is_stated(monkeypatch):
    monkeypatch.setattr(undeclared, "MAX_CAPTURES", 2)
    model = Model(lambda m, x: x.relu() if m.is_greedy and m.offset > 4 else x, layer=PlainLayer)
    text = undeclared_text(audited(model))
    assert "; not searched within 2 captures: " in text


def test_an_interrupted_search_restores_every_value():
    def mix(model, logits):
        if (model.temperature, model.adapters) != (1.0, ["one", "two"]):
            raise KeyboardInterrupt
        return logits

    model = Model(mix, layer=PlainLayer)
    with pytest.raises(KeyboardInterrupt):
        audited(model)
    assert (model.temperature, model.adapters) == (1.0, ["one", "two"])


def test_captures_that_are_not_deterministic_are_not_searched():
    calls = []

    def mix(_model, logits):
        calls.append(1)
        return logits + len(calls)

    text = undeclared_text(audited(Model(mix, layer=PlainLayer)))
    assert text.endswith("not searched, captures are not deterministic")


@pytest.mark.parametrize("value", [True, False, 0, 1, 2, 64, -1, 0.0, 1.0, -2.5, 1e-6, math.inf])
def test_a_changed_value_has_the_same_type_and_is_no_larger_index(value):
    changed = {changed_value(value, index) for index in range(20)}
    assert value not in changed
    assert {type(each) for each in changed} == {type(value)}
    assert len(changed) == (20 if isinstance(value, float) else 1)
    if not isinstance(value, float):
        assert all(abs(each) <= max(abs(value), 2) for each in changed)


def frozen_of(model, **changes):
    """Return the findings of a report, which merges those of one cause."""
    target = target_of(model, **changes)
    report = audit_target(target, only=["frozen"], batch_sizes=[2], device="cpu")
    return [each for each in report.findings if each.kind == "frozen value"]


def taken(model, branch):
    """Return logits that go through other kernels if a branch is taken."""

    def mix(_model, logits):
        for _ in range(4):
            logits = logits.relu().exp() if branch(model) else logits.neg().tanh()
        return logits

    model.mix = mix
    return model


BRANCHES = {
    "Model.enabled": lambda m: "fast" in m.enabled,
    "Model.skipped": lambda m: 3 in m.skipped,
    "len(Model.adapters)": lambda m: len(m.adapters) > 1,
    "len(Model.empty)": lambda m: bool(m.empty),
    "Model.is_greedy": lambda m: m.is_greedy,
    "Model.offset": lambda m: m.offset > 4,
    "Model.temperature": lambda m: m.temperature > 0.9,
}


def branching(name):
    model = Model(layer=PlainLayer)
    model.enabled, model.skipped, model.empty = set(), {3, 5}, []
    return taken(model, BRANCHES[name])


@pytest.mark.parametrize("name", BRANCHES)
def test_a_frozen_branch_is_one_finding_with_the_path_of_what_decides_it(name):
    model = branching(name)
    (finding,) = frozen_of(model)
    assert (finding.severity, finding.names) == ("note", (name,))
    assert "the graph captured one case" in finding.text
    assert (model.enabled, model.skipped, model.empty) == (set(), {3, 5}, [])


@pytest.mark.parametrize("name", ["Model.enabled", "len(Model.empty)"])
def test_a_declared_branch_is_one_error_with_the_path_of_what_decides_it(name):
    model = branching(name)

    def set_branch(is_fast):
        model.enabled.clear()
        model.enabled.update({"fast"} if is_fast else ())
        model.empty[:] = [1] if is_fast else []

    (finding,) = frozen_of(model, host_values={"fast": (set_branch, [False, True])})
    assert finding.severity == "error"
    assert name in finding.names


def test_a_length_that_equals_a_size_of_the_model_is_searched():
    def mix(model, logits):
        return logits / len(model.adapters)

    model = Model(mix, layer=PlainLayer)
    model.adapters = [str(index) for index in range(HIDDEN)]
    (finding,) = frozen_of(model)
    assert finding.names == ("len(Model.adapters)",)
