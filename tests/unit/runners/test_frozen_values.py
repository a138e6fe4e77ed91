"""Host numbers that have changed since capture, and that graphs keep."""

from __future__ import annotations

import contextvars
import copy
import gc
import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit.host_objects.host_numbers import HostNumbers

FACTOR = 2.0
LEVEL = contextvars.ContextVar("LEVEL", default=2.0)
THREAD = threading.local()
THREAD.scale = 2.0


class Kind(Enum):
    """A setting that is no number."""

    FAST, EXACT = 2.0, 3.0


class Defaults:
    """A class whose attributes are read, without an object of it and through a weak reference."""

    share = 2.0


OWNER = Defaults()
OWNER.own = 2.0


@dataclass(frozen=True, slots=True)
class Params:
    """A setting that is replaced as a whole."""

    scale: float = 2.0


class Scaled(nn.Module):
    """Multiplies its logits by what ``factor(self)`` returns."""

    share = 0.5

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 32)
        self.factor = factor
        self.temperature, self.is_greedy, self.unread = 1.0, True, 1.0
        self.adapters = ["one"]
        self.settings = SimpleNamespace(scale=3.0, scales=[4.0, 5.0])
        self.table = {"scale": 6.0, "steps": 0}
        self.mode, self.kind, self.bias, self.params = "fast", Kind.FAST, None, Params()
        self.scalar, self.gains, self.pair = np.float32(2.0), np.array([2.0, 3.0]), (2.0, "two")
        self.slope, self.owner = nn.LeakyReLU(0.5), weakref.ref(OWNER)
        self.items = partial(times, [2.0])

    def forward(self, inputs):
        self.table["steps"] += 1
        factor = self.factor(self)
        return gk.ForwardOutput(next_token_logits=self.embedding(inputs.input_ids) * factor)


@pytest.fixture
def batch(make_batch):
    return make_batch(2, out_cache_loc=np.arange(1, 9))


@pytest.fixture
def capture(make_runner):
    """``capture(factor, **settings)``: a captured runner of a ``Scaled``, and the model."""

    def make(factor, **settings):
        model = Scaled(factor)
        runner = make_runner(model, **settings)
        runner.capture(attribution=gk.Attribution(model))
        return runner, model

    return make


def changed(container, **values):
    """Return a function that changes a model, for a table of cases."""
    return lambda model: vars(container(model)).update(values)


def times(values, _):
    return values[0]


def append(model):
    model.adapters.append("two")


def change_item(model):
    model.settings.scales[1] = 1.0


def change_key(model):
    model.table["scale"] = 1.0


def change_class(_model):
    Scaled.share = 0.25


def change_global(_model):
    globals()["FACTOR"] = 1.0


def change_default(_model):
    Defaults.share = 1.0


def add_key(model):
    model.table["other"] = 1.0


CASES = {
    "Scaled.temperature": (lambda m: m.temperature, changed(lambda m: m, temperature=0.5)),
    "Scaled.is_greedy": (
        lambda m: 2.0 if m.is_greedy else 3.0, changed(lambda m: m, is_greedy=False)
    ),
    "len(Scaled.adapters)": (lambda m: len(m.adapters), append),
    "Scaled.settings.scale": (
        lambda m: 1 / m.settings.scale, changed(lambda m: m.settings, scale=1.0)
    ),
    "Scaled.settings.scales[1]": (lambda m: m.settings.scales[1], change_item),
    "Scaled.table['scale']": (lambda m: m.table["scale"], change_key),
    "Scaled.share": (lambda m: m.share, change_class),
    "test_frozen_values.FACTOR": (lambda _: FACTOR, change_global),
    "Defaults.share": (lambda _: Defaults.share, change_default),
    "Scaled.mode": (
        lambda m: 2.0 if m.mode == "fast" else 3.0, changed(lambda m: m, mode="exact")
    ),
    "Scaled.kind": (lambda m: m.kind.value, changed(lambda m: m, kind=Kind.EXACT)),
    "Scaled.bias": (lambda m: m.bias or 2.0, changed(lambda m: m, bias=1.0)),
    "Scaled.params.scale": (lambda m: m.params.scale, changed(lambda m: m, params=Params(1.0))),
    "Scaled.scalar": (lambda m: float(m.scalar), changed(lambda m: m, scalar=np.float32(1.0))),
    "Scaled.gains": (lambda m: float(m.gains[1]), lambda m: m.gains.fill(1.0)),
    "Scaled.pair": (lambda m: m.pair[0], changed(lambda m: m, pair=(1.0, "two"))),
    "Scaled.table": (lambda m: len(m.table), add_key),
    "Scaled.slope.negative_slope": (
        lambda m: m.slope(m.embedding.weight[0]), changed(lambda m: m.slope, negative_slope=0.1)
    ),
    "Scaled.owner().own": (lambda m: m.owner().own, lambda m: vars(m.owner()).update(own=1.0)),
    "Scaled.items.args[0][0]": (
        lambda m: m.items(m), lambda m: m.items.args[0].__setitem__(0, 1.0)
    ),
    "test_frozen_values.LEVEL.get": (lambda _: LEVEL.get(), lambda _: LEVEL.set(1.0)),
    "test_frozen_values.THREAD.scale": (
        lambda _: THREAD.scale, lambda _: setattr(THREAD, "scale", 1.0)
    ),
}  # fmt: skip
"""Name of the number: how the forward reads it, and what changes it."""


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    """Restore the class and the module that tests change."""
    monkeypatch.setattr(Scaled, "share", Scaled.share)
    monkeypatch.setattr(Defaults, "share", Defaults.share)
    monkeypatch.setattr(THREAD, "scale", THREAD.scale)
    monkeypatch.setattr(OWNER, "own", OWNER.own)
    monkeypatch.setitem(globals(), "FACTOR", FACTOR)
    level = LEVEL.set(2.0)
    yield
    LEVEL.reset(level)


@pytest.mark.parametrize("name", CASES)
def test_the_checking_mode_refuses_a_graph_that_keeps_a_changed_number(capture, batch, name):
    factor, change = CASES[name]
    runner, model = capture(factor, check=True)
    runner.replay(batch)
    change(model)
    for run in (runner.replay, runner.run, lambda batch: runner.stage(batch.batch_size)):
        with pytest.raises(gk.ReplayError) as caught:
            run(batch)
        text = str(caught.value)
        assert text.startswith("size 2: ")
        assert f"`{name}` has changed since capture (" in text
        assert "and the graph keeps its value in " in text
        assert "test_frozen_values.py:" in text


def test_an_object_that_hides_a_number_of_its_class_is_refused(capture, batch):
    runner, model = capture(lambda m: m.share, check=True)
    model.share = 0.25
    with pytest.raises(gk.ReplayError, match=r"`Scaled.share` has changed .*\(0.5, then 0.25\)"):
        runner.replay(batch)


def test_each_new_string_is_compared_and_objects_with_equal_numbers_are_none(capture, batch):
    def factor(model):
        return model.params.scale * (1.0 if model.mode in ("fast", "quick") else 3.0)

    runner, model = capture(factor, check=True)
    for model.params in (Params(), Params()):  # as in each step of an engine
        runner.replay(batch)
    model.mode = "quick"
    runner.replay(batch)
    model.mode = "exact"
    with pytest.raises(gk.ReplayError, match=r"`Scaled.mode` .*\('fast', then 'exact'\)"):
        runner.replay(batch)
    model.mode, model.params = "fast", Params(1.0)
    with pytest.raises(gk.ReplayError, match=r"`Scaled\.params\.scale` has changed"):
        runner.replay(batch)


def test_a_number_with_its_value_of_capture_is_accepted_again(capture, batch):
    runner, model = capture(lambda m: m.temperature, check=True)
    before = runner.replay(batch, clone=True).next_token_logits
    model.temperature = 0.5
    with pytest.raises(gk.ReplayError, match="argument 1 of `mul`"):
        runner.replay(batch)
    model.temperature = 1.0
    assert torch.equal(runner.replay(batch).next_token_logits, before)


def test_a_value_with_which_the_forward_fails_is_compared_again_when_it_changes(capture, batch):
    runner, model = capture(lambda m: m.temperature, check=True)
    model.temperature = None
    runner.replay(batch)
    model.temperature = 0.5
    with pytest.raises(gk.ReplayError, match=r"\(1.0, then 0.5\)"):
        runner.replay(batch)


def test_without_the_checking_mode_a_replay_accepts_everything(capture, batch, monkeypatch):
    monkeypatch.delenv("GRAPHKIT_CHECK", raising=False)
    runner, model = capture(lambda m: m.temperature)
    model.temperature = 0.5
    runner.replay(batch)
    (found,) = runner.frozen_values(2)
    assert (found.names, found.before, found.after) == (("Scaled.temperature",), "1.0", "0.5")


@pytest.mark.parametrize("size", [3, 8, None, [2]])
def test_a_size_that_was_not_captured_is_refused(capture, size):
    runner, _ = capture(lambda m: m.temperature)
    with pytest.raises(gk.SizeError, match="was not captured"):
        runner.frozen_values(size)


def test_a_change_is_compared_once_per_size_and_only_if_there_is_one(capture, batch):
    runner, model = capture(lambda m: m.temperature, check=True)
    recapture, sizes = runner.recapture, []

    def counted(**options):
        sizes.extend(options["batch_sizes"])
        return recapture(**options)

    runner.recapture = counted
    runner.replay(batch)
    assert sizes == []
    for turn in range(3):  # the forward counts in it, and no graph keeps it
        model.table["steps"] += turn + 1
        runner.replay(batch)
    assert sizes == [2] * 3  # twice without the change
    model.temperature = 0.5
    for _ in range(3):
        with pytest.raises(gk.ReplayError):
            runner.replay(batch)
    assert sizes == [2] * 8  # a difference must show again in the other order
    runner.frozen_values(4)
    assert set(sizes[8:]) == {4}


def test_a_comparison_leaves_the_model_as_it_is(capture, batch):
    def factor(model):
        model.cache = getattr(model, "cache", None) or {}
        return model.cache.setdefault(model.temperature, 2 * model.temperature)

    runner, model = capture(factor, check=True)
    model.temperature = 0.5
    before = copy.deepcopy((model.table, model.cache, model.adapters))
    with pytest.raises(gk.ReplayError):
        runner.replay(batch)
    assert (model.table, model.cache, model.adapters) == before
    assert model.temperature == 0.5


def test_an_interrupted_comparison_restores_the_numbers(capture, batch):
    stop = []

    def factor(model):
        if stop:
            raise KeyboardInterrupt
        return model.temperature * len(model.adapters)

    runner, model = capture(factor, check=True)
    model.temperature = 0.5
    model.adapters.append("two")
    stop.append(True)
    with pytest.raises(KeyboardInterrupt):
        runner.replay(batch)
    assert (model.temperature, model.adapters) == (0.5, ["one", "two"])
    stop.clear()
    with pytest.raises(gk.ReplayError):
        runner.replay(batch)


def test_numbers_that_no_code_of_the_forward_names_do_not_count():
    model = Scaled(lambda m: m.temperature)
    names = {each.name for each in HostNumbers(model).numbers}
    assert "Scaled.temperature" in names
    assert "Scaled.unread" not in names
    assert "Scaled.settings.scale" not in names


def new_parameter(model):
    model.embedding.weight = nn.Parameter(torch.ones(32, 32), requires_grad=False)


def new_data(model):
    model.embedding.weight.data = torch.ones(32, 32)


def new_module(model):
    model.embedding = nn.Embedding(32, 32)


def new_attribute(model):
    model.settings.bias = torch.ones(32)


REPLACEMENTS = {
    new_parameter: "Scaled.embedding.weight",
    new_data: "Scaled.embedding.weight",
    new_module: "Scaled.embedding.weight",
    new_attribute: "Scaled.settings.bias",
}


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_tensor_that_is_replaced_is_refused_with_its_path_and_line(make_runner, batch, replace):
    model = Scaled(lambda m: m.settings.bias)
    model.settings.bias = torch.zeros(32)
    runner = make_runner(model, check=True)
    runner.capture(attribution=gk.Attribution(model))
    runner.replay(batch)
    replace(model)
    name = REPLACEMENTS[replace]
    for _ in range(2):
        with pytest.raises(gk.ReplayError) as caught:
            runner.replay(batch)
        text = str(caught.value)
        assert f"size 2: `{name}` is another tensor than at capture, and the graph reads" in text
        assert "test_frozen_values.py:" in text
        assert text.endswith("Write the new values into the tensor in place, or capture again.")
    (found,) = runner.frozen_values(4)
    assert found.names == (name,)


def test_what_no_graph_reads_from_its_capture_may_be_replaced(make_runner, batch):
    """A tensor that the forward sets in each step, and one that it does not read."""

    def factor(model):
        model.settings.seen = model.embedding.weight * 2
        return model.settings.seen[0]

    model = Scaled(factor)
    model.settings.unread = torch.zeros(32)
    runner = make_runner(model, check=True)
    runner.capture()
    model.settings.unread = torch.ones(32)
    runner.fall_back(batch)
    model.embedding.weight.data.fill_(2.0)
    for _ in range(2):
        runner.replay(batch)
    assert runner.frozen_values(2) == []


def test_a_proxy_whose_object_is_gone_does_not_prevent_the_walk():
    class Owner:
        pass

    model = Scaled(lambda m: m.temperature)
    model.settings.owner = weakref.proxy(Owner())
    assert "Scaled.temperature" in {each.name for each in HostNumbers(model).numbers}


def test_items_and_the_length_of_one_list_may_change_at_once():
    model = Scaled(lambda m: m.settings.scales[1] / len(m.settings.scales))
    host = HostNumbers(model)
    values = {each: 1 if each.is_length else 0.5 for each in host.numbers if "scales" in each.name}
    assert len(values) == 3
    with host.varied(dict(sorted(values.items(), key=lambda each: not each[0].is_length))):
        assert model.settings.scales == [0.5]
    assert model.settings.scales == [4.0, 5.0]


def test_a_runner_is_freed_without_a_collection(capture, make_runner):
    runner = make_runner(Scaled(lambda m: m.temperature), check=True)
    runner.capture()
    frozen = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert frozen() is None
    finally:
        gc.enable()


def test_a_set_that_changes_is_named(make_runner, batch):
    model = Scaled(lambda m: 2.0 if "fast" in m.names else 3.0)
    model.names = {"fast"}
    runner = make_runner(model, check=True)
    runner.capture()
    runner.replay(batch)
    model.names.discard("fast")
    text = r"`Scaled.names` has changed since capture \(\{'fast'\}, then an empty set\)"
    with pytest.raises(gk.ReplayError, match=text):
        runner.replay(batch)
    assert model.names == set()
