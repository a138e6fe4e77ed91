"""Objects whose own code raises, such as lazy proxies: no walk over a forward's objects runs it."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit.host_objects.reachable_objects import ReachableObjects, walk_roots
from graphkit.audit.object_snapshot import ObjectSnapshot
from graphkit.graphs.recorded_graph import RecordedGraph


class Loaded(BaseException):
    """Raised by the code of an object that must not run; no handler of ``Exception`` stops it."""


def load(*_args, **_kwargs):
    raise Loaded


class Attributes:
    __getattr__ = load


class Attribute:
    __getattribute__ = load


class Class:
    __class__ = property(load)


class Dict:
    __dict__ = property(load)


class Property:
    scale = property(load)


class Comparison:
    __eq__ = __hash__ = __bool__ = load


class Text:
    def __repr__(self):
        raise ValueError

    __str__ = __format__ = __repr__


class Length(dict):
    __len__ = __iter__ = __bool__ = items = keys = values = get = __getitem__ = load


class Ordered(OrderedDict):
    __len__ = __iter__ = __bool__ = items = keys = values = get = __getitem__ = load


class Items(list):
    __len__ = __iter__ = __bool__ = __getitem__ = load


class Fields(tuple):
    __slots__ = ()
    __len__ = __iter__ = __bool__ = __getitem__ = load


class Queue(deque):
    __len__ = __iter__ = __bool__ = __getitem__ = load


class Number(float):
    __eq__ = __hash__ = __repr__ = __str__ = load


class Name(str):
    __slots__ = ()
    __eq__ = __hash__ = __repr__ = __str__ = load


class Module(ModuleType):
    __getattr__ = load


class Meta(type):
    __getattribute__ = __instancecheck__ = __subclasscheck__ = load


def of_meta():
    """Return a class whose attributes raise."""

    class OfMeta(metaclass=Meta):
        pass

    return OfMeta


class Slots:
    __slots__ = ("never_set",)
    __getattr__ = load


def wrapped():
    """Return a function that claims to wrap an object whose attributes raise."""

    def function():
        pass

    function.__wrapped__ = Attributes()
    return function


KINDS = {
    **{
        kind.__name__: kind
        for kind in (
            Attributes, Attribute, Class, Dict, Property, Comparison, Text, Length, Items, Fields,
            Ordered, Queue, Slots,
        )
    },
    "Number": lambda: Number(2.0),
    "Name": lambda: Name("text"),
    "Module": lambda: Module("lazy"),
    "Meta": of_meta,
    "OfMeta": lambda: type.__call__(of_meta()),
    "wrapped": wrapped,
    "bound": lambda: functools.partial(load, Attributes()),
    "method": lambda: SimpleNamespace(load=Attributes.__getattr__),
}  # fmt: skip

GLOBAL = None


def forwards(value):
    """Return forwards that reach a value in different ways, by name."""
    embedding = torch.nn.Embedding(32, 32)

    class Model(torch.nn.Module):
        by_class = value

        def __init__(self):
            super().__init__()
            self.embedding, self.items = embedding, [1, value]
            vars(self)["own"] = value  # an assignment would read the class of the value
            self.table, self.settings = {"one": value}, SimpleNamespace(inner=value)
            self.queue = deque([value])
            self.keys = {Text(): 1}

        @property
        def lazy(self):
            return load()

        def forward(self, inputs):
            _ = self.own, self.items, self.table, self.settings, self.queue, GLOBAL, self.by_class
            return gk.ForwardOutput(next_token_logits=self.embedding(inputs.input_ids))

    def closure(inputs):
        _ = value
        return gk.ForwardOutput(next_token_logits=embedding(inputs.input_ids))

    return {"model": Model(), "closure": closure}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["model", "closure"])
def test_a_capture_that_reaches_it_succeeds(make_runner, make_batch, monkeypatch, kind, way):
    value = KINDS[kind]()
    monkeypatch.setitem(globals(), "GLOBAL", value)
    forward = forwards(value)[way]
    runner = make_runner(forward, check=True)
    runner.capture()
    batch = make_batch(2, out_cache_loc=np.arange(1, 9))
    logits = runner.replay(batch).next_token_logits.clone()
    assert torch.equal(logits, runner.run_padded(batch).next_token_logits)
    assert runner.frozen_values(4) == []
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_and_a_snapshot_run_none_of_its_code(kind):
    value = KINDS[kind]()
    roots = walk_roots(forwards(value)["model"])
    before = ObjectSnapshot(roots, {})
    assert list(before.changes(ObjectSnapshot(roots, {}))) == []
    ReachableObjects(roots).restore()


@pytest.mark.parametrize("kind", ["Attributes", "Class", "Items", "OfMeta"])
def test_a_captured_function_that_reaches_it_is_captured(monkeypatch, kind):
    value = KINDS[kind]()
    monkeypatch.setitem(globals(), "GLOBAL", value)

    def double(rows):
        _ = value, GLOBAL
        return rows * 2

    with gk.capture(double, torch.ones(2, 3), batch_sizes=(2,)) as captured:
        assert captured(torch.ones(1, 3)).tolist() == [[2.0] * 3]


def test_a_capture_that_fails_after_its_graphs_closes_them(make_runner, monkeypatch):
    closed = []
    close = RecordedGraph.close
    monkeypatch.setattr(RecordedGraph, "close", lambda graph: closed.append(close(graph)))
    monkeypatch.setattr("graphkit.audit.host_objects.forward_objects.FrozenValues", load)
    runner = make_runner(forwards(1)["closure"])
    with pytest.raises(Loaded):
        runner.capture()
    assert len(closed) == len(runner.table.sizes)
    monkeypatch.undo()
    assert runner.status == "planned"
    runner.capture()
    runner.close()
