"""Tensors that a forward leaves in objects, which replays do not set."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphkit as gk
from tiny_target import VERIFY, VOCAB, WIDTH, small_target

HIDDEN = 8
AUX = None
TABLE: dict[str, torch.Tensor] = {}
THREAD, VARIABLE = threading.local(), ContextVar("VARIABLE", default=None)
CTX = SimpleNamespace(slots=None, hidden=None, tokens=0, lens=None, metadata=None)


@dataclass(slots=True)
class Kept:
    """Keeps states in a slot."""

    states: torch.Tensor | None = None


class Model(nn.Module):
    """Calls ``leave(self, hidden, inputs)``, which keeps something or not."""

    of_class: list[torch.Tensor] = []  # noqa: RUF012 - as models do

    def __init__(self, leave):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("pool", torch.zeros(64, HIDDEN))
        self.register_buffer("last", torch.zeros(1))
        self.leave = leave
        self.aux_states, self.by_name, self.recent = [], {}, deque(maxlen=2)
        self.state, self.table, self.slotted = None, None, Kept()
        self.inner = SimpleNamespace(deep=SimpleNamespace(states=[None, {}]))
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs):
        hidden = self.layer(self.embedding(inputs.input_ids))
        hidden = hidden + _changed(self.leave(self, hidden, inputs), hidden)
        return gk.ForwardOutput(next_token_logits=self.head(hidden))


def _changed(result, hidden):
    return result if isinstance(result, torch.Tensor) else torch.zeros_like(hidden)


def make_target(forward, batch_sizes=(1, 4), **settings):
    return small_target(forward, requests=max(batch_sizes), batch_sizes=[*batch_sizes], **settings)


def audited(forward, batch_sizes=(1, 4), **settings):
    target = make_target(forward, batch_sizes, **settings)
    report = gk.audit_target(target, only=["warmup"], device="cpu")
    return [each for each in report.findings if each.severity != "note"], report


def attribute(model, hidden, inputs):
    model.state = hidden * 2


def fresh_list(model, hidden, inputs):
    model.aux_states = []
    for scale in (1, 2):
        model.aux_states.append(hidden * scale)


def cleared_list(model, hidden, inputs):
    model.aux_states.clear()
    model.aux_states.append(hidden * 2)


def growing_list(model, hidden, inputs):
    model.aux_states.append(hidden * 2)


def item_of_a_dict(model, hidden, inputs):
    model.by_name["low"] = hidden * 2


def ordered(model, hidden, inputs):
    model.by_name = OrderedDict(low=hidden * 2)


def ring(model, hidden, inputs):
    model.recent.append(hidden * 2)


def nested(model, hidden, inputs):
    model.inner.deep.states[1]["low"] = hidden * 2


def slot(model, hidden, inputs):
    model.slotted.states = hidden * 2


def buffer(model, hidden, inputs):
    model.last = hidden.sum(1)


def class_attribute(model, hidden, inputs):
    model.of_class[:] = [hidden * 2]


def global_variable(model, hidden, inputs):
    global AUX
    AUX = hidden * 2


def item_of_a_global(model, hidden, inputs):
    TABLE["low"] = hidden * 2


def of_a_function(model, hidden, inputs):
    of_a_function.states = hidden * 2


def of_the_inputs_too(model, hidden, inputs):
    _ = inputs.seq_lens
    model.seq_lens = hidden * 2


def of_a_local_name(model, hidden, inputs):
    state = hidden * 2
    model.state = state


def item_of_a_local_name(model, hidden, inputs):
    low = hidden * 2
    model.by_name.__setitem__("low", low)


def of_a_thread(model, hidden, inputs):
    THREAD.states = hidden * 2


def of_a_context(model, hidden, inputs):
    VARIABLE.set(hidden * 2)


LEAVES = {
    attribute: "Model.state",
    fresh_list: "Model.aux_states[0]",
    cleared_list: "Model.aux_states[0]",
    growing_list: "Model.aux_states[",
    item_of_a_dict: "Model.by_name['low']",
    ordered: "Model.by_name['low']",
    ring: "Model.recent[",
    nested: "Model.inner.deep.states[1]['low']",
    slot: "Model.slotted.states",
    buffer: "Model.last",
    class_attribute: "Model.of_class[0]",
    global_variable: "test_side_outputs.AUX",
    item_of_a_global: "test_side_outputs.TABLE['low']",
    of_a_function: "Model.leave.states",
    of_the_inputs_too: "Model.seq_lens",
    of_a_local_name: "Model.state",
    item_of_a_local_name: "Model.by_name['low']",
    of_a_thread: "test_side_outputs.THREAD.states",
    of_a_context: "test_side_outputs.VARIABLE.get",
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setitem(globals(), "AUX", None)
    monkeypatch.setitem(TABLE, "low", torch.zeros(2))
    monkeypatch.setattr(Model, "of_class", [])


@pytest.mark.parametrize("leave", LEAVES, ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("batch_sizes", [(1, 4), (4,)], ids=str)
def test_what_a_forward_leaves_is_an_error_with_its_path_and_line(leave, batch_sizes):
    found, _ = audited(Model(leave), batch_sizes)
    (finding,) = [each for each in found if each.kind == "side output"]
    assert finding.severity == "error"
    assert finding.names[0].startswith(LEAVES[leave])
    assert finding.source.endswith(f"in {leave.__name__}")
    assert len(found) == 1, [each.text for each in found]


def test_the_line_is_the_one_that_fills_an_emptied_list():
    (finding,), _ = audited(Model(cleared_list))
    line = cleared_list.__code__.co_firstlineno + 2
    assert f":{line} in cleared_list" in finding.source


def test_several_of_one_line_are_one_finding():
    (finding,), _ = audited(Model(fresh_list))
    assert finding.names == ("Model.aux_states[0]", "Model.aux_states[1]")
    assert "leaves a tensor in `Model.aux_states[0]` (float32 [4, 8]) and 1 more." in finding.text


def test_a_closure_and_a_hook():
    kept, model = [], Model(lambda *_: None)

    def forward(inputs):
        kept[:] = [inputs.input_ids * 2]
        return model(inputs)

    (finding,), _ = audited(forward)
    assert finding.names == ("forward.kept[0]",)

    states = {}
    model.layer.register_forward_hook(lambda *call: states.update(last=call[2]))
    (finding,), _ = audited(model)
    assert finding.names[0].startswith("Model.layer._forward_hooks[")
    assert finding.names[0].endswith(".states['last']")


def test_an_attribute_of_a_model_that_a_function_closes_over():
    model = Model(fresh_list)

    def forward(inputs):
        return model(inputs)

    (finding,), _ = audited(forward)
    assert finding.names[0] == "forward.model.aux_states[0]"


def in_place(model, hidden, inputs):
    model.pool[inputs.out_cache_loc] = hidden


def rotary(model, hidden, inputs):
    if model.table is None:
        model.table = torch.arange(64)[:, None] * torch.ones(HIDDEN)
    return model.table[inputs.positions]


def rebuilt(model, hidden, inputs):
    model.table = torch.arange(64)[:, None] * torch.ones(HIDDEN)
    return model.table[inputs.positions]


def own_table_by_size(model, hidden, inputs):
    key = inputs.num_tokens
    if key not in model.by_name:
        model.by_name[key] = torch.arange(key)


def context(model, hidden, inputs):
    CTX.slots, CTX.lens = inputs.out_cache_loc, inputs.seq_lens
    CTX.tokens = inputs.num_tokens
    CTX.metadata = SimpleNamespace(positions=inputs.positions, rows=[inputs.req_pool_indices])
    return CTX.slots[:, None].float().expand_as(hidden) * CTX.tokens


def replaced_context(model, hidden, inputs):
    global CTX
    CTX = SimpleNamespace(slots=inputs.out_cache_loc, tokens=inputs.num_tokens)


def view_of_the_inputs(model, hidden, inputs):
    model.state = inputs.positions.view(-1, WIDTH)[:, 0]


def local(model, hidden, inputs):
    kept = [hidden * 2]
    return kept[0]


def restored(model, hidden, inputs):
    model.state = hidden * 2
    result = model.state + 1
    model.state = None
    return result


@pytest.mark.parametrize(
    "leave",
    [in_place, rotary, rebuilt, own_table_by_size, context, replaced_context, view_of_the_inputs,
     local, restored],
)  # fmt: skip
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("batch_sizes", [(1, 4), (4,)], ids=str)
def test_what_is_no_side_output(leave, filled, batch_sizes, monkeypatch):
    model = Model(leave)
    context = SimpleNamespace(slots=torch.zeros(2), hidden=None, tokens=3, lens=torch.ones(1))
    empty = SimpleNamespace(slots=None, hidden=None, tokens=0, lens=None, metadata=None)
    monkeypatch.setitem(globals(), "CTX", context if filled else empty)
    found, report = audited(model, batch_sizes, mutable_state={"pool": model.pool})
    assert found == []
    assert report.findings == ()


def own_use(model, hidden, inputs):
    CTX.hidden = hidden * 2
    return CTX.hidden + 1


def joined(model, hidden, inputs):
    model.aux_states = [hidden, hidden * 2]
    return torch.stack(model.aux_states).sum(0)


def read_item(model, hidden, inputs):
    TABLE["low"] = hidden * 2
    return TABLE["low"]


@pytest.mark.parametrize("leave", [own_use, joined, read_item])
def test_what_the_forward_reads_itself_is_a_note(leave):
    found, report = audited(Model(leave))
    assert found == []
    (finding,) = report.findings
    assert (finding.kind, finding.severity) == ("side output", "note")


def test_the_host_is_restored():
    model, captured = Model(growing_list), Model(growing_list)
    audited(model)
    with make_target(captured).runner(VERIFY, device="cpu") as runner:
        runner.capture()
    assert len(model.aux_states) == len(captured.aux_states) > 0


@pytest.mark.parametrize("leave", [attribute, fresh_list, cleared_list])
def test_a_capture_in_the_checking_mode_warns_of_a_side_output(leave, caplog):
    with make_target(Model(leave)).runner(VERIFY, device="cpu", check=True) as runner:
        runner.capture()
    (warning,) = [each for each in caplog.records if "leaves a tensor" in each.getMessage()]
    name = "state" if leave is attribute else "aux_states[0]"
    assert f"the forward leaves a tensor in `Model.{name}` (float32 [" in warning.getMessage()


@pytest.mark.parametrize(("leave", "check"), [(attribute, False), (lambda *_: None, True)])
def test_a_capture_warns_in_the_checking_mode_and_of_side_outputs_alone(leave, check, caplog):
    with make_target(Model(leave)).runner(VERIFY, device="cpu", check=check) as runner:
        runner.capture()
    assert not [each for each in caplog.records if "leaves a tensor" in each.getMessage()]
