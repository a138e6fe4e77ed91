"""The audit of what a forward does beside computing its output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.audit.runs.forward_trace import ForwardWatch
from graphkit.models.reference import reference_target
from graphkit.runners import RUNNERS
from graphkit.spec import ForwardMode
from tiny_target import VERIFY, TinyLayers, sample_batch, target_of

HIDDEN = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [mode for mode in RUNNERS if mode is not ForwardMode.STEP]


class Layers(TinyLayers):
    """Computes the logits, after ``step(model, inputs, hidden)`` has returned the hidden state."""

    def __init__(self, step, device="cpu"):
        super().__init__(HIDDEN, device)
        self.step = step

    def forward(self, inputs):
        hidden = self.step(self, inputs, self.embedding(inputs.input_ids))
        self.cache.index_copy_(0, inputs.out_cache_loc, hidden)
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def audited(step, device="cpu", model=None):
    """Return the findings of the audit of a forward."""
    target = target_of(model or Layers(step, device))
    return audit_target(target, only=["forward"], device=device).findings


def test_a_forward_without_effects_has_no_finding():
    assert audited(lambda _model, inputs, hidden: hidden + inputs.positions[:, None]) == ()


def increments_positions(_model, inputs, hidden):
    inputs.positions.add_(1)
    return hidden


def clears_a_view_of_lengths(_model, inputs, hidden):
    inputs.seq_lens.view(-1, 1)[1:2].zero_()
    return hidden


def clamps_positions(_model, inputs, hidden):
    inputs.positions.clamp_(min=0)
    return hidden


def replaces_ids(_model, inputs, hidden):
    torch.add(inputs.positions, 100, out=inputs.input_ids)
    return hidden


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("step", "op", "field", "row", "values"),
    [
        (increments_positions, "add_", "positions", 0, ("0", "1")),
        (clears_a_view_of_lengths, "zero_", "seq_lens", 1, ("5", "0")),
        (clamps_positions, "clamp_", "positions", None, ("", "")),
        (replaces_ids, "add", "input_ids", 0, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_write_is_named_by_node_field_and_line(step, op, field, row, values, device):
    (finding,) = audited(step, device)
    assert (finding.audit, finding.kind, finding.severity) == ("forward", "written input", "error")
    assert (finding.field, finding.row) == (field, row)
    name = f"`{finding.kernel}` (node {finding.node})"
    assert finding.text.startswith(f"{name} writes into the input field `{field}`. ")
    assert finding.source.endswith(f"in {step.__name__}")
    assert finding.module == "Layers"
    if device == "cpu":
        assert finding.kernel == op
    if values is not None:
        assert (finding.before, finding.after) == values


def overwriting(forward):
    """Return a forward, or one for each of several, that increments its positions."""
    if isinstance(forward, (list, tuple, nn.ModuleList)):
        return [overwriting(each) for each in forward]

    def overwrite(inputs):
        output = forward(inputs)
        inputs.positions.add_(1)
        return output

    return overwrite


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_write_is_found_in_every_mode(mode):
    """Draft steps run on positions that are no field of the batch."""
    target = reference_target(device="cpu", max_batch_size=1)
    target = replace(target, forwards={mode: overwriting(target.forwards[mode])})
    report = audit_target(target, only=["forward"], modes=[mode], device="cpu")
    (finding,) = report.findings
    assert (finding.kind, finding.field, finding.kernel) == ("written input", "positions", "add_")
    assert finding.source.endswith("in overwrite")
    assert finding.node is not None


@pytest.fixture
def hidden_write():
    """An operation that writes its argument, which its schema does not say, as a kernel may."""
    library = torch.library.Library("graphkit_forward_audit", "DEF")
    library.define("counted(Tensor x) -> Tensor")

    def counted(x):
        x.add_(1)
        return x.sum()

    library.impl("counted", counted, "CPU")
    yield torch.ops.graphkit_forward_audit.counted
    library._destroy()


def test_a_write_that_no_operation_declares_is_found_by_replaying_the_first_nodes(hidden_write):
    def step(_model, inputs, hidden):
        hidden = hidden + inputs.positions[:, None]
        hidden = hidden + hidden_write(inputs.positions)
        return hidden * 2

    (finding,) = audited(step)
    assert (finding.kernel, finding.field, finding.row) == ("counted", "positions", 0)
    assert (finding.before, finding.after) == ("0", "1")


def test_a_hidden_write_into_an_input_of_one_forward_is_found_without_a_node(hidden_write):
    """The ids of the first draft step are a field of the batch, those of the next one are not."""
    reference = reference_target(device="cpu", max_batch_size=1)

    def draft(inputs):
        output = reference.forwards[ForwardMode.DRAFT](inputs)
        hidden_write(inputs.input_ids)
        return output

    target = replace(reference, forwards={ForwardMode.DRAFT: draft})
    report = audit_target(target, only=["forward"], modes=[ForwardMode.DRAFT], device="cpu")
    first, second = report.findings
    assert (first.names, first.kernel) == (("topk_index",), "counted")
    assert (second.names, second.node) == (("input_ids",), None)
    assert second.text.startswith("the forward writes into the input field `input_ids`. ")


def drops(_model, _inputs, hidden):
    return F.dropout(hidden, 0.5, training=True)


def has_inactive_dropout(_model, _inputs, hidden):
    hidden = F.dropout(hidden, 0.5, training=False)
    rows = hidden[None, None]
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.0)[0, 0]


def samples(_model, _inputs, hidden):
    with gk.scope("sampler"):
        return hidden + torch.rand_like(hidden)


def adds_noise(_model, _inputs, hidden):
    return hidden + torch.rand_like(hidden)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [drops, adds_noise], ids=lambda step: step.__name__)
def test_random_draws_are_a_note_with_node_and_line(step, device):
    (finding,) = audited(step, device)
    assert (finding.kind, finding.severity) == ("random draw", "note")
    assert finding.source.endswith(f"in {step.__name__}")
    assert finding.node is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [has_inactive_dropout, samples], ids=lambda step: step.__name__)
def test_no_note_of_samplers_and_of_dropout_that_is_off(step, device):
    assert audited(step, device) == ()


def test_a_draw_from_a_generator_of_the_model_is_found():
    """The recorder does not capture such a forward; CUDA does if the graph knows the generator."""
    generator = torch.Generator()
    model = Layers(lambda _model, _inputs, hidden: hidden + torch.rand(1, generator=generator))
    with target_of(model).runner(VERIFY, device="cpu") as runner:
        watch = ForwardWatch(runner.step, runner.device)
        with watch.watching():
            runner.run_padded(sample_batch(VERIFY, 2, 0))
    assert [each.op for each in watch.draws] == ["aten::rand.generator"]


def test_layers_with_dropout_share_a_note():
    class Dropping(Layers):
        def __init__(self):
            super().__init__(lambda model, _inputs, hidden: model.layers(hidden))
            self.layers = nn.Sequential(*(nn.Dropout(0.1) for _ in range(3)))

    (finding,) = audited(None, model=Dropping())
    assert "It does so 3 times." in finding.text
    assert finding.module == "layers.0"


def test_the_audit_restores_state_and_random_numbers():
    model = Layers(drops)
    with target_of(model).runner(VERIFY, device="cpu") as runner:
        runner.capture()
    model.cache.fill_(3.0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    audited(drops, model=model)
    assert torch.equal(torch.rand(1), expected)
    assert bool((model.cache == 3.0).all())
